"""The steps of the tabu search: flip, split, merge and move (ThunderServe, paper 002, section 3.2), and with several
models or idle devices hand over, begin and dissolve.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.planner.solvers.groups import MOST_BLOCKS, DeviceGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.domain.specs import Phase
    from fabrictool.planner.solvers.groups import Blocks
    from fabrictool.planner.solvers.search import Change, TabuSearch, TabuState


def neighbours(search: TabuSearch, state: TabuState) -> Iterator[Change]:
    kinds = [_begin, _split, _merge, _move, _dissolve]
    if any(len(phases) > 1 for phases in search.problem.phases.values()):
        kinds += [_flip, _flip]
    if len(search.needs) > 1:
        kinds += [_hand_over, _hand_over]
    present = sorted(state.groups)
    while True:
        change = search.rng.choice(kinds)(search, present)
        yield ([], []) if change is None else change


def flips(search: TabuSearch, state: TabuState) -> Iterator[Change]:
    """Only changes of phase, of each kind of group one: devices and cuts stay as they are."""
    for group in sorted(state.groups):
        for phase in search.problem.phases.get(group.model, ()):
            if phase != group.phase:
                yield [group], [DeviceGroup(group.model, group.blocks, phase)]


def _flip(search: TabuSearch, present: list[DeviceGroup]) -> Change | None:
    if not present:
        return None
    group = search.rng.choice(present)
    return [group], [DeviceGroup(group.model, group.blocks, _phase(search, group.model))]


def _split(search: TabuSearch, present: list[DeviceGroup]) -> Change | None:
    large = [group for group in present if group.devices > 1]
    if not large:
        return None
    group = search.rng.choice(large)
    first, second = _parted(search, group.blocks)
    return [group], [DeviceGroup(group.model, blocks, _phase(search, group.model)) for blocks in (first, second)]


def _parted(search: TabuSearch, blocks: Blocks) -> tuple[Blocks, Blocks]:
    """Some blocks here and some there, or one block in halves."""
    if len(blocks) > 1:
        order = search.rng.sample(blocks, len(blocks))
        at = search.rng.randrange(1, len(blocks))
        return tuple(sorted(order[:at])), tuple(sorted(order[at:]))
    ((pool, size),) = blocks
    return ((pool, size // 2),), ((pool, size - size // 2),)


def _merge(search: TabuSearch, present: list[DeviceGroup]) -> Change | None:
    if not present:
        return None
    first = search.rng.choice(present)
    alike = [group for group in present if group.model == first.model]
    second = search.rng.choice(alike)
    blocks = _joined(search, first.blocks + second.blocks)
    if len(blocks) > MOST_BLOCKS:
        return None
    return [first, second], [DeviceGroup(first.model, blocks, _phase(search, first.model))]


def _joined(search: TabuSearch, blocks: Blocks) -> Blocks:
    """Equal blocks of a partition become one of twice the size where a node has as many devices."""
    left = sorted(blocks)
    for i, (pool, size) in enumerate(left[:-1]):
        if left[i + 1] == (pool, size) and 2 * size <= search.problem.pools[pool].devices_per_node:
            return _joined(search, (*left[:i], (pool, 2 * size), *left[i + 2 :]))
    return tuple(left)


def _move(search: TabuSearch, present: list[DeviceGroup]) -> Change | None:
    """A block, or half of one, from one group to another."""
    if not present:
        return None
    giver = search.rng.choice(present)
    taker = search.rng.choice([group for group in present if group.model == giver.model])
    at = search.rng.randrange(len(giver.blocks))
    pool, size = giver.blocks[at]
    rest = giver.blocks[:at] + giver.blocks[at + 1 :]
    moved = size
    if size > 1 and search.rng.random() < 0.5:
        moved = size // 2
        rest = (*rest, (pool, size - moved))
    larger = _joined(search, (*taker.blocks, (pool, moved)))
    if not rest or len(larger) > MOST_BLOCKS:
        return None
    smaller = DeviceGroup(giver.model, tuple(sorted(rest)), giver.phase)
    return [giver, taker], [smaller, DeviceGroup(taker.model, larger, taker.phase)]


def _hand_over(search: TabuSearch, present: list[DeviceGroup]) -> Change | None:
    """A group to another model, one that lacks something when there is one."""
    if not present:
        return None
    group = search.rng.choice(present)
    model = search.rng.choice(sorted(search.needs))
    return [group], [DeviceGroup(model, group.blocks, _phase(search, model))]


def _begin(search: TabuSearch, present: list[DeviceGroup]) -> Change | None:
    """One replica more, in the place of idle devices or of some group."""
    model = search.rng.choice(sorted(search.needs))
    if not search.columns[model]:
        return None
    group = search.deduction.group_of(search.rng.choice(search.columns[model]))
    if group is None:
        return None
    pools = {pool for pool, _ in group.blocks}
    beside = [other for other in present if pools & {pool for pool, _ in other.blocks}]
    gone = [search.rng.choice(beside)] if beside and search.rng.random() < 0.5 else []
    return gone, [group]


def _dissolve(search: TabuSearch, present: list[DeviceGroup]) -> Change | None:
    return ([search.rng.choice(present)], []) if present else None


def _phase(search: TabuSearch, model: str) -> Phase:
    return search.rng.choice(search.problem.phases.get(model, ("unified",)))
