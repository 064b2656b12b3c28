"""Models' files as a resource: listed by their hashes, staged on sites, compared before anything starts from them."""
