"""Blocks of ports: no two agents of a machine have the same, and what a stranger uses is in none."""

import itertools
import random
import socket
import subprocess
import sys

import pytest

from fabrictool.agent import ports as ports_module
from fabrictool.agent.ports import FIRST, LAST, SIZE, PortBlock, _is_free
from tests.ports import FIRST as TESTS_FIRST

HOLDER = """
import sys
from fabrictool.agent.ports import PortBlock
block = PortBlock.take()
print(block.api, flush=True)
sys.stdin.read()
"""


def test_agents_of_one_machine_share_no_port():
    """Processes of their own, as agents are."""
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    try:
        firsts = sorted(int(holder.stdout.readline()) for holder in holders)
    finally:
        for holder in holders:
            holder.communicate(timeout=20)
    assert all(later - earlier >= SIZE for earlier, later in itertools.pairwise(firsts))
    assert all(FIRST < first < LAST for first in firsts)


@pytest.fixture
def two_blocks(monkeypatch):
    """The first port of two blocks that no agent takes, because they lie below those that agents choose from."""
    first = next(
        start
        for start in range(10_000, TESTS_FIRST - 2 * SIZE, SIZE)
        if all(map(_is_free, range(start, start + 2 * SIZE)))
    )
    monkeypatch.setattr(ports_module, "FIRST", first)
    monkeypatch.setattr(ports_module, "LAST", first + 3 * SIZE)
    return first


def test_a_block_in_which_a_stranger_listens_is_left_alone(two_blocks):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", two_blocks + SIZE // 2))
        stranger.listen()
        for seed in range(8):
            with PortBlock.take(random.Random(seed)) as block:
                assert block.api == two_blocks + SIZE + 1


@pytest.mark.usefixtures("two_blocks")
def test_what_is_given_back_is_free_for_the_next():
    with PortBlock.take():
        with PortBlock.take() as block, pytest.raises(OSError, match="in a row are free"):
            PortBlock.take()
        with PortBlock.take() as again:
            assert again.api == block.api


def test_what_has_a_port_of_its_own_has_it_inside_the_block():
    with PortBlock.take() as block, socket.socket() as engine:
        engine.bind(("127.0.0.1", block.api))
    names = [block.api, block.meeting, *range(block.handover, block.inner), *range(block.inner, block.api - 1 + SIZE)]
    assert names == list(range(block.api, block.api - 1 + SIZE))
