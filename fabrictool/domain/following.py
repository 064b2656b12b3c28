"""What the operator's side and agents must agree on, where jobs follow each other."""

LONGEST_LEAD = 2 / 3
"""Of an allocation: of a short one no more is spent on two at once."""
SUBMITTED_WITH = ("HOME", "PATH", "USER", "LOGNAME", "SLURM_CONF")
"""Variables that a submission from inside a job has: what the job is told of itself would be taken for options of the
next one.
"""
