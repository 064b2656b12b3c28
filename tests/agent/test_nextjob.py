"""When a job has the next one submitted, and when it leaves for it; the program that submits is a script."""

import asyncio
import json

import pytest

from fabrictool.agent import nextjob
from fabrictool.agent.nextjob import NextJob
from fabrictool.base.runfolder import RunFolder
from tests.manual_clock import ManualClock

pytestmark = pytest.mark.asyncio

SECOND = "replica-m-0-g2-22222222"
THIRD = "replica-m-0-g3-33333333"
SUBMITS = 'echo "$@" >>"$1/asked"; printf "${4#*-}\\tsubmitted\\t42\\t\\n"\n'
FAILS_ONCE = f"""
verdict="submitted\\t42\\t"
[ -e "$1/asked" ] || verdict="refused\\t\\tno account"
echo "$@" >>"$1/asked"
printf "{SECOND}\\t$verdict\\n"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(nextjob, "LOOK_S", 0.01)
    monkeypatch.setattr(nextjob, "AGAIN_S", 0.01)
    place = tmp_path / "base/units/f/replica-m-0-g1-11111111"
    for name in (f"1-{SECOND}", f"2-{THIRD}"):
        (place / "next" / name).mkdir(parents=True)
    (place / "next/lead").write_text("600\n")
    (place / "next/submit.sh").write_text(SUBMITS)
    return place


def asked(folder):
    return (folder.parents[2] / "asked").read_text().splitlines() if (folder.parents[2] / "asked").exists() else []


def serving(folder, *, ready):
    there = folder.parent / SECOND
    there.mkdir(exist_ok=True)
    (there / "health.json").write_text(json.dumps({"ready": ready}))


class Followed:
    """A `NextJob` that runs, of an allocation of `seconds`."""

    def __init__(self, folder, seconds, *, wanted=True):
        self.clock, self.notes = ManualClock(), []
        end = None if seconds is None else self.clock.wall() + seconds
        self.next = NextJob(RunFolder(folder), self.clock, lambda *note: self.notes.append(note))
        self.running = asyncio.create_task(self.next.run(lambda: wanted, lambda: end))

    @classmethod
    async def begun(cls, *arguments, **more):
        """That has looked once: the allocation counts from there."""
        followed = cls(*arguments, **more)
        await followed.a_while()
        return followed

    async def a_while(self):
        for _ in range(20):
            await asyncio.sleep(0.01)

    async def until(self, condition):
        while not condition():
            assert not self.running.done()
            await asyncio.sleep(0.01)

    async def end(self):
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)


async def test_it_is_submitted_in_time_and_not_before_and_left_to_when_it_serves(folder):
    followed = await Followed.begun(folder, 3600)
    followed.clock.advance(2999)
    await followed.a_while()
    assert asked(folder) == []
    followed.clock.advance(2)
    await followed.until(lambda: asked(folder))
    base = folder.parents[2]
    assert asked(folder) == [f"{base} f {folder.name} 1-{SECOND}"]
    serving(folder, ready=False)
    await followed.a_while()
    assert not followed.running.done()
    serving(folder, ready=True)
    assert await followed.running == f"{SECOND} serves in its place"
    assert [note[:2] for note in followed.notes] == [("next-job", SECOND)]
    followed.next.forget()
    assert not (folder / "next").exists(), "no key is left behind"
    assert "42" in followed.notes[0][2]


async def test_of_a_short_allocation_no_more_than_two_thirds_are_spent_on_two(folder):
    followed = await Followed.begun(folder, 300)
    followed.clock.advance(99)
    await followed.a_while()
    assert asked(folder) == []
    followed.clock.advance(2)
    await followed.until(lambda: asked(folder))
    await followed.end()


async def test_a_refusal_is_said_once_and_tried_again(folder):
    (folder / "next/submit.sh").write_text(FAILS_ONCE)
    followed = await Followed.begun(folder, 600)
    followed.clock.advance(590)
    await followed.until(lambda: len(followed.notes) == 2)
    assert [note[0] for note in followed.notes] == ["no-next-job", "next-job"]
    assert "refused: no account" in followed.notes[0][2]
    await followed.end()


async def test_a_program_that_says_nothing_is_told_of(folder):
    (folder / "next/submit.sh").write_text("echo broken >&2; exit 3\n")
    followed = await Followed.begun(folder, 600)
    followed.clock.advance(590)
    await followed.until(lambda: followed.notes)
    await followed.a_while()
    assert followed.notes == [("no-next-job", SECOND, "it could not be submitted from here: broken")]
    await followed.end()


@pytest.mark.parametrize(("seconds", "wanted"), [(None, True), (600, False)])
async def test_nothing_is_submitted_without_an_end_or_where_nobody_wants_it(folder, seconds, wanted):
    followed = await Followed.begun(folder, seconds, wanted=wanted)
    followed.clock.advance(599)
    await followed.a_while()
    assert asked(folder) == []
    await followed.end()


async def test_after_one_that_ends_before_it_serves_comes_the_next_and_then_none(folder):
    followed = await Followed.begun(folder, 600)
    followed.clock.advance(590)
    await followed.until(lambda: asked(folder))
    there = folder.parent / SECOND
    (folder / "next").rename(folder / "former")  # as the program does: the rest goes along
    (there / "next" / f"2-{THIRD}").mkdir(parents=True)
    for name in ("lead", "submit.sh"):
        (there / "next" / name).write_text((folder / "former" / name).read_text())
    (there / "exit.json").write_text('{"code": 1, "reason": "the engine failed"}')
    await followed.until(lambda: len(asked(folder)) == 2)
    assert asked(folder)[1].split()[2:] == [SECOND, f"2-{THIRD}"]
    (folder.parent / THIRD).mkdir()
    (folder.parent / THIRD / "exit.json").write_text('{"code": 1, "reason": "the engine failed"}')
    await followed.until(lambda: followed.notes[-1][0] == "no-next-job")
    assert followed.notes[-1][1] == THIRD
    await followed.a_while()
    assert not followed.running.done(), "it goes on until its own end"
    await followed.end()
