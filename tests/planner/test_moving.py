"""Small changes for small causes: what runs stays, but for what has to move or pays for itself."""

import itertools
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import yaml

from fabrictool.base.errors import InfeasibleError
from fabrictool.blueprint import load
from fabrictool.planner.build import build_problem
from fabrictool.planner.explaining.moves import moves_of, refuse_too_few
from fabrictool.planner.formulation import Formulation
from fabrictool.planner.instances import synthetic
from fabrictool.planner.moving import DRAIN_S, PAYBACK_S, moves_are_used_up, moves_in
from fabrictool.planner.problem import ModelNeed
from fabrictool.planner.solvers import parties, programs
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.solvers.part import part_of
from fabrictool.planner.stages import first_change, in_order, proved, user_stages
from tests.planner.test_exact import cheapest_load, counts, fits, option, pool, problem, random_instance, solve
from tests.seeds import seeds

OBJECTIVES = (("latency",), ("latency", "cost"), ("slo", "cost", "energy", "latency"), ("cost", "latency"))


def running(instance, solution):
    return replace(instance, current=counts(instance, solution))


def grown(instance, factor):
    return replace(instance, needs=tuple(replace(need, rate=factor * need.rate) for need in instance.needs))


def moves(instance, solution):
    now = instance.current
    return sum(abs(solution.counts.get(i, 0) - now.get(o.key, 0)) for i, o in enumerate(instance.options))


# -- against brute force ----------------------------------------------------------------------------------------------


def loading(rng):
    """A tiny instance whose replicas take a while to start."""
    instance = random_instance(rng)
    options = tuple(replace(o, start_s=rng.choice([30.0, 200.0, 900.0])) for o in instance.options)
    return replace(instance, options=options, objective=rng.choice(OBJECTIVES))


def applied(rng):
    """The first such instance of which anything can be placed, with that running."""
    while True:
        instance = loading(rng)
        try:
            placed = running(instance, solve(instance))
        except InfeasibleError:
            continue
        if placed.current:
            return placed


def after_a_loss(rng, instance):
    """Without one node, and what stood there."""
    lost = rng.choice(instance.pools)
    if lost.nodes == 1:
        return None
    left = replace(lost, nodes=lost.nodes - 1)
    options = tuple(replace(o, pool=left) if o.pool == lost else o for o in instance.options)
    pools = tuple(left if where == lost else where for where in instance.pools)
    now = Counter(instance.current)
    smaller = replace(instance, options=options, pools=pools)
    here = [o.key for o in options if o.pool == left]
    while not fits(rules_apart(smaller), [now[o.key] for o in options]):
        now[rng.choice([key for key in here if now[key]])] -= 1
    return replace(smaller, current={key: count for key, count in now.items() if count})


def rules_apart(instance):
    return replace(instance, needs=tuple(replace(need, minimum=0) for need in instance.needs))


def worth(instance, now):
    """Of all counts that keep the rules: (unserved, by stage what they are worth with their moves, moves)."""
    most = {need.model: need.maximum for need in instance.needs}
    for chosen in itertools.product(*(range(most[o.model] + 1) for o in instance.options)):
        if not fits(instance, chosen):
            continue
        unserved, inside = cheapest_load(instance, chosen)
        values = {"cost": 0.0, "energy": 0.0, "latency": inside}
        moved = 0
        for o, count in zip(instance.options, chosen, strict=True):
            values["cost"] += o.cost * count
            values["energy"] += o.power * count
            change = count - now.get(o.key, 0) if now else 0
            seconds = change * o.start_s if change > 0 else -change * DRAIN_S
            usual = {"cost": o.cost, "energy": o.power, "latency": o.levels[len(o.levels) // 2].in_system}
            for name, unit in usual.items():
                values[name] += unit * seconds / PAYBACK_S
            moved += abs(change)
        yield round(unserved, 5), values, moved


SPARED = {"latency": 0.05, "cost": 0.01, "energy": 0.01}


def fair(instance, *, room):
    """(values, moves) of all that are as good as the stages want them, within a little more or less than that."""
    every = list(worth(instance, instance.current))
    served = min(unserved for unserved, _, _ in every)
    every = left = [(values, moved) for unserved, values, moved in every if unserved == served]
    limits = {}
    for name in instance.objective:
        if name != "slo":
            least = min(values[name] for values, _ in left)
            left = [it for it in left if it[0][name] <= least + 1e-5]
            limits[name] = least * (1 + SPARED[name]) * (1 + room) + room
    return [it for it in every if all(it[0][name] <= limit for name, limit in limits.items())]


def fewest(instance, *, room):
    return min((moved for _, moved in fair(instance, room=room)), default=math.inf)


@seeds(0, drawn=8, long=1000)
def test_no_more_moves_than_brute_force_needs(seed):
    rng = random.Random(seed)
    instance = applied(rng)
    changed = [grown(instance, 1.03), grown(instance, rng.choice([0.6, 1.5, 2.0])), after_a_loss(rng, instance)]
    for later in (it for it in changed if it is not None and it.current):
        try:
            again = solve(later)
        except InfeasibleError:
            continue
        # What is within a hair of a limit may count as within it, or not.
        assert fewest(later, room=1e-4) <= moves(later, again) <= fewest(later, room=-1e-4)


@seeds(0, drawn=8, long=1000)
def test_what_is_spared_saves_moves_or_is_taken_back(seed):
    """Of all with no more moves, and no farther from the best than that may be, the first stage is at its least."""
    rng = random.Random(seed)
    later = grown(applied(rng), rng.choice([1.03, 1.3, 2.0]))
    try:
        again = solve(later)
    except InfeasibleError:
        return
    (first,) = [name for name in later.objective if name != "slo"][:1]
    least = min(values[first] for values, moved in fair(later, room=1e-4) if moved <= moves(later, again))
    reached = next(stage.objective for stage in again.stages if stage.name == first)
    assert reached <= least * (1 + 1e-3) + 2e-3


@seeds(0, drawn=8, long=1000)
def test_a_plan_of_what_was_applied_is_empty_tiny(seed):
    instance = applied(random.Random(seed))
    assert moves(instance, solve(instance)) == 0


# -- on fabrics as they are -------------------------------------------------------------------------------------------


def applied_fabric(folder, rng):
    """The first fabric whose models all have room for what they must have, with its placement running; and that."""
    while True:
        instance = fabric(folder, rng)
        try:
            first = searched(instance)
        except InfeasibleError:
            continue
        return running(instance, first), first


def fabric(folder, rng):
    """The problem of a made-up fabric of some dozen devices, at any load."""
    types = rng.randint(1, 4)
    size = synthetic.parse(f"{rng.randint(2, 8)}x{types}x{rng.randint(8 * types, 96)}")
    for name, document in synthetic.documents(size, rng.randrange(10**6), rng.uniform(0.3, 1.2)).items():
        (folder / name).write_text(yaml.safe_dump(document, sort_keys=False))
    loaded = load(folder / "blueprint.yaml", environment={})
    clusters = list(loaded.inventory.clusters)
    built, _ = build_problem(loaded.blueprint, loaded.inventory, usable=clusters, unseen=(), current={})
    return replace(built, objective=rng.choice(OBJECTIVES))


def searched(instance):
    *_, solution = ExactSolver().solve(instance, deadline_s=3.0, seed=0)
    return solution


@seeds(0, drawn=3, long=1000)
def test_what_was_proved_stays_and_what_was_not_moves_for_more_than_is_spared(seed, tmp_path):
    """That a plan of what was applied is empty wherever its search ended is `test_unchanged`'s."""
    instance, first = applied_fabric(tmp_path, random.Random(seed))
    again = searched(instance)
    if proved(first) or not moves(instance, again):
        assert moves(instance, again) == 0
    else:
        before, after = (values(instance, dict(solution.counts)) for solution in (first, again))
        name, change = first_change(before, after, user_stages(instance))
        assert -change > SPARED.get(name, 0.0) * after[name]


@seeds(0, drawn=2, long=1000)
def test_no_replica_moves_that_need_not(seed, tmp_path):
    """Each move undone by itself costs more than the plan was free to spend, or breaks a rule."""
    later = grown(applied_fabric(tmp_path, random.Random(seed))[0], 1.03)
    again = searched(later)
    reached = values(later, dict(again.counts))
    assert reached is not None
    best = {stage.name: stage for stage in again.stages}
    for i, o in enumerate(later.options):
        change = again.counts.get(i, 0) - later.current.get(o.key, 0)
        if change:
            undone = dict(again.counts) | {i: again.counts.get(i, 0) - (1 if change > 0 else -1)}
            without = values(later, undone)
            assert without is None or not is_as_good(without, reached, best)


def values(instance, chosen):
    """By stage, what counts are worth; None where they break a rule."""
    room = Counter()
    for i, count in chosen.items():
        for (key, size), number in instance.options[i].blocks.items():
            room[key] += size * number * count
    if any(room[where.key] > where.nodes * where.devices_per_node for where in instance.pools):
        return None
    loads = Formulation.of_counts(instance, chosen)
    result = in_order(loads, user_stages(instance), seconds=60.0, seed=0)
    return None if result is None else result[0]


def is_as_good(without, reached, best):
    """Whether every stage that users feel is within what the search spared for what runs."""
    for name, value in reached.items():
        limit = max(value, best[name].bound * (1 + SPARED.get(name, 0.0)))
        if without.get(name, 0.0) > limit * (1 - 1e-3) + 1e-4:
            return False
    return True


# -- case by case -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start_s", "moved"), [(0.0, True), (600.0, True), (6000.0, False)])
def test_a_cheaper_place_is_worth_a_load_that_pays_back_within_the_hour(start_s, moved):
    dear, cheap = pool("dear", price=2.0), pool("cheap", price=1.0)
    options = [replace(option("m", where), start_s=start_s) for where in (dear, cheap)]
    now = {("m", "dear", "p", 1, 1, "unified"): 1}
    instance = problem([ModelNeed("m", 0.5, 1, 1)], options, [dear, cheap], current=now, objective=("cost",))
    assert (counts(instance, solve(instance)) != now) is moved


def test_what_is_not_served_is_mended_however_long_it_takes():
    a = pool("a", nodes=4)
    now = {("m", "a", "p", 1, 1, "unified"): 1}
    slow = [replace(option("m", a), start_s=1e6)]
    instance = problem([ModelNeed("m", 0.9, 0, 4)], slow, [a], current=now)
    assert counts(instance, solve(instance)) == {("m", "a", "p", 1, 1, "unified"): 2}


def test_values_that_a_solution_states_hold_its_moves():
    dear, cheap = pool("dear", price=2.0), pool("cheap", price=1.0)
    options = [replace(option("m", where), start_s=360.0) for where in (dear, cheap)]
    now = {("m", "dear", "p", 1, 1, "unified"): 1}
    instance = problem([ModelNeed("m", 0.5, 1, 1)], options, [dear, cheap], current=now, objective=("cost",))
    found = solve(instance)
    stated = {stage.name: stage.objective for stage in found.stages}
    # A replica at 1 an hour, a tenth of an hour of loading it, and a minute of the other one.
    assert stated["cost"] == pytest.approx(1.0 + 0.1 + 2.0 / 60)
    assert moves_in(instance, found.counts, "cost") == pytest.approx(0.1 + 2.0 / 60)


# -- no more than so many ---------------------------------------------------------------------------------------------


@seeds(0, drawn=6, long=1000)
def test_no_more_moves_than_are_allowed_and_the_best_of_them(seed):
    rng = random.Random(seed)
    instance = applied(rng)
    later = grown(instance, rng.choice([0.5, 1.5, 2.5]))
    for most in range(4):
        limited = replace(later, max_moves=most)
        fair = [unserved for unserved, _, moved in worth(later, later.current) if moved <= most]
        try:
            again = solve(limited)
        except InfeasibleError:
            assert not fair
            continue
        assert moves(limited, again) <= most
        assert again.stages[0].objective == pytest.approx(min(fair), abs=2e-3)


def test_large_fabrics_keep_the_limit_in_every_part(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "FEW", 10)
    monkeypatch.setattr(parties, "TOGETHER", 20)
    monkeypatch.setattr(parties, "TOGETHER_BY_CAPACITY", 20)
    for seed in random.SystemRandom().sample(range(10**6), 2):
        limited = replace(grown(applied_fabric(tmp_path, random.Random(seed))[0], 1.4), max_moves=3)
        assert moves(limited, searched(limited)) <= 3


def test_rules_that_need_more_moves_than_are_allowed_say_how_many():
    a = pool("a", nodes=4)
    now = {("m", "a", "p", 1, 1, "unified"): 1}
    needs = [ModelNeed("m", 0.5, 3, 4)]
    limited = replace(problem(needs, [option("m", a)], [a], current=now), max_moves=1)
    with pytest.raises(InfeasibleError):
        solve(limited)
    with pytest.raises(InfeasibleError, match="the rules need 2 moves, and `--max-moves` allows 1"):
        refuse_too_few(limited, 0)


def test_the_plan_says_what_moves_and_what_for():
    dear, cheap = pool("dear", price=2.0), pool("cheap", price=1.0)
    options = [replace(option("m", where), start_s=360.0) for where in (dear, cheap)]
    now = {("m", "dear", "p", 1, 1, "unified"): 1}
    instance = problem([ModelNeed("m", 0.5, 1, 1)], options, [dear, cheap], current=now, objective=("cost",))
    its = moves_of(instance, solve(instance), "CHF", 0)
    assert its is not None
    assert (its.starts, its.stops, its.loading_s, its.devices) == (1, 1, 360.0, 1)
    assert its.otherwise == "if nothing moved: 1 CHF/h more cost"
    assert moves_of(replace(instance, current={}), solve(instance), "CHF", 0) is None


def test_what_is_lost_by_the_limit_is_said_to_be():
    a = pool("a", nodes=4)
    now = {("m", "a", "p", 1, 1, "unified"): 1}
    instance = problem([ModelNeed("m", 2.0, 1, 4)], [option("m", a)], [a], current=now)
    for most, used in ((0, True), (1, True), (5, False)):
        limited = replace(instance, max_moves=most)
        assert moves_are_used_up(limited, solve(limited).counts) is used


def test_a_part_whose_models_do_not_run_yet_counts_its_starts():
    a = pool("a", nodes=9)
    now = {("m", "a", "p", 1, 1, "unified"): 1}
    needs = [ModelNeed("m", 0.5, 1, 4), ModelNeed("n", 2.0, 0, 4)]
    instance = replace(problem(needs, [option("m", a), option("n", a)], [a], current=now), max_moves=2)
    part, _ = part_of(instance, instance.running, range(2), ["n"])
    assert part.runs
    assert (part.current, part.max_moves) == ({}, 2)
    assert sum(solve(part).counts.values()) == 2


def test_the_plan_says_where_what_runs_cannot_stay():
    a, b = pool("a", nodes=1), pool("b", nodes=2)
    now = {("m", "a", "p", 1, 1, "unified"): 2}
    instance = problem([ModelNeed("m", 0.5, 2, 2)], [option("m", where) for where in (a, b)], [a, b], current=now)
    its = moves_of(instance, solve(instance), "", 0)
    assert its is not None
    assert its.otherwise == "what runs cannot stay: it breaks a rule, or its nodes are gone"
