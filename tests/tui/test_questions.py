"""What operators ask of a screen, each answered within three keys."""

import msgspec
import pytest

from fabrictool.status.documents import Event
from fabrictool.status.sightings import Sighting
from fabrictool.tui.app import Top
from tests.tui.test_top import NOW, OPERATOR, gateway, node, settled

USUAL = node("n6", "bristen", "eth", replica="qwen/4")
USUAL = msgspec.structs.replace(USUAL, services=[msgspec.structs.replace(USUAL.services[0], ttft_s=0.3)])
ALIKE = msgspec.structs.replace(USUAL, session="n7", node="n7")
SLOW = node("n4", "bristen", "eth", replica="qwen/2")
SLOW = msgspec.structs.replace(SLOW, services=[msgspec.structs.replace(SLOW.services[0], waiting=97, ttft_s=9.0)])
ENDING = node("n5", "clariden", "cscs", replica="qwen/3", ends_at=NOW + 300)


class Fabric:
    """Where much goes wrong: one node is lost, one flaps, one ends soon, one is slow; a model misses its target."""

    def __init__(self):
        self.looks = 0

    def look(self):
        self.looks += 1
        at = NOW - 40 + 5 * self.looks
        flapping = node("n3", "bristen", "eth", replica="qwen/0", connected=self.looks % 2 == 0)
        nodes = [*gateway().nodes[:2], flapping, SLOW, USUAL, ALIKE, ENDING]
        events = [Event(at=NOW - 12, kind="link-down", subject="llama/1", text="connection reset")]
        live = gateway(at=at, nodes=nodes, events=events)
        return Sighting(at=at, live=live, operator=OPERATOR, asked="https://gateway.example")

    def log(self, address):
        return [f"the log of {address}"]


QUESTIONS = [
    ("who is down?", [], "llama/1"),
    ("since when?", [], "llama/1  lost"),
    ("why?", [], "its node was rebooted"),
    ("what ends next?", [], "qwen/3  ends soon"),
    ("which model misses its target?", ["2"], "missed"),
    ("by how much?", ["2", "enter"], "p95 612 ms, target 500 ms"),
    ("who is slow?", [], "qwen/2  slow"),
    ("what did the last apply do?", ["7"], "no such account"),
    ("which view do I see, and how old is it?", [], "view from the gateway h:1 · 0.5 s old"),
    ("is anything flapping?", [], "flapping"),
    ("where is model llama?", ["2", "enter"], "node n1 of clariden, provider cscs: linked"),
    ("what does the job of qwen/1 wait for?", ["4"], "Resources: a node with 4 a100-80g is awaited"),
    ("what happened to it?", ["6"], "connection reset"),
    ("what does its log say?", ["3", "l"], "the log of replica/llama/1"),
    ("what should I type now?", [], "fabrictool logs replica/llama/1"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("question", "keys", "answer"), QUESTIONS, ids=[row[0] for row in QUESTIONS])
async def test_an_operators_question(question, keys, answer):  # noqa: ARG001 - the question is the test's name
    feed = Fabric()
    app = Top(feed, 0.0, clock=lambda: NOW - 40 + 5 * feed.looks + 0.5)
    async with app.run_test(size=(160, 40)) as pilot:
        while feed.looks < 12:
            await pilot.pause(0.01)
        app._interval = 3600.0
        await settled(pilot)
        assert len(keys) <= 3
        for key in keys:
            await pilot.press(key)
            await settled(pilot)
        for _ in range(20):
            if answer in squeezed(app):
                break
            await pilot.pause(0.05)
        assert answer in squeezed(app), app.as_text()


def squeezed(app):
    """The screen with at most two blanks between words."""
    text = app.as_text()
    while "   " in text:
        text = text.replace("   ", "  ")
    return text
