# Prints ``ID NAME COMMENT`` a line of our jobs that are not over.
#@living@
