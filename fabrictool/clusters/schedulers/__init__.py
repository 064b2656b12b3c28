"""Facts in, commands out, without I/O: one file a scheduler. `programs` holds the shell that runs on login nodes."""
