"""Frozen domain types without I/O: what every other room talks about."""
