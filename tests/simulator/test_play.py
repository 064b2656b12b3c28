"""Plays of whole placements: whose requests are played where, what befalls replicas, and what the watcher hears."""

from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.simulator.calibration import choose, shipped
from fabrictool.simulator.deployment import ReplicaEvent
from fabrictool.simulator.play import PlayOptions, Recording, play
from fabrictool.workload.generate import Recipe, generate, popular
from fabrictool.workload.lengths import Lengths
from fabrictool.workload.trace import Trace
from tests.simulator.fabrics import ACCELERATED, TWO_MODELS, WITHOUT_DEMAND, loaded, replica


class Listener:
    """A watcher that keeps what it hears; it may press Ctrl-C in the play of one model, as its `stop_at`th ends."""

    def __init__(self, stop_in="", stop_at=1):
        self.notes, self.played, self.progress = [], [], {}
        self._stop_in, self._stop_at = stop_in, stop_at

    def note(self, text):
        self.notes.append(text)

    @contextmanager
    def playing(self, model, *, last):
        self.played.append((model, last))
        self.progress[model] = []

        def tell(over, total):
            self.progress[model].append((over, total))
            if model == self._stop_in and over >= self._stop_at:
                self._stop_in = ""
                raise KeyboardInterrupt

        yield tell


class Fabric:
    """A loaded blueprint with replicas, and plays of it."""

    def __init__(self, files, replicas):
        self.blueprint, self.inventory = files.blueprint, files.inventory
        self.replicas = [replica(name, self.inventory, *place) for name, place in replicas.items()]
        self.listener = Listener()

    @property
    def notes(self):
        return "\n".join(self.listener.notes)

    def plays(self, trace=None, *, invented=False, listener=None, **options):
        self.listener = listener or Listener()
        recording = None if trace is None else Recording(trace, "t.jsonl", invented=invented)
        options = {"requests": 200} | options if trace is None else options
        return play(self.blueprint, self.inventory, self.replicas, recording, PlayOptions(**options), self.listener)

    def requests(self, *given, **options):
        return {one.simulation.name: one.report.requests for one in self.plays(*given, **options)}

    def refusal(self, *given, **options):
        with pytest.raises(InvalidInputError) as caught:
            self.plays(*given, **options)
        (problem,) = caught.value.problems
        return problem


@pytest.fixture
def tiny(tmp_path):
    """One model on two CPU nodes of two providers."""
    return Fabric(loaded(tmp_path), {"tiny/0": ["one"], "tiny/1": ["two"]})


@pytest.fixture
def two_models(tmp_path):
    """A function that makes a fabric with H100s and two models: replica → (cluster, tp), and a changed blueprint."""

    def fabric(replicas, blueprint=TWO_MODELS):
        return Fabric(loaded(tmp_path, blueprint, ACCELERATED), replicas)

    return fabric


@pytest.fixture
def both(two_models):
    return two_models({"llama/0": ("one", 1), "big/0": ("two", 4)})


def requests_for(*names, gap=1.0, prompt=50, output=5):
    """A trace with a request every `gap` seconds, for these models in turn."""
    models = tuple(dict.fromkeys(names))
    return Trace(
        arrival=gap * np.arange(len(names)),
        prompt=np.full(len(names), prompt),
        output=np.full(len(names), output),
        models=models,
        model=np.array([models.index(name) for name in names]) if len(models) > 1 else None,
    )


def constant(rate, prompt, output, count=200):
    lengths = Lengths("fixed", prompt), Lengths("fixed", output)
    return generate(Recipe(rate, *lengths, process="constant"), count, 0)


# --- what a play gives


def test_the_declared_demand_is_played(tiny):
    (shown,) = tiny.plays()
    figures = shown.report
    assert (shown.simulation.name, figures.requests, figures.finished, figures.complete) == ("tiny", 200, 200, True)
    assert (shown.unserved, shown.events, tiny.notes) == (0, (), "")
    assert len(figures.utilisation) == 2
    assert figures.rate == pytest.approx(0.5, rel=0.2)
    # Two nodes at 0.02 an hour each.
    assert figures.cost == pytest.approx(0.04 * figures.span_s / 3600)
    for metric, (low, high) in figures.bands.items():
        assert low < 1 < high, metric


def test_the_hosts_memory_gives_back_what_a_cache_drops(two_models):
    """A hundred prompts of 8,000 tokens in turn are too many for the cache and not for 200 GB beside it."""
    llama = two_models({"llama/0": ("one", 1)})
    names = np.tile(np.arange(100), 3)
    again = replace(
        requests_for(*["llama"] * 300, prompt=8000),
        chain_start=np.arange(301),
        chain=names,
        block_tokens=7680,
    )
    hits, first = [], []
    for octets in (0.0, 200e9):
        (shown,) = llama.plays(again, models=("llama",), host_cache=octets)
        hits.append(shown.report.prefix_hits)
        first.append(shown.report.latency["ttft"]["mean"])
    assert hits == [0.0, pytest.approx(7680 / 8000 * 2 / 3)]
    assert first[1] < 0.7 * first[0]
    llama.plays(models=("llama",), host_cache=1e9)
    assert "nothing says which prompts begin alike" in llama.notes


def test_the_same_seed_plays_the_same(tiny):
    first, again, other = (tiny.plays(seed=seed)[0].outcome for seed in (4, 4, 5))
    assert np.array_equal(first.finish, again.finish)
    assert not np.array_equal(first.finish, other.finish)


def test_the_watcher_hears_how_far_it_is(tiny):
    tiny.plays()
    assert tiny.listener.played == [("tiny", True)]
    told = tiny.listener.progress["tiny"]
    assert told == sorted(told)
    assert told[-1] == (200, 200)
    # At each point of the timeline, and at the end.
    assert len(told) > PlayOptions().samples


# --- whose requests


def test_a_trace_is_played_at_its_rate_or_another(tiny):
    trace = requests_for(*[""] * 40, prompt=30)
    (shown,) = tiny.plays(trace)
    assert shown.report.requests == 40
    assert shown.report.rate == pytest.approx(1.0)
    (faster,) = tiny.plays(trace, rate=4.0)
    assert faster.report.rate == pytest.approx(4.0)


def test_a_workload_is_made_up(tiny):
    (shown,) = tiny.plays(constant(2.0, 16, 4), invented=True)
    assert shown.report.rate == pytest.approx(2.0)
    assert shown.report.output_tokens_per_s == pytest.approx(8.0, rel=0.05)


def test_answers_of_one_token_have_no_time_per_token(tiny):
    (shown,) = tiny.plays(constant(2.0, 16, 1), invented=True)
    assert np.isnan(shown.report.latency["tpot"]["p50"])
    assert shown.report.to_json()["latency"]["tpot"]["p50"] is None


def test_a_trace_goes_to_the_models_that_it_names(both):
    assert both.requests(requests_for("llama", "other", "llama", "llama")) == {"llama": 3}
    assert "big: the trace has no requests for it" in both.notes
    assert "1 request for other is not played" in both.notes
    trace = requests_for("llama", "big", "llama")
    assert both.requests(trace) == {"llama": 2, "big": 1}
    assert both.listener.played == [("big", False), ("llama", True)]
    assert both.requests(trace, models=("big",)) == {"big": 1}


@pytest.mark.parametrize("names", [("", "", ""), ("gpt", "gpt", "x")])
def test_a_trace_that_could_be_for_several_models_needs_to_be_told(both, names):
    trace = requests_for(*names)
    problem = both.refusal(trace)
    assert (problem.code, "--model" in problem.hint) == ("FT2153", True)
    assert both.requests(trace, models=("big",)) == {"big": 3}
    assert both.refusal(trace, models=("big", "llama")).code == "FT2153"


def test_a_workload_without_names_is_for_each_model_and_one_with_other_names_for_none(both):
    assert both.requests(constant(2.0, 16, 4, 30), invented=True) == {"llama": 30, "big": 30}
    several = popular(tuple("abc"), 2.0, 30, 0, Recipe(2.0))
    assert both.refusal(several, invented=True).code == "FT2153"


def test_a_trace_without_names_is_the_only_models(tiny):
    assert tiny.requests(requests_for(*[""] * 9)) == {"tiny": 9}
    assert tiny.refusal(requests_for(*["gpt"] * 9)).code == "FT2153"


def test_a_trace_is_played_to_its_end_unless_cut(tiny):
    """Also one that is longer than what is made up where nothing says how many."""
    trace = requests_for(*[""] * 10_050, gap=0.01, prompt=5, output=1)
    assert (tiny.requests(trace), tiny.notes) == ({"tiny": 10_050}, "")
    assert tiny.requests(trace, requests=50) == {"tiny": 50}
    assert "10000 of 10050 requests are not played" in tiny.notes


def test_a_model_without_demand(tmp_path):
    fabric = Fabric(loaded(tmp_path, WITHOUT_DEMAND), {"tiny/0": ["one"]})
    assert fabric.refusal().code == "FT2144"
    assert "no demand is declared" in fabric.notes
    assert fabric.refusal(models=("tiny",)).code == "FT2142"
    assert fabric.requests(rate=1.0, requests=20) == {"tiny": 20}


def test_a_fabric_where_nothing_runs(tiny):
    tiny.replicas = []
    assert tiny.refusal().code == "FT2144"
    assert "tiny: no replica in this placement" in tiny.notes


# --- on which replicas


@pytest.mark.parametrize(("tp", "code"), [(1, "FT2111"), (9, "FT2112"), (1000, "FT2112")])
def test_what_cannot_run_so_is_refused(two_models, tp, code):
    assert two_models({"big/0": ("one", tp)}).refusal(requests=20).code == code
    assert two_models({"big/0": ("one", 4)}).requests(requests=20) == {"big": 20}


TENANTS = "trust: {groups: {ours: {allow: [alpha]}, all: {allow: [alpha, beta]}}}\ntenants:\n"
OURS, ANYBODY = "  {0}: {{group: ours, key: secret://env/{0}}}\n", "  {0}: {{group: all, key: secret://env/{0}}}\n"


@pytest.mark.parametrize(
    ("blueprint", "replicas", "note"),
    [
        (TWO_MODELS, ("llama/0", "llama/1"), ""),
        (TWO_MODELS.replace("  big:", "    trust: [beta]\n  big:"), ("llama/1",), "llama/0: trust does not let it"),
        (
            TWO_MODELS + TENANTS + OURS.format("a") + OURS.format("b").replace("env/A", "env/C"),
            ("llama/0",),
            "llama/1: trust does not let it",
        ),
        # Whose requests a demand counts is not declared, so several groups exclude nobody.
        (TWO_MODELS + TENANTS + OURS.format("a") + ANYBODY.format("b"), ("llama/0", "llama/1"), "groups ignored"),
    ],
)
def test_replicas_that_trust_excludes_get_nothing(two_models, blueprint, replicas, note):
    fabric = two_models({"llama/0": ("one", 1), "llama/1": ("two", 1)}, blueprint)
    (shown,) = fabric.plays(models=("llama",), requests=50)
    assert shown.simulation.replicas == replicas
    assert len(shown.report.utilisation) == len(replicas)
    assert (note in fabric.notes, len(fabric.listener.notes)) == (True, bool(note))


def test_a_model_that_trust_lets_nobody_serve_is_refused(two_models):
    fabric = two_models({"llama/1": ("two", 1)}, TWO_MODELS + TENANTS + OURS.format("a"))
    assert fabric.refusal(models=("llama",)).code == "FT2141"


@pytest.fixture
def shut_out(two_models):
    """Half of the requests may go to beta only, and nothing stands there."""
    text = TWO_MODELS.replace("demand: {rate", "demand: {groups: {at-a: 50%, at-b: 50%}, rate", 1)
    trust = "trust: {groups: {at-a: {allow: [alpha]}, at-b: {allow: [beta]}}}\n"
    return two_models({"llama/0": ("one", 1)}, text + trust)


@pytest.mark.parametrize(("rate", "asked"), [(None, 4.0), (20.0, 20.0)])
def test_who_may_not_be_served_is_left_out_of_a_trace_as_of_the_demand(shut_out, rate, asked):
    (of_trace,) = shut_out.plays(requests_for(*["llama"] * 1001, gap=0.25), models=("llama",), rate=rate)
    count = of_trace.report.requests
    assert count == of_trace.report.finished == pytest.approx(500, abs=60)
    assert of_trace.report.rate == pytest.approx(asked / 2, rel=0.15)
    whose, how_many = shut_out.listener.notes
    assert whose == "llama: no replica may serve group at-b; its requests, 50% of the demand, are left out"
    played = f"{asked * count / 1001:.3g} of {asked:.3g} requests/s"
    assert how_many == f"llama: {count} of 1001 requests are played, {played}"
    (of_demand,) = shut_out.plays(models=("llama",), requests=1000, rate=asked)
    assert of_demand.report.rate == pytest.approx(asked / 2, rel=0.15)
    assert shut_out.listener.notes == [whose, f"llama: {asked / 2:.3g} of {asked:.3g} requests/s are played"]


def test_a_trace_of_which_nobody_may_be_served_is_not_played(shut_out):
    """A single request is of one group or the other, by the seed."""
    single = requests_for("llama")
    (shown,) = shut_out.plays(single, models=("llama",), seed=2)
    assert shown.report.requests == 1
    assert shut_out.listener.notes[-1] == "llama: 1 of 1 requests are played"
    assert shut_out.refusal(single, models=("llama",), seed=1).code == "FT2144"
    assert shut_out.listener.notes[-1] == "llama: 0 of 1 requests are played"


def test_halves_of_pairs_that_no_group_may_use_together_serve_nobody(shut_out):
    """Prompts at alpha, answers at beta: each group may use one of them. They are not played as if nobody asked."""
    places = {"prefill": "one", "decode": "two"}
    shut_out.replicas = [
        msgspec.structs.replace(replica(f"llama/{at}", shut_out.inventory, where), phase=phase)
        for at, (phase, where) in enumerate(places.items())
    ]
    assert shut_out.refusal(models=("llama",)).code == "FT2141"


def test_a_request_takes_time_for_each_token_of_its_prompt(both):
    """Of two calibrations that differ in nothing else, prompts of 4,000 tokens tell the difference, answers do not."""
    usual = choose(shipped(), "h100-sxm", "nvidia", "vllm", "online")
    fast, slow = (
        both.plays(
            constant(1.0, 4000, 9, 20),
            invented=True,
            models=("llama",),
            calibrations=[replace(usual, factors=replace(usual.factors, prompt_token=seconds))],
        )[0].report.latency
        for seconds in (1e-9, 1e-4)
    )
    assert slow["ttft"]["mean"] - fast["ttft"]["mean"] == pytest.approx(0.4, rel=0.01)
    assert slow["e2e"]["mean"] - fast["e2e"]["mean"] == pytest.approx(0.4, rel=0.01)
    assert slow["tpot"]["mean"] == pytest.approx(fast["tpot"]["mean"])


# --- replicas that come and go


def fates(shown):
    figures = shown.report
    return [figures.finished, figures.refused, figures.lost, shown.unserved]


def under_events(fabric, *events, rate=3.0, prompt=64, output=48):
    """The play of 200 requests during which these (kind, replica, seconds) happen."""
    events = tuple(ReplicaEvent(*event) for event in events)
    (shown,) = fabric.plays(constant(rate, prompt, output), invented=True, events=events)
    return shown


def test_losing_one_of_two_replicas_costs_and_loses_nothing_silently(tiny):
    whole, half = under_events(tiny), under_events(tiny, ("down", "tiny/0", 20.0))
    assert (whole.events, fates(whole)) == ((), [200, 0, 0, 0])
    assert half.events == (ReplicaEvent("down", "tiny/0", 20.0),)
    assert half.happened(half.events[0])
    assert half.report.latency["ttft"]["p95"] > 1.5 * whole.report.latency["ttft"]["p95"]
    # Answers that had begun are lost, and nothing else.
    lost = half.report.lost
    assert lost > 0
    assert fates(half) == [200 - lost, 0, lost, 0]
    for figures in (whole.report, half.report):
        assert figures.output_tokens_per_s * figures.span_s == pytest.approx(48 * figures.finished)
        assert figures.input_tokens_per_s * figures.span_s == pytest.approx(64 * figures.finished)
    assert half.report.attainment <= half.report.finished / 200


def test_an_end_of_walltime_that_drains_first_loses_nothing(tiny):
    shown = under_events(tiny, ("drain", "tiny/0", 20.0), ("down", "tiny/0", 120.0))
    assert fates(shown) == [200, 0, 0, 0]
    assert [shown.happened(event) for event in shown.events] == [True, shown.report.span_s > 120]
    assert shown.report.utilisation[0] < shown.report.utilisation[1] / 2


def test_a_cold_start_keeps_requests_waiting(tiny):
    cold = [("up", f"tiny/{i}", 10.0) for i in (0, 1)]
    warm, late = (under_events(tiny, *events, rate=1.0, prompt=16, output=4) for events in ([], cold))
    assert fates(late) == [200, 0, 0, 0]
    # Those of the first ten seconds wait for 10, 9, … 1 seconds; the others do not.
    waited = 200 * (late.report.latency["ttft"]["mean"] - warm.report.latency["ttft"]["mean"])
    assert waited == pytest.approx(55, rel=0.05)


def test_requests_that_nobody_is_left_for_are_counted(tiny):
    shown = under_events(tiny, *[(kind, f"tiny/{i}", at) for i in (0, 1) for kind, at in (("drain", 20), ("down", 50))])
    assert 0 < shown.report.finished < 70
    assert sum(fates(shown)) == 200
    late = under_events(tiny, ("down", "tiny/0", 9 * 3600.0))
    assert (late.happened(late.events[0]), fates(late)) == (False, [200, 0, 0, 0])


# --- mistakes

DOWN = ReplicaEvent("down", "tiny/0", 1.0)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"rate": float("nan")}, "FT2202"),
        ({"rate": -1.0}, "FT2202"),
        ({"rate": float("inf")}, "FT2202"),
        ({"models": ("huge",)}, "FT2143"),
        ({"events": (replace(DOWN, replica="tiny/7"),)}, "FT2149"),
        ({"events": (replace(DOWN, replica="huge/0"),)}, "FT2149"),
        ({"events": (replace(DOWN, at=0.0),)}, "FT2149"),
        ({"events": (DOWN, replace(DOWN, at=2.0))}, "FT2149"),
        ({"events": (DOWN, replace(DOWN, kind="up", at=2.0))}, "FT2149"),
        ({"events": (DOWN, replace(DOWN, kind="drain", at=2.0))}, "FT2149"),
    ],
)
def test_a_mistake_has_a_code(tiny, options, code):
    assert tiny.refusal(**options, requests=20).code == code
    assert tiny.listener.played == []


# --- interrupts


def test_an_interrupted_play_gives_what_it_has_and_is_the_last(both):
    (shown,) = both.plays(listener=Listener("big", stop_at=30), requests=2000)
    figures = shown.report
    assert (shown.simulation.name, figures.complete, shown.unserved) == ("big", False, None)
    assert 30 <= figures.finished < 2000
    assert both.listener.played == [("big", False)]
    assert both.notes == "interrupted; not played: llama"


def test_interrupting_the_last_model_leaves_nothing_out(both):
    first, last = both.plays(listener=Listener("llama", stop_at=30), requests=2000)
    assert (first.report.complete, last.report.complete) == (True, False)
    assert (both.listener.played, both.notes) == ([("big", False), ("llama", True)], "")


def test_a_play_that_is_over_is_not_interrupted(both):
    """Ctrl-C as the last request ends takes nothing from the result."""
    first, last = both.plays(listener=Listener("big", stop_at=200))
    assert (first.report.complete, first.unserved, last.report.finished) == (True, 0, 200)
