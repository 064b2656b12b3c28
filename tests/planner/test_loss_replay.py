"""What the plan says of a model after its worst loss, against a replay that the test makes of it by itself."""

import itertools
import random
from collections import Counter

import msgspec
import pytest

from fabrictool.blueprint import load
from fabrictool.cli.plan_text import complaints, loss_lines
from fabrictool.domain.plan import Placement
from fabrictool.planner.chosen import SearchOptions, best, forecast_of
from fabrictool.planner.judged import Lesson, learned_sentences
from fabrictool.planner.loss_replay import _on_one_node
from fabrictool.planner.problem import replica_key
from fabrictool.planner.replay import replay
from fabrictool.planner.situation import Situation
from fabrictool.planner.weights import planned_rates
from tests.planner.fabrics import situation, write_fabric

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


@pytest.mark.parametrize("kind", ["node", "site"])
def test_pairs_are_played_without_the_halves_that_are_gone(tmp_path, monkeypatch, kind):
    """Who is left reads and answers, and there is nobody who could only do one of both; no site leaves less."""
    seen = []

    def recorded(blueprint, inventory, placement, rates, seed, only=None, flows=None):
        seen.append((placement, only))
        return replay(blueprint, inventory, placement, rates, seed, only, flows)

    monkeypatch.setattr("fabrictool.planner.loss_replay.replay", recorded)
    wish = WISH.format(kind=kind) + "\nphases: split"
    there = situation(tmp_path, wish, old="objective: [cost]", new="objective: [slo, cost]")
    chosen = best(there, SearchOptions(work_s=5.0))
    (model,) = (m for m in forecast_of(chosen, "CHF").models if m.model == "m")
    mine = [replica for replica in chosen.placement.replicas if replica.model == "m"]
    assert {replica.phase for replica in mine} == {"prefill", "decode"}
    rest = next(its.replicas for its, only in reversed(seen) if only == ["m"])
    gone = Counter(r.phase for r in mine) - Counter(r.phase for r in rest)
    assert gone, "something is lost"
    lost = [replica for replica in mine if replica not in rest]
    if kind == "site":
        assert len({replica.site for replica in lost}) == 1
        assert {replica.site for replica in lost}.isdisjoint({replica.site for replica in rest})
    else:
        assert len({replica.cluster for replica in lost}) == 1
        assert sum(replica.tp for replica in lost) <= 8, "of one node"
    for site in {replica.site for replica in rest}:  # between sites there is no link
        assert {replica.phase for replica in rest if replica.site == site} == {"prefill", "decode"}
    after = chosen.after["m"]
    for phase in ("prefill", "decode"):
        taken = sum(after.rates[replica_key(replica)] for replica in rest if replica.phase == phase)
        assert taken == pytest.approx(200.0), "each half takes the whole demand"
    assert model.survival.replay.slo == "meets"
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


def test_what_is_on_one_node_is_the_worst_that_fits_there():
    """Against all sets of replicas; a large one may be worse than a denser one beside which it has no room."""
    assert _on_one_node({"small": 1, "large": 8}, {"small": 1.1, "large": 8.0}, 8) == {"large"}
    rng = random.Random(5)
    for _ in range(200):
        sizes = {f"r{i}": rng.choice((1, 2, 4, 8)) for i in range(rng.randint(0, 7))}
        gives = {name: rng.choice((0.0, 1.0, 2.5, 7.0)) for name in sizes}
        room = rng.choice((1, 2, 4, 8))
        sets = itertools.chain.from_iterable(itertools.combinations(sizes, n) for n in range(len(sizes) + 1))
        most = max(sum(gives[n] for n in some) for some in sets if sum(sizes[n] for n in some) <= room)
        gone = _on_one_node(sizes, gives, room)
        assert sum(sizes[name] for name in gone) <= room
        assert sum(gives[name] for name in gone) == pytest.approx(most)


@pytest.mark.parametrize("slo", ["ttft_p95: 70 ms", "ttft_p95: 120 ms", "e2e_p95: 1100 ms"])
def test_no_lesson_costs_the_reserve(tmp_path, slo):
    """Bursts that the tables do not know: what is left misses its SLO in the replay. That is worth less than its being
    there at all.
    """
    file = write_fabric(tmp_path, f"survive: site\nslo: {{{slo}}}")
    text = file.read_text().replace("objective: [cost]", "objective: [slo, cost]")
    text = text.replace("rate: 200 req/s", "rate: 5 req/s, cv: 3").replace("{min: 1, max: 40}", "{min: 3, max: 40}", 1)
    file.write_text(text)
    nodes = (
        (tmp_path / "inventory.yaml")
        .read_text()
        .replace("devices_per_node: 8, nodes: 2", "devices_per_node: 1, nodes: 16")
    )
    (tmp_path / "inventory.yaml").write_text(nodes)
    loaded = load(file, environment={})
    there = Situation(loaded.blueprint, loaded.inventory, ("dear", "cheap", "spot"), (), {}, 0.0)
    chosen = best(there, SearchOptions(work_s=5.0))
    (model,) = (m for m in forecast_of(chosen, "CHF").models if m.model == "m")
    assert (model.survival.served, model.survival.worst) == (1.0, "")
    assert model.survival.replay is not msgspec.UNSET


def test_what_is_learned_of_a_loss_says_so():
    lesson = Lesson(("m", "unified", (("h100-sxm", 1),), 1, ""), 5.0, 0.18, without="site a")
    (line,) = learned_sentences([lesson])
    assert "at 5 req/s in the replay without site a, by 18.0% of its requests" in line
