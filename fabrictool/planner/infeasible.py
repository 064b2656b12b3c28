"""Why no placement keeps all rules: the models whose rules cannot hold, each with its smallest relaxation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.base.errors import InfeasibleError, Place
from fabrictool.base.errors import Problem as Complaint
from fabrictool.planner.node_spread import counts_for_it, is_alone, is_spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.planner.problem import Option, PlacementProblem


MOST_NAMES = 6
"""Of models that are told in one sentence."""


def require_options(problem: PlacementProblem) -> None:
    """Raises InfeasibleError when a model of which replicas are asked for can stand nowhere."""
    for need in problem.needs:
        if not problem.of(need.model) and (need.minimum or any(need.pins.values())):
            raise explain_infeasible(problem)


def explain_infeasible(problem: PlacementProblem) -> InfeasibleError:
    """The models whose rules cannot hold, each with the smallest relaxation that would let it."""
    complaints = []
    for need in problem.needs:
        options = [problem.options[i] for i in problem.of(need.model)]
        place = Place(thing=f"models.{need.model}")
        if not options and not need.minimum and not any(need.pins.values()):
            continue  # nothing is asked for
        if not options:
            complaints.append(
                Complaint(
                    "FT2002",
                    f"{need.model}: no partition can hold a replica{_refused(problem, need.model)}",
                    place,
                    "larger devices, fewer bits or a shorter context; or widen what the blueprint allows",
                )
            )
            continue
        most = sum(_room(option) for option in _largest_per_pool(options) if option.pool.stable)
        if most < need.minimum:
            hint = f"lower replicas.min to {most}, or add devices, or widen trust and place"
            message = f"{need.model}: at least {need.minimum} replicas are wanted, {most} fit"
            complaints.append(Complaint("FT2003", message, place, hint))
        nodes = _nodes(options) if is_spread(need) else need.minimum
        if nodes < need.minimum <= most:
            message = (
                f"{need.model}: {need.minimum} nodes are to hold a replica (`spread: node`), {nodes} can for certain"
            )
            hint = f"lower replicas.min to {nodes}, or `spread: none`{_apart(options)}"
            complaints.append(Complaint("FT2003", message, place, hint))
        for (cluster, partition), wanted in sorted(need.pins.items()):
            there = [o for o in _largest_per_pool(options) if o.pool.within(cluster, partition)]
            room = sum(_room(option) for option in there)
            if room < wanted:
                message = f"{need.model}: {wanted} replicas are pinned to {cluster}, {room} fit"
                complaints.append(Complaint("FT2004", message, place, f"pin {room}, or another cluster"))
        pinned = sum(need.pins.values())
        if pinned > need.maximum:
            message = f"{need.model}: {pinned} replicas are pinned, replicas.max is {need.maximum}"
            complaints.append(Complaint("FT2004", message, place, f"raise replicas.max to {pinned}"))
    if not complaints:
        models = _in_words(_most_devices_first(problem))
        limits = ", ".join(dict.fromkeys(limit.name for limit in problem.limits))
        within = f" within the limits ({limits})" if limits else ""
        beside = _in_words([need.model for need in problem.needs if is_spread(need)])
        apart = f" with those of {beside} on different nodes" if beside else ""
        message = f"the minimum replicas of {models} do not fit together{apart}{within}"
        hint = "lower replicas.min of one of them, or add devices to a partition"
        complaints.append(Complaint("FT2001", message, Place(), f"{hint}{', or raise a limit' if limits else ''}"))
    return InfeasibleError(complaints)


def _most_devices_first(problem: PlacementProblem) -> list[str]:
    """Models by the devices that their minima take at least."""
    taken = {
        need.model: need.minimum * min((problem.options[i].devices for i in problem.of(need.model)), default=0)
        for need in problem.needs
    }
    return sorted(taken, key=lambda model: (-taken[model], model))


def _in_words(names: Sequence[str]) -> str:
    told = ", ".join(names[:MOST_NAMES])
    return told if len(names) <= MOST_NAMES else f"{told} and {len(names) - MOST_NAMES} more"


def _largest_per_pool(options: list[Option]) -> list[Option]:
    """Per pool the option with the smallest degree: the one of which most fit."""
    best: dict[tuple[str, str], Option] = {}
    for option in options:
        if option.pool.key not in best or option.stage_devices < best[option.pool.key].stage_devices:
            best[option.pool.key] = option
    return list(best.values())


def _nodes(options: list[Option]) -> int:
    """On how many nodes replicas of a model can be for certain, beside nobody else."""
    able = [option for option in options if counts_for_it(option)]
    pools = {pool.key: pool for option in able for pool in option.pools}
    apart = {key for option in able for key, size in option.blocks if is_alone(pools[key], size)}
    apart |= {key for key, pool in pools.items() if pool.keeps_apart}
    return sum(pool.nodes if key in apart else 1 for key, pool in pools.items())


def _apart(options: list[Option]) -> str:
    """What would let a scheduler's partition have more of them."""
    return ", or `whole_nodes: true` of a partition" if any(not option.pool.keeps_apart for option in options) else ""


def _room(option: Option) -> int:
    """How many of its replicas there would be room for in its first pool, if it had all of it."""
    size, number = next((size, number) for (key, size), number in option.blocks.items() if key == option.pool.key)
    return option.pool.nodes * (option.pool.devices_per_node // size) // number


def _refused(problem: PlacementProblem, model: str) -> str:
    generator = problem.columns.get(model)
    reasons = [] if generator is None else generator.refusals()
    more = len(reasons) - MOST_NAMED
    return f": {'; '.join(reasons[:MOST_NAMED])}{f'; and {more} more' if more > 0 else ''}" if reasons else ""


MOST_NAMED = 6
"""Partitions that a message lists."""
