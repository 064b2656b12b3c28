"""Which earlier request a prompt began as, and the chains that the simulator plays."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fabrictool.workload.prefixes import BLOCK, LEAST, STRIDE, PrefixTable
from fabrictool.workload.reuse import chains


def words(octets: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(octets // 2 + 1).hex().encode()[:octets]


def test_a_conversation_that_goes_on_shares_what_was_said() -> None:
    table, said = PrefixTable(), words(5000, 1)
    assert table.add("m", said, "first") == ("", 0.0)
    longer = said + words(3000, 2)
    assert table.add("m", longer, "second") == ("first", 5000 // BLOCK * BLOCK / 8000)
    assert table.add("m", longer + words(200, 3), "third") == ("second", 8000 // BLOCK * BLOCK / 8200)


def test_a_system_prompt_is_shared_up_to_the_first_difference() -> None:
    table, system = PrefixTable(), words(10_000, 4)
    table.add("m", system + words(2000, 5), "first")
    assert table.add("m", system + words(2000, 6), "second") == ("first", 10_000 // BLOCK * BLOCK / 12_000)


def test_models_short_texts_and_strangers_share_nothing() -> None:
    table, said = PrefixTable(), words(4000, 7)
    table.add("m", said, "first")
    assert table.add("other", said, "second") == ("", 0.0)
    assert table.add("m", words(4000, 8), "third") == ("", 0.0)
    assert table.add("m", said[: LEAST - 1], "fourth") == ("", 0.0)


def test_what_comes_again_is_remembered_and_what_does_not_is_forgotten() -> None:
    table = PrefixTable(remembered=400)
    often, once = words(4 * STRIDE, 9), words(4 * STRIDE, 10)
    table.add("m", often, "often")
    table.add("m", once, "once")
    for i in range(40):
        table.add("m", words(2000, 100 + i), f"other-{i}")
        earlier, share = table.add("m", often, f"again-{i}")
        assert earlier
        assert share == 1.0
    assert table.add("m", once, "late") == ("", 0.0)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=12), st.randoms())
def test_the_share_is_what_the_texts_have_in_common(cuts: list[tuple[int, int]], dice: random.Random) -> None:
    """Against the plain search over all earlier texts, which keeps them."""
    table, kept = PrefixTable(), []
    base = words(8 * STRIDE, dice.randrange(5))
    for i, (cut, tail) in enumerate(cuts):
        text = base[: cut * 300] + words(tail * 500, i + 1000)
        earlier, share = table.add("m", text, str(i))
        common = [_common(text, other) for other in kept]
        blocks = max((octets // BLOCK * BLOCK for octets in common), default=0)
        if len(text) >= LEAST:
            assert round(share * len(text)) <= blocks
            if earlier:
                assert common[int(earlier)] >= round(share * len(text)) > 0
            long_enough = [octets for octets, other in zip(common, kept, strict=True) if len(other) >= LEAST]
            assert round(share * len(text)) == max((octets // BLOCK * BLOCK for octets in long_enough), default=0)
        kept.append(text)


def _common(left: bytes, right: bytes) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_chains_are_equal_as_far_as_records_say() -> None:
    start, flat = chains(["a", "b", "c", "d"], ["", "a", "b", "gone"], [0, 3, 5, 2], [10, 8, 9, 4])
    rows = [flat[start[i] : start[i + 1]].tolist() for i in range(4)]
    assert rows[1][:3] == rows[0][:3]
    assert rows[2][:5] == rows[1][:5]
    assert len(rows[0]) == 3
    assert len(rows[3]) == 2
    assert not set(rows[3]) & set(rows[0] + rows[1] + rows[2])


def test_two_that_follow_a_request_outside_the_window_share_with_each_other() -> None:
    start, flat = chains(["a", "b"], ["gone", "gone"], [4, 2], [9, 9])
    first, second = (flat[start[i] : start[i + 1]].tolist() for i in range(2))
    assert second == first[:2]
    assert len(first) == 4


@given(st.lists(st.tuples(st.integers(-2, 20), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20))
def test_a_chain_is_no_longer_than_its_prompt_and_has_no_block_twice(rows: list[tuple[int, int, int]]) -> None:
    ids = [str(i) for i in range(len(rows))]
    earlier = [str(at) if at >= 0 else "" for at, *_ in rows]
    start, flat = chains(ids, earlier, [shared for _, shared, _ in rows], [most for *_, most in rows])
    assert len(start) == len(rows) + 1
    for i, (_, _, most) in enumerate(rows):
        chain = flat[start[i] : start[i + 1]]
        assert len(chain) <= most
        assert len(np.unique(chain)) == len(chain)
