"""Replicas of a model on different nodes: rows, packing and devices, against the plain statement on tiny fabrics."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from fabrictool.base.errors import FabrictoolError, InfeasibleError
from fabrictool.cli.planning import SearchLimit
from fabrictool.cli.searches import Searches
from fabrictool.planner.apart_search import searched_apart
from fabrictool.planner.chosen import SearchOptions, _searched
from fabrictool.planner.node_spread import crowded
from fabrictool.planner.packing import Block, packed
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.solvers.registry import SOLVERS
from tests.planner.test_exact import option, pool, problem
from tests.seeds import seeds


def ways(blocks, nodes, per_node):
    """Every way in which (model, size) blocks can be on nodes, alike ones once: by node, what is on it."""
    every = {((),) * nodes}
    for model, size in blocks:
        more = set()
        for state in every:
            for node, held in enumerate(state):
                if sum(its for _, its in held) + size <= per_node:
                    there = tuple(sorted([*held, (model, size)]))
                    more.add(tuple(sorted([*state[:node], there, *state[node + 1 :]])))
        every = more
    return every


def keeps(instance, number):
    """Whether so many replicas by option keep the statement, the bounds and the nodes' room."""
    placed = list(zip(instance.options, number, strict=True))
    for need in instance.needs:
        if not need.minimum <= sum(k for o, k in placed if o.model == need.model) <= need.maximum:
            return False
    in_pools = []
    for where in instance.pools:
        blocks = [(o.model, o.tp) for o, k in placed if o.pool.key == where.key for _ in range(k)]
        in_pools.append(
            {
                tuple(sum(need.model in {model for model, _ in held} for held in way) for need in instance.needs)
                for way in ways(blocks, where.nodes, where.devices_per_node)
            }
        )
    return any(
        all(
            sum(here[at] for here in together) >= need.minimum
            for at, need in enumerate(instance.needs)
            if need.spread_nodes
        )
        for together in itertools.product(*in_pools)
    )


def drawn(rng):
    """One or two pools that are nearly full with two to four models."""
    pools = [pool(name, nodes=rng.randint(1, 3), per_node=rng.choice((2, 4))) for name in "ab"[: rng.randint(1, 2)]]
    needs, options = [], []
    for model in "klmn"[: rng.randint(2, 4)]:
        least = rng.randint(1, 3)
        spread = rng.random() < 0.7
        needs.append(ModelNeed(model, 0.0, least, least + rng.randint(0, 1), spread_nodes=spread))
        for where in pools:
            sizes = {
                min(size, where.devices_per_node) for size in rng.choices((1, 1, 2, 4), k=rng.choice((0, 1, 1, 1, 2)))
            }
            options += [option(model, where, tp=size) for size in sorted(sizes)]
    return problem(needs, options, pools, objective=("cost",))


def brute_force(instance):
    """The least number of replicas; None: no placement keeps the rules."""
    most = {need.model: need.maximum for need in instance.needs}
    every = itertools.product(*(range(most[o.model] + 1) for o in instance.options))
    return min((sum(number) for number in every if keeps(instance, number)), default=None)


def searched(instance, name="exact"):
    try:
        return _searched(instance, SearchOptions(work_s=30, solver=SOLVERS[name]()), None)[1]
    except InfeasibleError:
        return None


@seeds(20, drawn=10, long=1500)
def test_it_is_kept_wherever_it_can_be(seed):
    instance = drawn(random.Random(seed))
    least, solution = brute_force(instance), searched(instance)
    assert (solution is None) == (least is None)
    if solution is not None:
        number = [solution.counts.get(i, 0) for i in range(len(instance.options))]
        assert keeps(instance, number)
        assert sum(number) == least


@pytest.mark.parametrize("name", ["cp", "tabu"])
@seeds(10, drawn=5, long=200)
def test_other_solvers_keep_it_too(name, seed):
    instance = drawn(random.Random(seed))
    try:
        solution = searched(instance, name)
    except FabrictoolError:  # a heuristic that has none proves nothing
        assert name != "cp"
        return
    if name == "cp":
        assert (solution is None) == (brute_force(instance) is None)
    if solution is not None:
        assert keeps(instance, [solution.counts.get(i, 0) for i in range(len(instance.options))])


def test_both_answers_occur_and_the_statement_matters():
    seen = Counter()
    for seed in range(120):
        instance = drawn(random.Random(seed))
        free = replace(instance, needs=tuple(replace(need, spread_nodes=False) for need in instance.needs))
        seen[brute_force(instance) is None, brute_force(free) is None] += 1
    assert seen[False, False] > 20
    assert seen[True, False] > 5


def full_of_small(least=0):
    """Six small replicas in two nodes of eight, and a larger model that wants more than the rest."""
    a = pool("a", nodes=2, per_node=8)
    needs = [*(ModelNeed(model, 0.0, 2, 2, spread_nodes=True) for model in "klm"), ModelNeed("n", 8.0, least, 10)]
    options = [*(option(model, a) for model in "klm"), option("n", a, tp=2)]
    return problem(needs, options, [a], objective=("cost",))


@pytest.mark.parametrize("least", [0, 3, 4])
def test_nodes_without_room_cost_no_more_than_they_must_and_prove_nothing(least):
    instance = full_of_small(least)
    assert keeps(instance, [2, 2, 2, 4])
    assert not keeps(instance, [2, 2, 2, 5])
    solution = searched(instance)
    assert solution.counts == {0: 2, 1: 2, 2: 2, 3: 4}
    assert not solution.optimal
    first, *later = solution.stages
    assert (first.objective, first.bound) == (pytest.approx(4.8), pytest.approx(4.0)), "what five would leave"
    assert [stage.bound for stage in later] == [0.0] * len(later)


@pytest.mark.parametrize("proved", [True, False])
def test_what_is_as_good_as_a_search_without_such_rows_is_as_good_as_proved(proved):
    """Of equals the first search took the ones that have no room."""
    instance = full_of_small()
    alike = replace(instance, needs=(*instance.needs[:3], replace(instance.needs[3], rate=3.2)))
    (*_, best) = SOLVERS["exact"]().solve(alike, deadline_s=30, seed=0)
    assert best.optimal
    assert best.counts[3] == 4

    def search(asked, _work):
        first = replace(best, counts={**best.counts, 3: 5}, optimal=proved)
        return (best if asked.crowded else first), False

    _, solution, _ = searched_apart(alike, search)
    assert solution.counts == best.counts
    assert solution.optimal == proved
    assert solution.stages == best.stages


def test_what_does_not_fit_is_said_not_to_have_been_seen():
    with pytest.raises(InfeasibleError, match="no way was seen"):
        _searched(full_of_small(5), SearchOptions(work_s=30, solver=SOLVERS["exact"]()), None)


def test_who_stops_the_first_search_waits_for_no_second():
    class Stopped:
        name, asked = "stopped", 0

        def solve(self, problem, **limits):
            self.asked += 1
            yield from SOLVERS["exact"]().solve(problem, **limits)
            if self.asked == 1:
                raise KeyboardInterrupt

    solver = Stopped()
    with pytest.raises(KeyboardInterrupt):
        _searched(full_of_small(), SearchOptions(work_s=30, solver=solver, progress=lambda _: None), None)
    assert solver.asked == 1


def test_other_commands_show_nothing_that_has_no_room():
    searches = Searches(SearchLimit(30.0, math.inf), 0, 1, keeps=False)
    assert searches.solve(full_of_small()).counts == {0: 2, 1: 2, 2: 2, 3: 4}
    assert searches.complete == 1


def test_small_models_that_fill_their_nodes_leave_no_room_for_a_larger_one():
    """The rows allow it: only putting the blocks into nodes shows that each has one device left."""
    a = pool("a", nodes=2, per_node=4)
    needs = [ModelNeed(model, 0.0, 2, 2, spread_nodes=True) for model in "klm"]
    small = [option(need.model, a) for need in needs]
    instance = problem([*needs, ModelNeed("n", 0.0, 1, 1)], [*small, option("n", a, tp=2)], [a], objective=("cost",))
    assert brute_force(instance) is None
    assert crowded(instance, dict.fromkeys(range(3), 2) | {3: 1}) == {a.key}
    assert searched(instance) is None
    assert searched(replace(instance, needs=(*needs, ModelNeed("n", 0.0, 0, 1)))).counts == dict.fromkeys(range(3), 2)


@seeds(10, drawn=6, long=500)
def test_blocks_find_their_nodes_where_there_is_a_way(seed):
    rng = random.Random(seed)
    nodes, per_node = rng.randint(1, 3), rng.choice((2, 4))
    sizes = {model: rng.choice((1, 2, per_node)) for model in "klm"}
    apart = {model: rng.randint(0, nodes) for model in sizes}
    blocks = [Block(model, size, apart=n < apart[model]) for model, size in sizes.items() for n in range(3)]
    blocks = [block for block in blocks if block.apart or rng.random() < 0.3]
    found = packed(blocks, nodes, per_node)
    possible = any(
        all(sum(model in {name for name, _ in held} for held in way) >= number for model, number in apart.items())
        for way in ways([(block.model, block.size) for block in blocks], nodes, per_node)
    )
    assert (found is not None) == possible
    for node in range(nodes) if found is not None else ():
        here = [block for block, where in zip(blocks, found, strict=True) if where == node]
        assert sum(block.size for block in here) <= per_node
        assert max(Counter(block.model for block in here if block.apart).values(), default=0) <= 1
