"""What a fabric needs of a site, each fact found out and judged: `fabrictool doctor`."""
