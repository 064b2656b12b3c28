"""One process's wall clock jumps by an hour while it serves: nothing that runs depends on it."""

import os
import signal

import pytest

from tests.clocks import HOUR, Clocks, library
from tests.conftest import INVENTORY
from tests.e2e.test_standstill import Asking, members, until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(library() is None, reason="Debian's package faketime is not installed"),
]

ASKED = 40
"""Requests while a clock is wrong: some seconds' worth, so that every loop has turned."""


@pytest.fixture
def clocks(fabric_bed):
    (fabric_bed.folder / "clocks").mkdir()
    clocks = Clocks(fabric_bed.folder / "clocks")
    own = f"\n    software: {{python: {{venv: {clocks.venv}}}, engines: {{reference: {{}}}}}}\n    partitions:"
    fabric_bed.write(inventory=INVENTORY.replace("\n    partitions:", own))
    return clocks


def served(asking):
    """Providers that answer the next requests."""
    count = len(asking.answers)
    until(lambda: len(asking.answers) >= count + ASKED, 60.0)
    return set(asking.answers[count:])


@pytest.mark.parametrize(
    ("unit", "ahead"),
    [
        pytest.param(("two", "agent"), HOUR, id="agent-ahead"),
        pytest.param(("one", "gateway"), -HOUR, id="gateway-behind"),
        pytest.param(("two", "agent"), -HOUR, id="agent-behind", marks=pytest.mark.extended),
        pytest.param(("one", "gateway"), HOUR, id="gateway-ahead", marks=pytest.mark.extended),
    ],
)
def test_a_clock_that_jumps_an_hour_costs_no_request_and_nobody_his_place(fabric_bed, clocks, unit, ahead):
    fabric_bed.up()
    before = members(fabric_bed)
    with Asking(fabric_bed) as asking:
        until(lambda: {"alpha", "beta"} <= set(asking.answers), 30.0)
        for seconds in (ahead, 0):
            clocks.set(*unit, seconds)
            assert served(asking) == {"alpha", "beta"}
            after = members(fabric_bed)
            assert {name: member.session for name, member in after.items()} == {
                name: member.session for name, member in before.items()
            }
            assert not [member.accusations for member in after.values() if member.accusations]
            assert {member.state for member in after.values()} == {"serving"}
            assert "up -" not in (shown := fabric_bed.run("status").stdout)
            assert "up 1 h" not in shown
            assert "No changes" in fabric_bed.run("plan").stdout
    assert asking.failures == []


def events(bed, operation_of):
    """Kinds and texts of a unit's events."""
    operation = next(unit.operation for (address, _), unit in bed.units().items() if address == operation_of)
    cluster = next(c for c in bed.clusters().values() if c.state(operation) is not None)
    documents = []

    def answered():
        documents.append(cluster.document(operation))
        return documents[-1] is not None  # a unit has two seconds for it, and may be late beside others

    until(answered, 30.0)
    return [(event.kind, event.text) for event in documents[-1].events]


def test_both_sides_say_whose_clock_is_wrong(fabric_bed, clocks):
    fabric_bed.up()

    def told(kind):
        return {
            unit: next((text for heard, text in events(fabric_bed, unit) if heard == kind), "")
            for unit in ("gateway/main", "replica/tiny/1", "replica/tiny/0")
        }

    clocks.set("two", "agent", HOUR)
    until(lambda: all(list(told("clock-differs").values())[:2]), 30.0)
    differs = told("clock-differs")
    assert "ahead of ours" in differs["gateway/main"]
    assert "behind ours: once this link is lost, certificates may be refused" in differs["replica/tiny/1"]
    assert not differs["replica/tiny/0"]
    clocks.set("two", "agent", 0)
    until(lambda: all(list(told("clock-agrees").values())[:2]), 30.0)


@pytest.mark.parametrize(
    "ahead", [pytest.param(HOUR, id="ahead"), pytest.param(-HOUR, id="behind", marks=pytest.mark.extended)]
)
def test_who_lost_its_links_with_a_wrong_clock_says_so_and_is_back_when_it_is_right(fabric_bed, clocks, ahead):
    """Certificates that began minutes ago are not valid yet an hour before; those that end in a day are valid."""
    fabric_bed.up()
    pid = fabric_bed.units()["replica/tiny/1", "running"].pid
    before = members(fabric_bed)["tiny/1"].session
    with Asking(fabric_bed) as asking:
        until(lambda: {"alpha", "beta"} <= set(asking.answers), 30.0)
        clocks.set("two", "agent", ahead)
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: not members(fabric_bed)["tiny/1"].linked, 30.0)
        finally:
            os.kill(pid, signal.SIGCONT)
        if ahead < 0:
            until(lambda: "one of the two clocks is wrong" in fabric_bed.run("status", code=None).stdout, 30.0)
            assert served(asking) == {"alpha"}
            clocks.set("two", "agent", 0)
        until(lambda: members(fabric_bed)["tiny/1"].linked, 30.0)
        assert served(asking) == {"alpha", "beta"}
    assert asking.failures == []
    assert members(fabric_bed)["tiny/1"].session == before
