"""Where an operator sees a fault: which row of the first screen tells of it, live and in a replay of the recording."""

import asyncio
from dataclasses import dataclass

from fabrictool.status.sightings import read_recording
from fabrictool.tui.app import Top
from fabrictool.tui.feeds import Playback
from fabrictool.tui.history import History, states_of
from fabrictool.tui.view import ScreenView

REPLICAS = {"a": "tiny/0", "b": "tiny/1"}
"""Cluster → the replica that is pinned there."""
LASTING = ("clock", "full_disk", "drained", "hold", "qos", "stopped_agent")
"""Faults that can be seen until they end; what the others broke is healed meanwhile."""
OTHER_ROWS = ("ends soon", "certificate", "slow", "flapping")
"""Of a replica, and of no fault of these."""
CLOCKS_S = 1.0
PASSING = ("resets",)
"""Connections that break are opened again: mostly there is nothing to see."""


@dataclass
class Fault:
    """One that was made, and when; `hits`: whether it concerns what serves."""

    name: str
    cluster: str
    begun: float
    hits: bool = True
    ended: float = 0.0
    down: bool = False
    """Its replica was not up when it began, after the fault before it: the row that stands there is then its row."""

    def shown_by(self, trouble, look):
        """What stood there before it does not count."""
        if self.name == "clock":
            return trouble.what == "warning" and f"clock of {self.cluster}'s" in trouble.why
        if self.name == "full_disk":
            return trouble.what == "warning" and "where the state is" in trouble.why
        if trouble.subject != REPLICAS[self.cluster] or trouble.what in OTHER_ROWS:
            return False
        if self.name == "hold":
            return "held" in trouble.why
        if trouble.what in ("lost", "missing"):
            return self.down or (trouble.since is not None and trouble.since >= self.begun - CLOCKS_S)
        return look.operator is not None and look.operator.at >= self.begun

    def known_in(self, looks):
        """Whether any look of its time knows that a replica is missing: one may be back before the next look."""
        there = [look for look in looks if self.begun <= look.at <= (self.ended or look.at)]
        return any(model.missing or model.ready < (model.planned or 0) for look in there if look.live is not None
                   for model in getattr(look.live, "models", ()))  # fmt: skip

    def shown_in(self, looks):
        """Positions of the looks at which a row tells of it, when it was to be seen."""
        history, positions = History(), []
        for at, look in enumerate(looks):
            history.add(look)
            if look.at < self.begun and look.gateway is not None:
                self.down = states_of(look.gateway).get(REPLICAS[self.cluster]) != "up"
            if self.begun <= look.at <= (self.ended or look.at):
                view = ScreenView(look, look.at, history)
                positions += [at] if any(self.shown_by(trouble, look) for trouble in view.troubles) else []
        return positions


def replayed(path, faults):
    """Fault → the first line of the replayed first screen that tells of it; "": none does."""

    async def rows():
        replay = Playback(read_recording(path))
        app = Top(replay, 3600.0)
        lines = {}
        async with app.run_test(size=(120, 36)) as pilot:
            for number, fault in enumerate(faults):
                positions = fault.shown_in(replay.looks)
                if not positions:
                    lines[number] = ""
                    continue
                app.action_step(positions[0] - replay.at)
                for _ in range(4):
                    await pilot.pause()
                trouble = next(trouble for trouble in app.view.troubles if fault.shown_by(trouble, replay.moment))
                begin = f" {trouble.subject} "
                mine = [line for line in app.as_text().splitlines() if line.startswith(begin) and trouble.what in line]
                lines[number] = mine[0] if mine else ""
        return lines

    return asyncio.run(rows())
