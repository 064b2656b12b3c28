"""The job that follows this one, submitted from inside it: where a site allows that, no operator's machine is needed.

``next`` in the run folder holds what may follow, each with a session of its own, as `apply` prepared it, and the
program that submits the first of them. Its operation is the one that `reconcile` would give it: whoever comes first has
it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from typing import TYPE_CHECKING

from fabrictool.agent.process import signal_group
from fabrictool.base.errors import FabrictoolError
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.following import LONGEST_LEAD, SUBMITTED_WITH

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.clock import Clock

LOOK_S = 5.0
"""Between two looks at what is prepared, and whether a successor serves."""
AGAIN_S, LONGEST_AGAIN_S = 60.0, 900.0
"""After a submission that failed, and at most: a controller may be away for a while, and some refuse for ever."""
SUBMIT_S = 300.0
ACCEPTED = ("submitted", "already", "adopted")


class NextJob:
    """Prepared ones, the first of which is submitted in time."""

    def __init__(self, folder: RunFolder, clock: Clock, note: Callable[[str, str, str], None]) -> None:
        self._folder, self._clock, self._note = folder, clock, note
        self._said = ""

    async def run(self, wanted: Callable[[], bool], ends_at: Callable[[], float | None]) -> str:
        """Until the job that follows serves; returns why this one may leave. While it is not `wanted` nothing is looked
        for. `ends_at` is asked for the wall second at which the allocation ends again and again, for clocks are set.
        """
        began = self._clock.wall()
        while True:
            first, lead = await asyncio.to_thread(_prepared, self._folder) if wanted() else ("", 0.0)
            end = ends_at()
            if end is not None and first and end - self._clock.wall() <= min(lead, (end - began) * LONGEST_LEAD):
                break
            await asyncio.sleep(LOOK_S)
        former = self._folder
        while first:
            follower = RunFolder(former.path.parent / first.partition("-")[2])
            await self._submit(former, first)
            if await self._served(follower):
                return f"{follower.path.name} serves in its place"
            former = follower  # it took along what may follow
            first, _ = await asyncio.to_thread(_prepared, former)
        self._note("no-next-job", former.path.name, "it ended before it served, and no other is prepared")
        return await asyncio.Future()

    def forget(self) -> None:
        """Remove what is prepared still: no other process would submit it, and keys of sessions are in it."""
        shutil.rmtree(self._folder.path / "next", ignore_errors=True)

    # -- internals --------------------------------------------------------------------------------------------

    async def _submit(self, former: RunFolder, first: str) -> None:
        """Until the scheduler has taken `first`, which is prepared beside `former`."""
        pause = AGAIN_S
        while True:
            if await self._submitted(former, first):
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_AGAIN_S)

    async def _served(self, follower: RunFolder) -> bool:
        """Until it serves, or else has said that it is over."""
        while True:
            ready, over = await asyncio.to_thread(_state_of, follower)
            if ready or over:
                return ready
            await asyncio.sleep(LOOK_S)

    async def _submitted(self, former: RunFolder, first: str) -> bool:
        operation = first.partition("-")[2]
        try:
            process = await asyncio.create_subprocess_exec(
                "sh",
                str(former.path / "next" / "submit.sh"),
                str(former.path.parents[2]),
                former.path.parent.name,
                former.path.name,
                first,
                env={name: os.environ[name] for name in SUBMITTED_WITH if name in os.environ},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return self._refused(operation, str(error))
        output = b""
        try:
            async with asyncio.timeout(SUBMIT_S):
                output, _ = await process.communicate()
        except TimeoutError:
            return self._refused(operation, f"nothing was said within {SUBMIT_S:.0f} s")
        finally:
            if process.returncode is None:
                signal_group(process.pid, signal.SIGKILL)
                await process.wait()
        text = output.decode(errors="replace")
        verdict, job, why = _verdict(text, operation)
        if verdict not in ACCEPTED:
            return self._refused(operation, f"{verdict}: {why}" if verdict else text.strip()[-200:])
        self._note("next-job", operation, f"job {job} follows this one")
        return True

    def _refused(self, operation: str, why: str) -> bool:
        if why != self._said:
            self._note("no-next-job", operation, f"it could not be submitted from here: {why}")
        self._said = why
        return False


def _prepared(folder: RunFolder) -> tuple[str, float]:
    """The name of the first that is prepared there, or "", and how long before an end it is submitted, in seconds."""
    place = folder.path / "next"
    try:
        names = sorted(path.name for path in place.iterdir() if path.name[:1].isdecimal())
        lead = float((place / "lead").read_text())
    except (OSError, ValueError):  # none, or they are being replaced
        names, lead = [], 0.0
    return (names[0] if names else ""), lead


def _state_of(follower: RunFolder) -> tuple[bool, bool]:
    """Whether it serves, and whether it has said that it is over."""
    try:
        return follower.health().get("ready") is True, bool(follower.exit())
    except FabrictoolError:
        return False, False


def _verdict(text: str, operation: str) -> tuple[str, str, str]:
    """Verdict, job and reason, of what the program printed."""
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) == 4 and fields[0] == operation:
            return fields[1], fields[2], fields[3]
    return "", "", ""
