"""One file per engine: command line, flags, readiness, metrics names; and the embedded default engine."""
