"""On which nodes replicas get their devices: apart where that is wanted, and nothing that runs moves for a wish."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from fabrictool.blueprint import load
from fabrictool.domain.inventory import Inventory
from fabrictool.planner.device_choice import WantedNodes
from fabrictool.planner.devices import with_devices
from fabrictool.planner.node_spread import crowded, nodes_used
from fabrictool.planner.problem import ModelNeed
from tests.planner.fabrics import write_fabric
from tests.planner.test_diff import agent
from tests.planner.test_exact import option, pool, problem
from tests.planner.test_node_spread import ways
from tests.seeds import seeds

SIZE = 4


def inventory(nodes, more=0, tier="owned"):
    """A host with `nodes` nodes of four devices, and a second partition of `more`."""
    partitions = {"n": {"device": "h100-sxm", "devices_per_node": SIZE, "nodes": nodes, "tier": tier}}
    partitions |= {"more": {"device": "h100-sxm", "devices_per_node": SIZE, "nodes": more}} if more else {}
    head = {
        "apiVersion": "fabrictool/v1",
        "kind": "Inventory",
        "providers": {"p": {}},
        "sites": {"s": {"provider": "p"}},
    }
    clusters = {"a": {"site": "s", "kind": "local", "partitions": partitions}}
    return Inventory.model_validate(head | {"clusters": clusters})


def gpu(replica, tp=1, indices=(), **changes):
    model = replica.partition("/")[0]
    return agent(
        replica, model=model, device="h100-sxm", tp=tp, devices=tp, device_indices=indices, partition="n", **changes
    )


def given(specs, wanted, running=(), nodes=3, **more):
    now = {spec.replica: spec for spec in running}
    chosen = with_devices(specs, inventory(nodes, **more), now, list(running), (), wanted)
    return {spec.replica: spec.device_indices for spec in chosen}


def nodes_of(devices, model):
    return {i // SIZE for replica, its in devices.items() if replica.startswith(f"{model}/") for i in its}


TWO = [gpu("m/0"), gpu("m/1")]
WISHED, NEEDED = WantedNodes({"m": 2}), WantedNodes({"m": 2}, {"m": 2})


def test_two_that_a_minimum_asks_for_are_on_two_nodes():
    assert given(TWO, WantedNodes()) == {"m/0": (0,), "m/1": (1,)}
    assert given(TWO, WISHED) == {"m/0": (0,), "m/1": (4,)}
    assert given([*TWO, gpu("m/2")], WISHED)["m/2"] == (1,), "further ones go into the fullest node again"


def test_nothing_that_runs_moves_for_a_wish_and_one_does_for_a_rule():
    running = [gpu("m/0", indices=(0,)), gpu("m/1", indices=(1,))]
    assert given(TWO, WISHED, running) == {"m/0": (0,), "m/1": (1,)}
    assert given(TWO, NEEDED, running) == {"m/0": (0,), "m/1": (4,)}


def test_one_that_is_elsewhere_already_is_enough():
    running = [gpu("m/0", indices=(0,)), gpu("m/1", indices=(1,))]
    third = msgspec.structs.replace(gpu("m/2"), partition="more")
    assert given([*TWO, third], NEEDED, running, more=1) == {"m/0": (0,), "m/1": (1,), "m/2": (12,)}
    assert given(TWO, NEEDED, running, tier="scavenger") == {"m/0": (0,), "m/1": (1,)}, "the rule is of owned capacity"


def test_what_must_end_first_ends_for_a_rule_and_not_for_a_wish():
    others = [gpu("x/0", 4, (4, 5, 6, 7)), gpu("m/0", indices=(0,))]
    assert given(TWO, WISHED, others, nodes=2) == {"m/0": (0,), "m/1": (1,)}
    assert given(TWO, NEEDED, others, nodes=2) == {"m/0": (0,), "m/1": (4,)}


def test_a_rule_moves_no_more_than_it_must_where_everything_is_full():
    """Nobody but m has to be apart: one of its replicas changes places with what has its size on another node."""
    running = [gpu("m/0", indices=(0,)), gpu("m/1", indices=(1,)), gpu("y/0", indices=(2,)), gpu("y/1", indices=(3,))]
    running += [gpu(f"z/{n}", 2, (4 + 2 * n, 5 + 2 * n)) for n in range(2)]
    running += [gpu(f"w/{n}", 2, (8 + 2 * n, 9 + 2 * n)) for n in range(8)]
    after = given([msgspec.structs.replace(spec, device_indices=()) for spec in running], NEEDED, running, nodes=6)
    assert len(nodes_of(after, "m")) == 2
    assert sum(after[spec.replica] != spec.device_indices for spec in running) == 3


def test_a_wish_gives_way_to_what_would_not_fit():
    full = [*TWO, gpu("x/0", 4), gpu("x/1", 2)]
    devices = given(full, WISHED, nodes=2)
    assert sorted(i for its in devices.values() for i in its) == list(range(8))
    assert len(nodes_of(devices, "m")) == 1


@pytest.mark.parametrize("least", [0, 1, 2, 3])
def test_a_minimum_of_several_is_wished_on_two_nodes_and_spread_on_as_many(least, tmp_path):
    file = write_fabric(tmp_path, "place: {spread: node}")
    file.write_text(file.read_text().replace("min: 1", f"min: {least}"))
    wanted = WantedNodes.by(load(file, environment={}).blueprint.models)
    several = least > 1
    assert wanted == WantedNodes({"m": 2, "other": 2} if several else {}, {"m": least} if several else {})


def drawn(rng):
    """Specs that fit some nodes, those of them that run, and where; models are called by what they are."""
    nodes = rng.randint(1, 3)
    sizes = {model: rng.choice((1, 1, 2, 4)) for model in "klm"}
    free, specs, running = [SIZE] * nodes, [], []
    for model in rng.choices("klm", k=rng.randint(2, 6)):
        able = [at for at, room in enumerate(free) if room >= sizes[model]]
        if not able:
            continue
        node = rng.choice(able)
        first = node * SIZE + SIZE - free[node]
        free[node] -= sizes[model]
        spec = gpu(f"{model}/{sum(s.model == model for s in specs)}", sizes[model])
        specs.append(spec)
        if rng.random() < 0.5:
            running.append(msgspec.structs.replace(spec, device_indices=tuple(range(first, first + sizes[model]))))
    return nodes, specs, running


def fits(devices, specs):
    every = [i for its in devices.values() for i in its]
    assert len(every) == len(set(every))
    for spec in specs:
        its = devices[spec.replica]
        assert len(its) == spec.devices
        assert len({i // SIZE for i in its}) == 1


@seeds(100, drawn=50, long=3000)
def test_nothing_that_runs_moves_or_ends_first_for_a_wish(seed):
    nodes, specs, running = drawn(random.Random(seed))
    wanted = WantedNodes(dict.fromkeys("klm", 2))
    before, after = given(specs, WantedNodes(), running, nodes), given(specs, wanted, running, nodes)
    fits(after, specs)
    held = {i: spec.replica for spec in running for i in spec.device_indices}

    def disturbed(devices):
        return {held[i] for replica, its in devices.items() for i in its if held.get(i, replica) != replica}

    stays = {spec.replica for spec in running if before[spec.replica] == spec.device_indices}
    assert all(after[name] == before[name] for name in stays)
    assert len(disturbed(after)) <= len(disturbed(before))


@seeds(100, drawn=50, long=3000)
def test_wishes_are_kept_wherever_all_of_them_can_be_and_nothing_runs(seed):
    nodes, specs, _ = drawn(random.Random(seed))
    devices = given(specs, WantedNodes(dict.fromkeys("klm", 2)), nodes=nodes)
    fits(devices, specs)
    several = [model for model, its in Counter(spec.model for spec in specs).items() if its > 1]
    possible = any(
        all(sum(model in {name for name, _ in held} for held in way) > 1 for model in several)
        for way in ways([(spec.model, spec.devices) for spec in specs], nodes, SIZE)
    )
    assert all(len(nodes_of(devices, model)) > 1 for model in several) == possible


@seeds(100, drawn=50, long=3000)
def test_a_rule_is_kept_wherever_it_can_be_whatever_runs(seed):
    rng = random.Random(seed)
    nodes, specs, running = drawn(rng)
    number = Counter(spec.model for spec in specs)
    needed = {model: rng.randint(2, its) for model, its in number.items() if its > 1 and rng.random() < 0.8}
    possible = any(
        all(sum(model in {name for name, _ in held} for held in way) >= least for model, least in needed.items())
        for way in ways([(spec.model, spec.devices) for spec in specs], nodes, SIZE)
    )
    devices = given(specs, replace(WantedNodes(needed), needed=needed), running, nodes)
    fits(devices, specs)
    assert all(len(nodes_of(devices, model)) >= least for model, least in needed.items()) == possible


def test_what_only_reads_prompts_has_no_node_of_its_own_and_makes_room():
    """Both that answer have room on one node only, until one of these moves."""
    running = [gpu("m/0", 4, (0, 1, 2, 3))]
    running += [gpu(f"k/{n}", 2, its, phase="prefill") for n, its in ((1, (8, 9)), (3, (10, 11)))]
    answering = [gpu("k/0", 2), gpu("k/2", 2)]
    specs = [*answering, *(msgspec.structs.replace(spec, device_indices=()) for spec in running)]
    devices = given(specs, WantedNodes({"k": 2}, {"k": 2}), running)
    fits(devices, specs)
    assert len({devices[spec.replica][0] // SIZE for spec in answering}) == 2


def test_a_partition_makes_up_for_what_another_has_no_room_for():
    """There are two nodes for both in the second one by number, and one beside what fills the other."""
    beside = [
        msgspec.structs.replace(gpu(name, tp), partition="more") for name, tp in (("l/3", 2), ("l/4", 2), ("k/0", 4))
    ]
    specs = [*(gpu(f"l/{n}") for n in range(3)), *beside]
    for order in (specs, specs[::-1]):
        assert len(nodes_of(given(order, WantedNodes({"l": 2}, {"l": 4}), more=2), "l")) == 4


def drawn_in_two(rng):
    """Specs that fit two partitions, some of which only read prompts or stand on two nodes; those of them that run."""
    nodes = {"n": rng.randint(1, 3), "more": rng.randint(1, 3)}
    sizes = {(model, name): rng.choice((1, 1, 2, 4)) for model in "klm" for name in nodes}
    free = dict.fromkeys(range(sum(nodes.values())), SIZE)
    specs, running = [], []
    for model in rng.choices("klm", k=rng.randint(3, 8)):
        name = rng.choice(("n", "more"))
        size, stages = sizes[model, name], rng.choice((1, 1, 1, 2))
        here = range(nodes["n"]) if name == "n" else range(nodes["n"], len(free))
        able = [at for at in here if free[at] >= size]
        if len(able) < stages:
            continue
        its = rng.sample(able, stages)
        indices = tuple(at * SIZE + SIZE - free[at] + n for at in its for n in range(size))
        for at in its:
            free[at] -= size
        spec = gpu(
            f"{model}/{len(specs)}", size, pp=stages, phase=rng.choice(("unified", "unified", "unified", "prefill"))
        )
        spec = msgspec.structs.replace(spec, partition=name, devices=size * stages, nodes=stages)
        specs.append(spec)
        if rng.random() < 0.3:
            running.append(msgspec.structs.replace(spec, device_indices=indices))
    return nodes, rng.sample(specs, len(specs)), running


def most_nodes(specs, nodes):
    """What is possible of nodes by model that answers, in both partitions."""
    answering = {spec.model for spec in specs if spec.phase != "prefill"}
    in_each = []
    for name, number in nodes.items():
        here = [spec for spec in specs if spec.partition == name]
        blocks = [(spec.model if spec.phase != "prefill" else "", spec.tp) for spec in here for _ in range(spec.pp)]
        in_each.append(
            [Counter(its for held in way for its in {model for model, _ in held}) for way in ways(blocks, number, SIZE)]
        )
    return [{model: a[model] + b[model] for model in answering} for a in in_each[0] for b in in_each[1]]


@seeds(100, drawn=50, long=3000)
def test_a_rule_of_two_partitions_is_kept_wherever_it_can_be_whatever_runs(seed):
    rng = random.Random(seed)
    nodes, specs, running = drawn_in_two(rng)
    reached = most_nodes(specs, nodes)
    needed = {model: least for model, least in rng.choice(reached or [{}]).items() if least > 1}
    devices = given(specs, WantedNodes(dict.fromkeys(needed, 2), needed), running, nodes["n"], more=nodes["more"])
    assert all(len(devices[spec.replica]) == spec.devices for spec in specs)
    answering = {spec.replica: devices[spec.replica] for spec in specs if spec.phase != "prefill"}
    assert all(len(nodes_of(answering, model)) >= least for model, least in needed.items())


def drawn_full(rng):
    """Larger partitions that are nearly full, and replicas by option in them; as many nodes are wanted as there can be
    by number, or a few less.
    """
    nodes = {"n": rng.randint(2, 8), "more": rng.randint(2, 8)}
    pools = {name: replace(pool("a", nodes=most, per_node=SIZE), partition=name) for name, most in nodes.items()}
    every = [option(model, pools[name], tp=rng.choice((1, 1, 2, 4))) for model in "klmo" for name in nodes]
    plain = problem([ModelNeed(model, 0.0, 0, 99) for model in "klmo"], every, [pools["more"], pools["n"]])
    options = plain.options
    free, counts = {name: [SIZE] * most for name, most in nodes.items()}, Counter()
    for _ in range(60):
        at = rng.randrange(len(options))
        room, size = free[options[at].pool.partition], options[at].tp
        able = [node for node, its in enumerate(room) if its >= size]
        if able:
            room[rng.choice(able)] -= size
            counts[at] += 1
    needs = []
    for model in "klmo":
        placed = [(options[at], number) for at, number in counts.items() if options[at].model == model]
        least = max(0, sum(nodes_used(plain, placed).values()) - rng.choice((0, 0, 1, 2)))
        needs.append(ModelNeed(model, 0.0, least, 99, spread_nodes=True))
    return nodes, replace(plain, needs=tuple(needs)), counts


@seeds(60, drawn=20, long=2000)
def test_a_placement_that_is_allowed_gets_devices_that_keep_the_rule(seed):
    """Else a plan would end with FT2903."""
    nodes, instance, counts = drawn_full(random.Random(seed))
    if crowded(instance, counts):
        return
    numbers = itertools.count()
    options = [instance.options[at] for at, number in counts.items() for _ in range(number)]
    specs = [
        msgspec.structs.replace(gpu(f"{its.model}/{next(numbers)}", its.tp), partition=its.pool.partition)
        for its in options
    ]
    needed = {need.model: need.minimum for need in instance.needs if need.minimum > 1}
    devices = given(specs, WantedNodes(dict.fromkeys(needed, 2), needed), nodes=nodes["n"], more=nodes["more"])
    assert all(len(nodes_of(devices, model)) >= least for model, least in needed.items())
