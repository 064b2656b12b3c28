"""Where the state of a fabric lies: on this machine, on a branch of a Git repository, or behind an HTTP server."""
