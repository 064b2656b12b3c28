"""What the plan says of a model after its worst loss, against a replay that the test makes of it by itself."""

import msgspec
import pytest

from fabrictool.cli.plan_text import complaints, loss_lines
from fabrictool.domain.plan import Placement
from fabrictool.planner.chosen import SearchOptions, best, forecast_of
from fabrictool.planner.loss_replay import _on_one_node
from fabrictool.planner.problem import replica_key
from fabrictool.planner.replay import replay
from fabrictool.planner.weights import planned_rates
from tests.planner.fabrics import situation

pytestmark = pytest.mark.usefixtures("kept_calibrations")

WISH = "survive: {kind}\nslo: {{ttft_p95: 2 s, tpot_p95: 50 ms}}"


def planned(folder, kind):
    folder.mkdir(exist_ok=True)
    there = situation(folder, WISH.format(kind=kind), old="objective: [cost]", new="objective: [slo, cost]")
    return best(there, SearchOptions(work_s=5.0))


@pytest.mark.parametrize("kind", ["node", "partition", "site", "provider"])
def test_the_rest_is_played_with_the_whole_demand(tmp_path, kind):
    """Every loss by itself, by another way: the one that leaves least is the one that the plan speaks of."""
    chosen = planned(tmp_path, kind)
    (model,) = (m for m in forecast_of(chosen, "CHF").models if m.model == "m")
    after = model.survival.replay
    rates = planned_rates(chosen.problem, chosen.solution)
    mine = [replica for replica in chosen.placement.replicas if replica.model == "m"]
    clusters = {replica.cluster for replica in mine}
    rests = []
    for cluster in sorted(clusters):
        here = [replica for replica in mine if replica.cluster == cluster]
        gone = here[:8] if kind == "node" else here  # of one device each, on nodes of eight
        rests.append([replica for replica in mine if replica not in gone])
    assert min(len(rest) for rest in rests) > 0, "somebody is left, as was asked for"
    there = chosen.situation
    figures = set()
    for rest in rests:
        played = replay(there.blueprint, there.inventory, Placement(replicas=tuple(rest)), rates, 0, ["m"])
        figures.add(played["m"].figures.attainment)
    assert after.attainment in figures
    assert after.slo == "meets"
    assert model.survival.worst == ""
    assert after.without in loss_lines(model)[0]
    assert complaints(model) == []


def test_what_the_rest_misses_is_said_and_learned_from(tmp_path, monkeypatch):
    """The closed form thinks that the rest keeps the SLO; what the replay shows decides."""
    first = planned(tmp_path / "first", "site")
    count = sum(replica.model == "m" for replica in first.placement.replicas)
    real = first.after["m"]
    shown = msgspec.structs.replace(real.played.figures, attainment=0.5, low=0.4, high=0.6)

    def half(*_arguments):
        """Plays the rest as if half of the requests missed, at the load that it has in the first placement."""
        short = dict.fromkeys(real.rates, 0.4)
        played = type(real.played)(shown, real.played.p95, True, ("TTFT within 2 s: 50% of requests",), (), short)
        return {"m": type(real)(real.loss, played, real.rates)}

    monkeypatch.setattr("fabrictool.planner.loss_replay.played_losses", half)
    second = planned(tmp_path / "second", "site")
    (model,) = (m for m in forecast_of(second, "CHF").models if m.model == "m")
    assert model.survival.replay.slo == "misses"
    assert any("without site" in line for line in complaints(model))
    assert second.again == "searched", "the replay's lesson led to another search"
    # The rest that is played stays the same here, so that no other placement is better than the first.
    assert sum(replica.model == "m" for replica in second.placement.replicas) == count


def test_a_model_without_an_slo_or_without_a_loss_has_no_replay(tmp_path):
    for wish in ("survive: site", "slo: {ttft_p95: 2 s}"):
        chosen = best(situation(tmp_path, wish), SearchOptions(work_s=5.0))
        (model,) = (m for m in forecast_of(chosen, "CHF").models if m.model == "m")
        assert chosen.after == {}
        assert model.survival is None or model.survival.replay is msgspec.UNSET


def test_a_node_takes_what_gives_most_for_its_devices(tmp_path):
    chosen = planned(tmp_path, "node")
    options = {option.key: option for option in chosen.problem.options}
    assert {replica_key(r) for r in chosen.placement.replicas} <= options.keys()
    place = chosen.problem.pools[0].key
    here = [
        replica
        for replica in chosen.placement.replicas
        if replica.model == "m" and (replica.cluster, replica.partition) == place
    ]
    for room in (0, 1, 3):
        gone = _on_one_node(here, options, place, room)
        assert len(gone) == min(room, len(here))
