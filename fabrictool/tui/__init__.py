"""Live status in the terminal: reads status documents only, changes nothing."""
