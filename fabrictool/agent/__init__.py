"""Lives beside engines on a node: supervises, advertises, forwards, drains before the walltime."""
