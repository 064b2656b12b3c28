"""Why so many replicas, why so wide, and what limits one: the sums behind a plan, from its tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fabrictool.planner.stages import TOLERANCE
from fabrictool.planner.survival import after_loss, worst_loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fabrictool.domain.plan import ModelForecast
    from fabrictool.planner.problem import ModelNeed, Option, PlacementProblem, Solution

SAME = 0.005
"""Shares up to which two figures are told as the same."""
SHARED = 0.2
"""Of a full replica's time, what its steps take however many requests are in them: more requests would share it."""
MOSTLY = 0.5


def count_words(problem: PlacementProblem, solution: Solution, need: ModelNeed) -> str:
    """What all replicas of a model can serve, what is demanded, and what one fewer could; "" where there is none, or
    prefill and decode are apart.
    """
    placed = [(solution.counts[i], problem.options[i]) for i in problem.of(need.model) if solution.counts.get(i)]
    if not placed or any(option.phase != "unified" for _, option in placed):
        return ""
    capacity = sum(count * option.capacity for count, option in placed)
    planned = sum(count * option.levels[-1].rate for count, option in placed)
    of_each: Counter[str] = Counter()
    for count, option in placed:
        of_each[f"{option.capacity:.3g}"] += count
    sums = " + ".join(f"{count} × {each_rate}" for each_rate, count in of_each.items())
    total = f"{capacity:.3g}" if of_each.total() == 1 else f"{sums} = {capacity:.3g}"
    text = f"{total} req/s, of which {planned / capacity:.0%} may be planned: {planned:.3g}"
    if not need.rate:
        return f"{text}, and nothing is demanded"
    text += f", and {need.rate:.3g} are demanded"
    lacking = need.rate - planned
    if lacking > need.rate * TOLERANCE:
        return f"{text}: {lacking:.3g} more than they can serve"
    number = sum(count for count, _ in placed)
    return text + (_with_fewer(problem, solution.counts, need, placed) if number > 1 else "")


def _with_fewer(
    problem: PlacementProblem, counts: Mapping[int, int], need: ModelNeed, placed: Sequence[tuple[int, Option]]
) -> str:
    """What all of them could serve without the least of them."""
    number, rates = sum(count for count, _ in placed), [option.levels[-1].rate for _, option in placed]
    left = sum(count * rate for (count, _), rate in zip(placed, rates, strict=True)) - min(rates)
    if left < need.rate * (1 - TOLERANCE):
        return f"; with {number - 1} it would be {left:.3g}{' at most' if len(placed) > 1 else ''}"
    if number <= need.minimum:
        return ""  # it is said that this decides
    if need.survive is not None and not any(_survives_without(problem, counts, need, i) for i in counts):
        return f"; {number - 1} could serve it, but not after the loss of any {need.survive}"
    kept = sum(count * after_loss(option) for count, option in placed) - min(after_loss(option) for _, option in placed)
    if "slo" in problem.objective and kept < need.rate * (1 - TOLERANCE):
        return f"; {number - 1} could serve it, and keep the SLO up to {kept:.3g} req/s"
    if "latency" in problem.objective:
        return f"; {number - 1} could serve it, with more requests in the system"
    return f"; {number - 1} could serve it, too ({left:.3g})"


def _survives_without(problem: PlacementProblem, counts: Mapping[int, int], need: ModelNeed, i: int) -> bool:
    """Whether a replica less, of a model's option, would leave enough after each loss."""
    if problem.options[i].model != need.model:
        return False
    fewer = {**counts, i: counts[i] - 1}
    return worst_loss(problem, need, {at: count for at, count in fewer.items() if count})[0] is None


def shape_sentences(problem: PlacementProblem, solution: Solution, need: ModelNeed, currency: str) -> Iterator[str]:
    """For each kind of replica that is placed: why it is as wide as it is, and what limits it."""
    kinds: dict[object, list[Option]] = {}
    for i in problem.of(need.model):
        if solution.counts.get(i):
            kinds.setdefault((problem.options[i].kind, problem.options[i].cost), []).append(problem.options[i])
    for options in kinds.values():
        option = options[0]
        if option.phase != "unified" or option.pp > 1 or option.others or option.elastic or option.shared:
            continue  # what such a replica does is told by itself
        places = " and ".join("/".join(its.pool.key) for its in options)
        width = "; ".join(_widths(problem, option, currency))
        yield f"{need.model} on {places}: tp {option.tp}{f': {width}' if width else ''}; {_limit(problem, option)}"


def _widths(problem: PlacementProblem, option: Option, currency: str) -> Iterator[str]:
    """What the next narrower and the next wider replica there would do."""
    alike = [problem.options[i] for i in problem.of(option.model)]
    here = {
        other.tp: other
        for other in alike
        if (other.pool.key, other.phase, other.variant, other.pp, other.dp)
        == (option.pool.key, option.phase, option.variant, 1, 1)
    }
    generator = problem.columns.get(option.model)
    degrees = sorted({*here, *([] if generator is None else generator.widths(option.pool, option.variant))})
    if degrees == [option.tp]:
        yield "no other is possible"
    for tp in (
        max((d for d in degrees if d < option.tp), default=0),
        min((d for d in degrees if d > option.tp), default=0),
    ):
        if tp:
            other = here.get(tp)
            yield f"with tp {tp} it {'does not fit' if other is None else _against(problem, option, other, currency)}"


def _against(problem: PlacementProblem, option: Option, other: Option, currency: str) -> str:
    """The first thing in which another width is worse; where there is none, how close they are."""
    if "slo" in problem.objective and after_loss(option) and not after_loss(other):
        return "misses the SLO under the least load"
    mine, its = _usable(problem, option), _usable(problem, other)
    a_device, of_it = mine / option.devices, its / other.devices
    within = " within the SLO" if after_loss(option) and mine < option.levels[-1].rate else ""
    if of_it < a_device * (1 - SAME):
        return f"serves {of_it:.3g} req/s for a device{within}, not {a_device:.3g}"
    price, its_price = option.cost / mine, other.cost / its
    if its_price > price * (1 + SAME):
        thousand = 1000 / 3600
        return f"costs {its_price * thousand:.3g} {currency} for 1,000 requests, not {price * thousand:.3g}"
    stay, its_stay = (_mean_s(which) for which in (option, other))
    if its_stay > stay * (1 + SAME):
        return f"takes {its_stay:.3g} s for a request at full load, not {stay:.3g}"
    but = "take more of them" if other.devices > option.devices else "need more replicas"
    return f"would serve {of_it:.3g} req/s for a device{within} instead of {a_device:.3g}, and {but}"


def _mean_s(option: Option) -> float:
    """Mean seconds of a request under the largest load that is planned."""
    return option.levels[-1].in_system / option.levels[-1].rate


def _usable(problem: PlacementProblem, option: Option) -> float:
    """What a replica is good for: within the SLO, where that counts and it can keep it."""
    return ("slo" in problem.objective and after_loss(option)) or option.levels[-1].rate


def _limit(problem: PlacementProblem, option: Option) -> str:
    """What keeps a replica from serving more."""
    its, most, kept = option.figures, option.levels[-1].rate, after_loss(option)
    if not kept:
        return "it misses the SLO under any load"
    if kept < most:
        return f"the SLO limits it: kept up to {kept:.3g} of the {most:.3g} req/s that may be planned"
    prompts = its.marginal_s * its.capacity
    generator = problem.columns.get(option.model)
    if (1.0 - prompts) * _shared_part(option) >= SHARED:
        declared = generator is not None and its.max_batch >= generator.at_once(option.variant)
        what = "`max_num_seqs` limits it: its engine takes" if declared else "memory limits it: it holds"
        return (
            f"{what} {its.max_batch} requests at once, and a step takes {its.step_full_s * 1000:.3g} ms with all of"
            f" them, {its.step_alone_s * 1000:.3g} ms with one"
        )
    use = None if generator is None else generator.peak_use(option)
    if prompts >= MOSTLY:
        at = (
            ""
            if use is None
            else f", by the tables at {use.computing:.0%} of a device's {use.flops / 1e12:.3g} TFLOP/s"
        )
        return f"computing limits it: reading prompts takes {prompts:.0%} of its time{at}"
    at = (
        ""
        if use is None
        else f" ({use.octets / 1e9:.3g} GB a device with the weights, at {use.reading:.0%} of its"
        f" {use.bandwidth / 1e12:.3g} TB/s)"
    )
    return (
        f"its steps limit it: {its.step_full_s * 1000:.3g} ms with {its.max_batch} requests, whose caches have to be"
        f" read{at}, {its.step_alone_s * 1000:.3g} ms with one; prompts take {prompts:.0%} of its time"
    )


def _shared_part(option: Option) -> float:
    """Of a full step, what would not become longer with more requests."""
    sizes, steps = option.figures.batches, option.figures.steps_s
    if len(sizes) < 2:
        return 1.0
    slope = (steps[-1] - steps[-2]) / (sizes[-1] - sizes[-2])
    return max(0.0, 1.0 - slope * sizes[-1] / steps[-1]) if steps[-1] else 0.0


def shortfall_sentence(model: ModelForecast) -> str:
    """Of a model that is not all served or not shown to meet its SLO: that it is so, and why; "" of any other."""
    parts = [model.unserved] if model.unserved else []
    if model.misses:
        parts.append(f"it misses its SLO ({'; '.join(model.misses)})")
    if model.undecided:
        parts.append(f"it is undecided whether it meets its SLO ({'; '.join(model.undecided)})")
    if not parts:
        return ""
    return f"{model.model}: {'; '.join(parts)}{f', because {model.why}' if model.why else ''}"
