"""Times of starts by model, cluster and loader: what is believed, and which loader is next."""

import msgspec
import pytest

from fabrictool.blueprint import load
from fabrictool.catalog import engines
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, ObservedUnit, Queue
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import updatable
from fabrictool.domain.state import Applied, State, operation_id
from fabrictool.engines.adapter import adapter
from fabrictool.planner.build import build_problem
from fabrictool.planner.diff import WantedUnit, actions
from fabrictool.planner.healing import heal
from fabrictool.planner.loads import known_loads, start_s, start_times, with_loader
from fabrictool.planner.permitted import LOAD_S, promised, start_time
from fabrictool.planner.plan import PlanOptions, plan
from fabrictool.planner.succession import IDLE_WAIT_S, UNKNOWN_WAIT_S, lead_s
from tests.planner.test_build import BLUEPRINT, INVENTORY
from tests.planner.test_dormant import LINEAGE, NOW, agent

ALL = ("default", "eager", "streamer")


@pytest.mark.parametrize(
    ("loads", "believed"),
    [
        ({}, []),
        ({"m": [90.0]}, [90.0]),
        ({"m": [90.0], "m@d/eager": [50.0]}, [90.0, 50.0]),
        ({"m": [90.0], "m@c/eager": [50.0]}, [50.0]),
        ({"m": [90.0], "m@c/eager": [50.0], "m@c/default": [70.0, 60.0]}, [70.0, 60.0]),
        ({"mm@c/default": [1.0], "other": [2.0]}, []),
    ],
)
def test_what_is_nearest_is_believed(loads, believed):
    assert list(known_loads(loads, agent(0))) == believed


@pytest.mark.parametrize(
    ("loads", "failed", "loaders"),
    [
        ({}, [], ["default", "eager", "streamer", "default"]),
        ({"m@c/default": [90.0]}, [], ["eager", "streamer", "eager", "streamer"]),
        ({"m@c/default": [90.0]}, ["m@c/streamer"], ["eager"] * 4),
        ({"m@c/default": [90.0], "m@c/eager": [10.0, 95.0, 20.0], "m@c/streamer": [50.0]}, [], ["eager"] * 4),
        ({"m@c/default": [90.0], "m@c/eager": [95.0], "m@c/streamer": [50.0]}, ["m@c/streamer"], ["default"] * 4),
        ({"m@d/default": [1.0], "m": [1.0]}, ["m@d/eager"], ["default", "eager", "streamer", "default"]),
        ({}, ["m@c/default", "m@c/eager", "m@c/streamer"], ["default"] * 4),
    ],
)
def test_each_is_tried_once_and_then_the_quickest_is_taken(loads, failed, loaders):
    state = State(loads=loads, failed_loaders=failed)
    assert [with_loader(agent(number, loaders=ALL), state).loads_by for number in range(4)] == loaders


def test_without_a_choice_nothing_is_chosen():
    state = State(loads={"m@c/eager": [1.0]})
    assert with_loader(agent(0), state).loader is msgspec.UNSET
    assert with_loader(agent(0, loader="streamer"), state).loader == "streamer"


def seen(spec, **state):
    address = f"replica/{spec.replica}"
    unit = ObservedUnit(
        address=address, operation=operation_id(LINEAGE, address, 1), state="running", ready=True, in_force="current",
        spec_digest="", job="7",
    )  # fmt: skip
    unit = msgspec.structs.replace(unit, spec_digest=spec_digest(spec))
    memory = State(lineage=LINEAGE, applied_units={address: Applied(cluster="c", spec=spec)}, **state)
    facts = ClusterFacts(cluster="c", known=True, units=(unit,))
    specs = {unit.operation: spec}
    return Evidence(fabric="f", lineage=LINEAGE, at=NOW, clusters={"c": facts}, specs=specs, state=memory)


@pytest.mark.parametrize("more", [{"loader": "eager"}, {"loader": "streamer", "loaders": ALL}, {}])
@pytest.mark.parametrize("in_force", ["current", ""])
def test_a_loader_alone_is_no_reason_for_an_action(more, in_force):
    former, wanted = agent(0, loader="default"), agent(0, **more)
    evidence = seen(former)
    facts = evidence.clusters["c"]
    units = tuple(msgspec.structs.replace(unit, in_force=in_force) for unit in facts.units)
    evidence = msgspec.structs.replace(evidence, clusters={"c": msgspec.structs.replace(facts, units=units)})
    assert updatable(former, wanted)
    (step,) = actions({"replica/m/0": WantedUnit("replica/m/0", "c", wanted, "")}, evidence)
    assert step.kind == "keep"


def test_a_healing_starts_by_the_loader_whose_turn_it_is():
    spec = agent(0, loader="default", loaders=ALL, idle_after_s=msgspec.UNSET)
    evidence = seen(spec, loads={"m@c/default": [90.0], "m@c/eager": [40.0], "m@c/streamer": [80.0]})
    facts = ClusterFacts(cluster="c", known=True)
    healing = heal(msgspec.structs.replace(evidence, clusters={"c": facts}), {}, now=NOW)
    (create,) = healing.plan.changes
    assert (create.kind, create.spec.loads_by) == ("create", "eager")
    (start,) = start_times(healing.plan.changes, evidence.state.loads)
    assert (start.loader, start.median_s, start.starts, start.alike) == ("eager", 40.0, 1, True)


def test_a_successor_is_asked_for_by_what_starts_took_there():
    facts, state = ClusterFacts(cluster="c", known=True), State(loads={"m@c/default": [500.0], "m@d/default": [5.0]})
    other = State(loads={"m@c/default": [100.0], "m@d/default": [5.0]})
    spec = agent(0)
    assert lead_s(spec, facts, state) - lead_s(spec, facts, other) == 400.0


@pytest.mark.parametrize("idle", [0, 3])
def test_a_successor_is_asked_for_by_the_wait_that_the_inventory_states_else_by_what_jobs_waited(idle):
    """As schedules go by it; neither idle nodes nor jobs that waited for less are believed more."""
    spec, queues = agent(0), {"gpu": Queue(nodes=4, idle=idle)}
    facts = ClusterFacts(cluster="c", known=True, queues=queues)
    stated = msgspec.structs.replace(facts, stated_waits={"gpu": 7200.0, "other": 1.0})
    at_once = msgspec.structs.replace(facts, stated_waits={"gpu": 0.0})
    unknown, measured = State(), State(waits={"c/gpu": [600.0]})
    usual = IDLE_WAIT_S if idle else UNKNOWN_WAIT_S
    rest = lead_s(spec, at_once, unknown)
    assert rest == lead_s(spec, at_once, measured)
    assert lead_s(spec, facts, unknown) - rest == usual
    assert lead_s(spec, facts, measured) - rest == 600.0
    assert lead_s(spec, stated, unknown) - rest == lead_s(spec, stated, measured) - rest == 7200.0


def test_a_state_of_an_earlier_release_is_read():
    old = b'{"schema":1,"fabric":"f","lineage":"l","serial":3,"loads":{"m":[90.0]}}'
    assert known_loads(msgspec.json.decode(old, type=State).loads, agent(0)) == [90.0]


def test_the_catalogue_and_the_engines_know_the_same_loaders():
    for name, row in engines().items():
        if row.started:
            assert set(row.loaders) == adapter(name).capabilities.loaders


# -- in a plan ----------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(tmp_path):
    def make(loader="default"):
        inventory = INVENTORY.replace("memory_per_node: 1TiB}", "memory_per_node: 1TiB, walltime: 1h}")
        (tmp_path / "inventory.yaml").write_text(inventory)
        text = BLUEPRINT.replace("ENGINE", "vllm").replace("PRECISION", "bf16").replace("EXTRA", f"loader: {loader}")
        (tmp_path / "blueprint.yaml").write_text(text)
        return load(tmp_path / "blueprint.yaml", environment={})

    return make


def test_a_measured_start_beats_the_estimate(loaded):
    found = loaded()
    place = found.inventory.clusters["gpus"].partitions["big"]
    assert promised(place, start_time(place, 16e9)) < 1 - LOAD_S / 3600
    assert promised(place, start_time(place, 16e9, 36.0)) == pytest.approx(0.99)
    assert promised(place, start_time(place, 16e9, 3000.0)) == 0.0

    def capacity(loads):
        problem, _ = build_problem(
            found.blueprint, found.inventory, usable=["gpus", "other"], unseen=(), current={}, loads=loads
        )
        rates = {o.pool.partition: o.levels[-1].rate for o in problem.options if (o.tp, o.pp) == (1, 1)}
        return rates.get("big", 0.0)

    usual = capacity({})
    assert capacity({"m@gpus/default": [36.0]}) > usual
    assert capacity({"m@gpus/default": [900.0]}) < usual
    assert capacity({"m@gpus/default": [3000.0]}) == 0.0
    assert capacity({"m@other/default": [3000.0], "m": [3000.0]}) == usual, "elsewhere is no measurement here"


@pytest.mark.parametrize(
    ("loader", "seconds"), [("default", 90.0), ("eager", 40.0), ("measured", 40.0), ("streamer", None)]
)
def test_the_start_of_a_loader_that_was_not_tried_is_that_of_others(loaded, loader, seconds):
    loads = {"m@gpus/default": [91.0, 89.4, 90.1], "m@gpus/eager": [40.0]}
    model = loaded(loader).blueprint.models["m"]
    assert start_s(loads, model, "m", "gpus") == (40.0 if seconds is None else seconds)
    assert start_s({}, model, "m", "gpus") is None


def test_a_plan_says_by_which_loader_and_how_long(loaded):
    from fabrictool.cli.plan_text import action_lines

    found = loaded("measured")
    seen = {name: ClusterFacts(cluster=name, known=True) for name in found.inventory.clusters}
    loads = {"m@gpus/default": [212.0], "m@gpus/eager": [90.0, 110.0, 95.0], "m@gpus/streamer": [120.0]}
    evidence = Evidence(fabric="f", lineage="", at=0.0, clusters=seen, specs={}, state=State(loads=loads))
    made = plan(found.blueprint, found.inventory, evidence, PlanOptions(0), now=0.0)
    creates = [action for action in made.changes if action.address.startswith("replica/")]
    assert {action.spec.loads_by for action in creates} == {"eager"}
    assert [(start.loader, start.median_s, start.starts) for start in made.starts] == [("eager", 95.0, 3)] * len(
        creates
    )
    text = "\n".join(action_lines(made, 0))
    assert "should serve after 95 s, as measured (3 starts, loader eager)" in text
