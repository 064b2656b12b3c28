"""What devices can do for a model at best, by how many of each pool there are and what load they take: tables.

An array has an axis for each pool, of how many of its devices are used at most, and a last one of loads: cell j of a
grid is any load from the j-th point to the next. Its values are what replicas cost under such a load at least, less a
price for each request/s that they take. So no placement is below them, and where its price is what one request/s more
would cost, a cell says nearly the same anywhere in it, however wide it is. What cannot be is infinite.

Loads that add up to one in cell j lie in cells that add up to j, or to j - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]
    Flags = np.ndarray[Any, np.dtype[np.bool_]]
    Devices = tuple[int, ...]

NEVER = math.inf
SAME = 1e-9
"""Relative: loads that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """Replicas of one width: (requests/s, cost) of each from idle to full, where no mixture of others costs less."""

    devices: int
    steps: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, devices: int, rates: Sequence[float], costs: Sequence[float]) -> Ladder:
        hull: list[tuple[float, float]] = []
        for step in sorted(dict(zip(rates, costs, strict=True)).items()):
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], step):
                hull.pop()
            hull.append(step)
        return cls(devices, tuple(hull))

    @property
    def capacity(self) -> float:
        return self.steps[-1][0]

    @property
    def steepest(self) -> float:
        """The most that a request/s more adds to the cost."""
        return _slope(*self.steps[-2:])


def _slope(less: tuple[float, float], more: tuple[float, float]) -> float:
    return (more[1] - less[1]) / (more[0] - less[0])


def replicas(ladders: Sequence[Ladder], devices: int, price: float, step: float, cells: int) -> Floats:
    """Of one pool, with any numbers of these replicas: [devices, cell]."""
    segments = sorted(
        (_slope(less, more), more[0] - less[0], at)
        for at, ladder in enumerate(ladders)
        for less, more in pairwise(ladder.steps)
    )
    slopes, lengths = (np.array([segment[k] for segment in segments]) for k in (0, 1))
    whose = np.array([at for *_, at in segments], dtype=np.int64)
    points = step * np.arange(cells)
    values = np.full((devices + 1, cells), NEVER)
    for numbers in _numbers([ladder.devices for ladder in ladders], devices):
        loads = np.concatenate(([0.0], np.cumsum(np.array(numbers, dtype=float)[whose] * lengths)))
        costs = np.concatenate(([0.0], np.cumsum(np.diff(loads) * slopes)))
        # Convex, so the least of a cell is where a request/s more costs its price, or at that end of it.
        best = loads[int(np.searchsorted(slopes, price))]
        load = np.minimum(np.clip(best, points, points + step), loads[-1])
        value = np.interp(load, loads, costs) - price * load
        value[points > loads[-1] * (1 + SAME)] = NEVER
        used = sum(number * ladder.devices for number, ladder in zip(numbers, ladders, strict=True))
        np.minimum(values[used], value, out=values[used])
    return np.minimum.accumulate(values, axis=0)


def _numbers(sizes: Sequence[int], room: int) -> Iterator[tuple[int, ...]]:
    """All ways to fill `room` with things of these sizes, or a part of it."""
    if not sizes:
        yield ()
        return
    for number in range(room // sizes[0] + 1):
        for rest in _numbers(sizes[1:], room - number * sizes[0]):
            yield (number, *rest)


def wider(values: Floats, times: int) -> Floats:
    """In cells that are so many times as wide."""
    cells = -(-values.shape[-1] // times)
    padded = np.full((*values.shape[:-1], cells * times), NEVER)
    padded[..., : values.shape[-1]] = values
    least: Floats = padded.reshape(*values.shape[:-1], cells, times).min(axis=-1)
    return least


def side_by_side(first: Floats, second: Floats) -> Floats:
    """Of pools and of others, whose loads add up."""
    cells, second = second.shape[-1], _or_before(second)
    first = first.reshape(*first.shape[:-1], *(1,) * (second.ndim - 1), cells)
    values = np.full((*np.broadcast_shapes(first.shape[:-1], second.shape[:-1]), cells), NEVER)
    for cell in range(cells):
        above = values[..., cell:]
        np.minimum(above, first[..., cell : cell + 1] + second[..., : cells - cell], out=above)
    return values


def under(first: Floats, second: Floats, cells: Ints) -> Floats:
    """The same, each number of devices in one cell alone."""
    left, right = first.reshape(-1, 1, first.shape[-1]), _or_before(second).reshape(-1, second.shape[-1])
    wanted, rows = cells.reshape(left.shape[0], right.shape[0]), np.arange(right.shape[0])
    values = np.full(wanted.shape, NEVER)
    for cell in range(first.shape[-1]):
        rest = wanted - cell
        both = left[..., cell] + right[rows, np.maximum(rest, 0)]
        np.minimum(values, both, out=values, where=rest >= 0)
    return values.reshape(cells.shape)


def shared(first: Floats, second: Floats) -> Floats:
    """Two that share the devices, under the same load: phases that each request passes; or models, in one cell. None
    of them costs more with more devices.
    """
    values, most = np.full(first.shape, NEVER), first.shape[-2]
    padded = np.concatenate((np.full((*second.shape[:-2], most, second.shape[-1]), NEVER), second), axis=-2)
    worth: Flags = np.any(_efficient(first), axis=-1)
    for used in _places(np.any(worth, axis=-1)):
        # The last pool's devices are shared in one go.
        last = np.flatnonzero(worth[used])
        rest = padded[up_to(used, second)][..., np.arange(most)[None, :] - last[:, None] + most, :]
        both = values[beyond(used)]
        np.minimum(both, (first[used][last][:, None, :] + rest).min(axis=-3), out=both)
    return values


def either_way(first: Floats, second: Floats) -> Floats:
    """Two that share the devices, and the load: each request takes one of them."""
    values, cells = np.full(first.shape, NEVER), first.shape[-1]
    padded = np.concatenate((np.full((*first.shape[:-1], cells - 1), NEVER), _or_before(first)), axis=-1)
    worth = _efficient(second)
    for used in _places(np.any(worth, axis=-1)):
        its = np.flatnonzero(worth[used])
        # By cell of the second, and of both: what the first then costs, which never has less than nothing.
        rest = padded[up_to(used, first)][..., np.arange(cells)[None, :] - its[:, None] + cells - 1]
        both = values[beyond(used)]
        np.minimum(both, (second[used][its][:, None] + rest).min(axis=-2), out=both)
    return values


def best_split(values: Sequence[Floats], devices: Devices) -> tuple[float, list[Devices]]:
    """Of models by their devices: the least that they come to together, and the devices of each."""
    fewest_first = sorted(range(len(values)), key=lambda at: int(np.isfinite(values[at]).sum()))
    together = [np.zeros(values[0].shape)]
    for place, at in enumerate(fewest_first[:-1]):
        mine = _at_most(values[at])
        together.append(shared(together[-1][..., None], mine[..., None])[..., 0] if place else mine)
    shares, left, sums = [devices] * len(values), devices, []
    for at, others in zip(reversed(fewest_first), reversed(together), strict=True):
        most = tuple(slice(0, n + 1) for n in left)
        ways = others[most] + np.flip(values[at][most])
        rest = tuple(map(int, np.unravel_index(int(np.argmin(ways)), ways.shape)))
        sums.append(float(ways[rest]))
        shares[at], left = tuple(n - m for n, m in zip(left, rest, strict=True)), rest
    return sums[0], shares


def _at_most(values: Floats) -> Floats:
    """By devices of which some may be left."""
    least = values
    for axis in range(values.ndim):
        least = np.minimum.accumulate(least, axis=axis)
    return least


def _or_before(values: Floats) -> Floats:
    """What lies in a cell or in the one before: where another's part of a cell fills up the rest of it."""
    either = values.copy()
    np.minimum(either[..., 1:], values[..., :-1], out=either[..., 1:])
    return either


def _efficient(values: Floats) -> Flags:
    """Where no device is for nothing."""
    worth = np.isfinite(values)
    for axis in range(values.ndim - 1):
        by_device = np.moveaxis(values, axis, 0)
        np.moveaxis(worth, axis, 0)[1:] &= by_device[1:] < by_device[:-1]
    return worth


def _places(those: Flags) -> Iterator[Devices]:
    yield from (tuple(place) for place in np.argwhere(those).tolist())


def beyond(used: Devices) -> tuple[slice, ...]:
    """Places with these devices and any others."""
    return tuple(slice(n, None) for n in used)


def up_to(used: Devices, values: Floats) -> tuple[slice, ...]:
    """The same places, without these devices."""
    return tuple(slice(0, most - n) for n, most in zip(used, values.shape, strict=False))
