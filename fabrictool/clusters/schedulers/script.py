"""The job's own script, the same for every scheduler but for a few words."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from fabrictool.clusters.schedulers.protocol import ENDS_AT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.clusters.schedulers.protocol import Job

_NOTIFIED = """\
(trap '' USR1 USR2; exec {line}) &
child=$!
trap 'kill -TERM "$child"' USR1 USR2 TERM
wait "$child"; wait "$child"
"""
"""The first wait ends with the signal, the second with the agent."""
_PATH = "/usr/local/bin:/usr/bin:/bin"


# Wide: these are the words in which schedulers differ.
def job_script(
    job: Job,
    *,
    identity: str,
    ends_at: str,
    programs: str,
    run: Sequence[str],
    notified: bool = False,
    claimed: Sequence[str] = (),
) -> str:
    """POSIX shell, without a secret in it.

    `claimed` are lines that come right after the claim, before anything that takes time.

    `identity` is the shell word for the job's own id, `ends_at` a command that prints the wall second of its end;
    `notified`: the scheduler warns the whole process group with USR1 or USR2, of which the agent is told by TERM. The
    first act is the last line of defence of at-most-once: a second run of the same job, which somebody requeued, and a
    second job of the same operation find the first one's mark and end. A hard link is the one act that is atomic on
    every shared file system that we know of.
    """
    path = f"{programs}:{_PATH}" if programs and programs not in _PATH.split(":") else _PATH
    line = " ".join('"$ends"' if word == ENDS_AT else shlex.quote(word) for word in run)
    lines = [
        "#!/bin/sh",
        f"# fabrictool: {job.address} of {job.fabric}, operation {job.operation}",
        f"export HOME={shlex.quote(job.home)} PATH={shlex.quote(path)}",
        "umask 077",
        f"cd {shlex.quote(job.folder)} || exit 66",
        f"me={identity}",
        'if [ -e "claim.$me" ]; then echo "job $me runs again, and a session never runs twice: it ends"; exit 0; fi',
        'printf "%s\\n" "$me" >"claim.$me"',
        'ln "claim.$me" claim 2>/dev/null',
        'if [ "$(cat claim)" != "$me" ]; then echo "this operation is job $(cat claim); $me ends"; exit 0; fi',
        *claimed,
        *job.setup,
        f"ends=$({ends_at})",
        *(_NOTIFIED.format(line=line).splitlines() if notified else [f"exec {line}"]),
    ]
    return "\n".join(lines) + "\n"
