"""When a gateway that joins others says that it serves."""

import asyncio
from types import SimpleNamespace

import pytest

from fabrictool.gateway import settling
from fabrictool.gateway.settling import SETTLE_S, Settling
from tests.manual_clock import ManualClock

pytestmark = pytest.mark.asyncio
HUB, AGENT, DEAD = b"hub", b"agent", b"dead"


class FakeMesh:
    """A registry in which `serving` sessions serve, and tunnels to `linked` ones."""

    def __init__(self, serving, linked, held_by=0):
        self._serving, self.neighbours = serving, linked
        self.registry = self.relays = self
        self.held_by = held_by

    def hubs_to(self, session):
        return [HUB] * self.held_by if session != DEAD else []

    def session(self, session):
        return SimpleNamespace(claims=SimpleNamespace(role="gateway" if session == HUB else "agent"))

    def serving(self, *, wall):
        assert wall
        return [SimpleNamespace(service=SimpleNamespace(session=session)) for session in self._serving]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(settling, "LOOK_S", 0.0)


async def test_the_only_gateway_serves_at_once():
    assert Settling(FakeMesh([AGENT], []), ManualClock(), others=False).health().ready


@pytest.mark.parametrize(
    ("serving", "linked", "held_by", "settled"),
    [
        ([AGENT], [HUB, AGENT], 0, True),
        ([], [HUB], 0, True),
        ([AGENT], [HUB], 0, False),  # its requests would end in 503
        ([AGENT], [HUB], 1, False),  # and so they would when that one hub is stopped
        ([AGENT], [HUB], 2, True),
        ([AGENT], [AGENT], 2, False),  # what others reach is not known yet
        ([], [], 0, False),
        ([AGENT, DEAD], [HUB, AGENT], 2, False),
    ],
)
async def test_it_waits_for_another_one_and_for_all_that_serve_there_but_not_for_ever(
    serving, linked, held_by, settled
):
    clock, touched = ManualClock(), asyncio.Event()
    waits = Settling(FakeMesh(serving, linked, held_by), clock, others=True)
    assert (waits.health().ready, waits.health().waits_for) == (False, "replicas")
    running = asyncio.create_task(waits.run(touched.set))
    for _ in range(5):
        await asyncio.sleep(0)
    assert waits.health().ready == settled
    clock.advance(SETTLE_S + 1)
    await running
    assert waits.health().ready
    assert touched.is_set()
