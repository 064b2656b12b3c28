"""A plan to look at: who gets which devices, and how the search came close to its bound."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fabrictool.base.files import file_error
from fabrictool.cli.output import data
from fabrictool.cli.simulation_output import plottable
from fabrictool.planner.stages import TIDYING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fabrictool.cli.solve_watch import Moment
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import Placement, Plan

MOST_MODELS = 12
"""So many have a colour of their own, those with the most devices; the others share one. Where a model's phases are
apart, each of them counts."""
OTHERS = "other models"
LONG_S = 1.0
"""A stage that took longer has a picture of its convergence."""
MOST_STAGES = 4
LEAST_RANGE = 0.01
"""A picture of a stage spans this share of its value at least, or a solver's dust would look like a gap."""
WIDTH = 80
"""Columns of a terminal."""
LETTERS = "ABCDEFGHIJKL"
"""Of the models in text bars."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One partition's devices, and which models hold them."""

    name: str
    devices: int
    taken: dict[str, int]
    """Model, with its phase where that is not all → devices, in the order of the legend."""

    @property
    def free(self) -> int:
        return max(0, self.devices - sum(self.taken.values()))


@dataclass(frozen=True, slots=True)
class Search:
    """How one stage was solved."""

    name: str
    began: float
    """Seconds from the beginning of all."""
    points: list[tuple[float, float, float]]
    """(seconds, objective, bound) of each solution on the way."""


def bars_of(placement: Placement, inventory: Inventory) -> tuple[list[Bar], list[str]]:
    """The partitions of enabled clusters by name, and the models in the order of the legend."""
    every: dict[str, int] = {}
    taken: dict[str, dict[str, int]] = {}
    for replica in placement.replicas:
        who = replica.model if replica.phase == "unified" else f"{replica.model}, {replica.phase}"
        every[who] = every.get(who, 0) + replica.devices
        for stage in replica.every_stage:
            there = taken.setdefault(f"{stage.cluster}/{stage.partition}", {})
            there[who] = there.get(who, 0) + stage.tp * replica.dp
    ranked = sorted(every, key=lambda model: (-every[model], model))
    own = ranked if len(ranked) <= MOST_MODELS else ranked[: MOST_MODELS - 1]
    legend = [*own, *([OTHERS] if len(own) < len(ranked) else [])]
    bars = []
    for name, cluster in sorted(inventory.clusters.items()):
        for part, partition in sorted(cluster.partitions.items()) if cluster.enabled else ():
            there = taken.get(f"{name}/{part}", {})
            mine = {model: there[model] for model in own if model in there}
            rest = sum(there.values()) - sum(mine.values())
            mine |= {OTHERS: rest} if rest else {}
            title = f"{name}/{part} ({partition.device})"
            bars.append(Bar(title, partition.nodes * partition.devices_per_node, mine))
    return bars, legend


def drawable(path: Path) -> None:
    """Raises InvalidInputError FT2145 as `plottable`, FabrictoolError FT4302 for a folder that is not there."""
    plottable(path)
    if not path.parent.is_dir():
        raise file_error(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), path)


def draw(
    plan: Plan,
    moments: Sequence[Moment],
    inventory: Inventory,
    *,
    chart: bool,
    path: Path | None,
) -> None:
    """As text on stdout, into a file, or both."""
    bars, legend = bars_of(plan.placement, inventory)
    if chart:
        data("\n" + text_chart(bars, legend))
    if path is not None:
        write_plot(path, plan.fabric, bars, legend, moments)


def text_chart(bars: Sequence[Bar], legend: Sequence[str]) -> str:
    """A line a partition, a letter a model: readable without colours, in `WIDTH` columns."""
    letter = dict(zip(legend, LETTERS, strict=False))
    name_width = min(34, max((len(bar.name) for bar in bars), default=0))
    count_width = max((len(f"{bar.devices}") for bar in bars), default=1)
    room = WIDTH - name_width - 2 * count_width - 3
    most = max((bar.devices for bar in bars), default=1)
    lines = []
    for bar in bars:
        parts = [(letter[model], count) for model, count in bar.taken.items()] + [("·", bar.free)]
        drawn = _drawn(parts, max(1, round(room * bar.devices / most)))
        name = bar.name if len(bar.name) <= name_width else bar.name[: name_width - 1] + "…"
        used = bar.devices - bar.free
        lines.append(f"{name:<{name_width}} {used:>{count_width}}/{bar.devices:<{count_width}} {drawn}".rstrip())
    lines += [f"  {letter[model]} {model}" for model in legend]
    lines.append("  · free")
    return "\n".join(lines)


def _drawn(parts: Sequence[tuple[str, int]], width: int) -> str:
    """`width` characters in these shares; whoever has something keeps one at least, while there is room."""
    whole = sum(count for _, count in parts)
    edges, so_far = [], 0
    for mark, count in parts:
        so_far += count
        edges.append((mark, count, round(width * so_far / whole) if whole else 0))
    text = ""
    for mark, count, edge in edges:
        text += mark * max(edge - len(text), 1 if count and len(text) < width else 0)
    return text[:width]


def write_plot(path: Path, fabric: str, bars: Sequence[Bar], legend: Sequence[str], moments: Sequence[Moment]) -> None:
    """The placement, and each stage that took long; the caller has asked `drawable`."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    stages = long_stages(moments)
    height = max(3.0, 1.2 + 0.34 * len(bars))
    figure: Any = Figure(figsize=(11, height + (3.2 if stages else 0)), layout="constrained")
    upper, lower = figure, None
    if stages:
        upper, lower = figure.subfigures(2, 1, height_ratios=[height, 3.2])
    axis = upper.subplots()
    palette: Any = colormaps["tab20"]
    colours = dict(zip(legend, palette.colors, strict=False))
    left = [0] * len(bars)
    places = range(len(bars))
    for model in legend:
        widths = [bar.taken.get(model, 0) for bar in bars]
        axis.barh(places, widths, left=left, color=colours[model], label=model, edgecolor="white", linewidth=0.4)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    free = [bar.free for bar in bars]
    if any(free):
        axis.barh(places, free, left=left, color="none", edgecolor="0.6", hatch="///", linewidth=0.4, label="free")
    axis.set_xlim(0, 1.02 * max((bar.devices for bar in bars), default=1))
    axis.set_yticks(places, [bar.name for bar in bars])
    axis.invert_yaxis()
    axis.set_xlabel("devices")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)
    figure.suptitle(f"fabrictool plan: {fabric}")
    if lower is not None:
        _draw_search(lower, stages)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise file_error(error, path) from error


def _draw_search(figure: Any, stages: Sequence[Search]) -> None:
    axes = figure.subplots(1, len(stages), squeeze=False)[0]
    for axis, stage in zip(axes, stages, strict=True):
        times = [at for at, _, _ in stage.points]
        bounds = [bound for _, _, bound in stage.points]
        axis.step(times, [value for _, value, _ in stage.points], where="post", marker="o", label="objective")
        # The first bound is the relaxation's, which is known almost from the beginning.
        axis.step([stage.began, *times], [bounds[0], *bounds], where="post", label="bound")
        values = [value for _, value, _ in stage.points] + bounds
        middle, span = (max(values) + min(values)) / 2, max(values) - min(values)
        half = max(0.65 * span, LEAST_RANGE / 2 * abs(middle))
        axis.set_title(f"{stage.name}, {times[-1] - stage.began:.1f} s", fontsize=10)
        axis.set_ylim(*((middle - half, middle + half) if half else (-1, 1)))
        axis.set_xlim(stage.began, times[-1] + 0.03 * (times[-1] - stage.began))
        axis.set_xlabel("seconds")
        axis.ticklabel_format(axis="y", useOffset=False)
        axis.grid(alpha=0.3)
    axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0)


def long_stages(moments: Sequence[Moment]) -> list[Search]:
    """Those that took longer than `LONG_S`; the longest `MOST_STAGES` of them, in their order.

    None of a solver that looks at all objectives at once: what is known of its last one says nothing of its search.
    """
    if moments and moments[0].stage.name in TIDYING:
        return []
    searches: list[Search] = []
    last = 0.0
    for moment in moments:
        if not searches or searches[-1].name != moment.stage.name:
            searches.append(Search(moment.stage.name, last, []))
        searches[-1].points.append((moment.seconds, moment.stage.objective, moment.stage.bound))
        last = moment.seconds
    long = [stage for stage in searches if stage.points[-1][0] - stage.began > LONG_S]
    longest = sorted(long, key=lambda stage: stage.began - stage.points[-1][0])[:MOST_STAGES]
    return [stage for stage in long if stage in longest]
