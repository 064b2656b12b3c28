"""The shell programs for login nodes (``clusters/shell/*.sh``), with a scheduler's words put in.

Every program is one argument of ``sh -c`` with its data in the arguments after it and on stdin, so nothing is quoted
into it and nothing stays installed there. Its first two arguments are the base folder and the fabric.
"""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fabrictool.clusters.schedulers.protocol import Scheduler

REFUSED = (
    "[Ii]nvalid|violates|not permitted|Access/permission|No partition|exceeds|allocation failure|unrecognized option|"
    "Unable to open file|not available|job not submitted|rejected|unknown resource|Job not submitted|Unknown queue|"
    "Illegal attribute|Unauthorized Request"
)
"""What a scheduler says when no job was made (an extended regular expression); believed only after a look that found
none."""

PASSING = r"Unable to contact|Connection refused|Socket timed out|(QOS|Assoc)\w*Submit\w*Limit"
"""Of these, what ends by itself; limits on the number of jobs are such, limits on their length are not."""


def program(name: str, **words: str) -> str:
    """The text of ``NAME.sh`` with each ``#@WORD@`` replaced."""
    return _file("root") + script(name, **words)


def script(name: str, **words: str) -> str:
    """The same, as a file that lies there and finds its folder by itself."""
    text = _file(name)
    for word, value in words.items():
        text = text.replace(f"#@{word}@", value)
    return text


def _file(name: str) -> str:
    return (resources.files("fabrictool.clusters") / "shell" / f"{name}.sh").read_text()


def come_back_program() -> str:
    return program("come-back", crontab=_file("crontab"))


def forget_program() -> str:
    return program("forget", crontab=_file("crontab"))


def survey_program(scheduler: Scheduler, *, brief: bool) -> str:
    """Prints sections for `survey.read_survey`."""
    return program("survey", prelude=scheduler.prelude(), scheduler=scheduler.survey(brief=brief))


def submit_program(scheduler: Scheduler) -> str:
    """Submits at most once; see the file."""
    return program("submit", **_submitting(scheduler))


def follow_program(scheduler: Scheduler) -> str:
    """The same from inside a job; see the file."""
    return program("follow", **_submitting(scheduler))


def _submitting(scheduler: Scheduler) -> dict[str, str]:
    """In this order, for the first holds places of the others."""
    words = {"prelude": scheduler.prelude(), "lookup": scheduler.lookup(), "refused": REFUSED}
    return {"submitting": _file("submitting"), **words}


def prune_program(scheduler: Scheduler) -> str:
    """Finds and removes what no fabric uses; see the file."""
    return program("prune", prelude=scheduler.prelude(), living=scheduler.living())


def signal_program(scheduler: Scheduler, *, kill: bool) -> str:
    signal = scheduler.kill() if kill else scheduler.stop()
    return program("signal", prelude=scheduler.prelude(), signal=signal)
