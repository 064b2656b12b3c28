"""Why so many, why so wide, what limits one: the sums, against the tables that they are from."""

from dataclasses import replace

import msgspec
import pytest

from fabrictool.domain.plan import Band, ModelForecast
from fabrictool.planner.explaining.explain import reason_of, reasons
from fabrictool.planner.explaining.sizing import count_words, shape_sentences, shortfall_sentence
from fabrictool.planner.problem import Level, ModelNeed
from fabrictool.simulator.physics import PeakUse
from tests.planner.fabrics import situation, solved
from tests.planner.test_exact import figures, option, pool, problem, solve


class Generator:
    """Says what an engine could do, as the columns of a blueprint do."""

    def __init__(self, widths=(1, 2, 4), most=256, use=None):
        self._widths, self._most, self._use = list(widths), most, use

    def peak_use(self, its):
        return self._use

    def at_once(self, variant):
        return self._most

    def widths(self, where, variant):
        return self._widths


def levels(*rates, attained=99.0, in_system=1.0):
    return [Level(rate, in_system * rate, rate <= attained, 0.0 if rate <= attained else 0.5) for rate in rates]


def told(rate, *, least=0, most=9, objective=("slo", "cost"), **cut):
    where = pool("a", nodes=9)
    instance = problem([ModelNeed("m", rate, least, most)], [option("m", where, **cut)], [where], objective=objective)
    return count_words(instance, solve(instance), instance.needs[0])


# -- so many ----------------------------------------------------------------------------------------------------------


def test_the_sum_behind_the_number_is_told_with_one_fewer():
    assert told(75.7, capacity=11.9) == (
        "8 × 11.9 = 95.2 req/s, of which 80% may be planned: 76.2, and 75.7 are demanded; with 7 it would be 66.6"
    )
    assert told(3.0, capacity=11.9) == "11.9 req/s, of which 80% may be planned: 9.52, and 3 are demanded"
    assert told(0.0, least=1) == "1 req/s, of which 80% may be planned: 0.8, and nothing is demanded"
    assert told(10.0, most=2).endswith("1.6, and 10 are demanded: 8.4 more than they can serve")


def test_where_fewer_could_serve_it_the_rest_of_the_reason_is_told():
    slow = levels(0.4, 0.8, attained=0.5)
    assert told(0.8, levels=slow).endswith("0.8 are demanded; 1 could serve it, and keep the SLO up to 0.4 req/s")
    curve = [Level(0.1, 0.1, attains=True), Level(0.8, 8.0, attains=True)]
    words = told(0.8, levels=curve, objective=("latency",))
    assert words.endswith("could serve it, with more requests in the system")


def test_what_a_loss_must_leave_is_the_reason_for_more():
    where = pool("a", nodes=4)
    need = ModelNeed("m", 1.2, 0, 9, survive="node")
    instance = problem([need], [option("m", where)], [where], objective=("cost",))
    words = count_words(instance, solve(instance), need)
    assert words.startswith("3 × 1 = 3 req/s")
    assert words.endswith("1.2 are demanded; 2 could serve it, but not after the loss of any node")


def test_replicas_of_several_kinds_are_added_and_the_sums_agree():
    a, b = pool("a", nodes=2), pool("b", nodes=2)
    options = [option("m", a), option("m", b, capacity=2.0)]
    instance = problem([ModelNeed("m", 4.5, 0, 9)], options, [a, b])
    words = reason_of(instance, solve(instance), instance.needs[0])
    assert "2 × 1 + 2 × 2 = 6 req/s, of which 80% may be planned: 4.8, and 4.5 are demanded" in words
    assert "with 3 it would be 4 at most" in words


# -- so wide ----------------------------------------------------------------------------------------------------------


def shape(*options, where, columns=None, objective=("slo", "cost"), rate=1.0):
    instance = problem([ModelNeed("m", rate, 0, 9)], options, [where], objective=objective)
    instance = replace(instance, columns={"m": Generator() if columns is None else columns})
    (sentence,) = shape_sentences(instance, solve(instance), instance.needs[0], "CHF")
    return sentence


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({}, "with tp 1 it does not fit; with tp 4 it does not fit"),
        ({1: {"levels": levels(0.8, attained=0.0)}}, "with tp 1 it misses the SLO under the least load"),
        ({1: {"capacity": 0.75}}, "with tp 1 it serves 0.6 req/s for a device, not 0.8"),
        ({4: {"capacity": 3.0}}, "with tp 4 it serves 0.6 req/s for a device, not 0.8"),
    ],
)
def test_why_so_wide(others, words):
    where = pool("a", nodes=2, per_node=8)
    others = [option("m", where, tp=tp, **cut) for tp, cut in others.items()]
    sentence = shape(option("m", where, tp=2, capacity=2.0), *others, where=where, rate=1.6)
    assert sentence.startswith("m on a/p: tp 2: ")
    assert words in sentence


def test_that_no_other_width_is_possible_is_told():
    where = pool("a", nodes=2, per_node=8)
    assert "tp 2: no other is possible; " in shape(option("m", where, tp=2), where=where, columns=Generator([2]))


def test_a_request_that_takes_longer_or_costs_more_is_the_reason_where_the_rest_is_equal():
    where = pool("a", nodes=2, per_node=8)
    narrow = option("m", where, tp=1, capacity=1.0, latency=9.0)
    wide = option("m", where, tp=2, capacity=2.0, latency=3.0)
    sentence = shape(wide, narrow, where=where, objective=("latency",), rate=1.6)
    assert "with tp 1 it takes 9 s for a request at full load, not 3" in sentence
    whole = replace(where, whole_nodes=True)
    halves = [option("m", whole, tp=tp, capacity=float(tp)) for tp in (1, 2)]
    assert "with tp 1 it serves 0.1 req/s for a device, not 0.2" in shape(*halves, where=whole, rate=1.6)


# -- what limits one --------------------------------------------------------------------------------------------------


def limited(columns=None, cut_levels=None, **changes):
    where = pool("a", nodes=2, per_node=8)
    its = option("m", where, levels=cut_levels)
    its = replace(its, figures=replace(figures(1.0), **changes))
    return shape(its, where=where, columns=columns or Generator([1]), rate=0.3).partition("possible; ")[2]


def test_what_limits_a_replica():
    flat = {"max_batch": 57, "batches": (1.0, 50.0, 57.0), "steps_s": (0.02, 0.0295, 0.03), "step_full_s": 0.03,
            "step_alone_s": 0.02}  # fmt: skip
    steep = {**flat, "steps_s": (0.001, 0.0263, 0.03)}
    assert limited(**flat) == (
        "memory limits it: it holds 57 requests at once, and a step takes 30 ms with all of them, 20 ms with one"
    )
    assert limited(Generator([1], most=57), **flat).startswith("`max_num_seqs` limits it: its engine takes 57 requests")
    assert limited(**steep, marginal_s=0.7) == "computing limits it: reading prompts takes 70% of its time"
    assert limited(**steep, marginal_s=0.2).startswith("its steps limit it: 30 ms with 57 requests, whose caches")
    use = PeakUse(flops=989e12, computing=0.514, bandwidth=3.35e12, octets=61.2e9, reading=0.784)
    assert limited(Generator([1], use=use), **steep, marginal_s=0.7) == (
        "computing limits it: reading prompts takes 70% of its time, by the tables at 51% of a device's 989 TFLOP/s"
    )
    assert limited(Generator([1], use=use), **steep, marginal_s=0.2) == (
        "its steps limit it: 30 ms with 57 requests, whose caches have to be read (61.2 GB a device with the weights,"
        " at 78% of its 3.35 TB/s), 20 ms with one; prompts take 20% of its time"
    )
    assert limited(cut_levels=levels(0.4, 0.8, attained=0.5)) == (
        "the SLO limits it: kept up to 0.4 of the 0.8 req/s that may be planned"
    )
    assert limited(cut_levels=levels(0.8, attained=0.0)) == "it misses the SLO under any load"


def test_the_figures_agree_with_the_tables_of_a_real_model(tmp_path):
    built, _ = situation(tmp_path, "trust: [alpha]").build()
    solution = solved(built)
    need = next(need for need in built.needs if need.model == "m")
    sentences = list(shape_sentences(built, solution, need, "CHF"))
    assert sentences
    chosen = built.options[next(i for i in built.of("m") if solution.counts.get(i))]
    assert f"not {chosen.levels[-1].rate / chosen.devices:.3g}" in sentences[0]
    assert reasons(built, solution, "CHF")[0] == reason_of(built, solution, built.needs[0])
    # Llama 3.1 8B: 8.03e9 weights, and 32 layers with 8 heads of 128 keys and values.
    use, its = built.columns["m"].peak_use(chosen), chosen.figures
    looked_up = 128_256 * 4096  # the embedding: one row is read of it
    cached = its.max_batch * (500 + 100 / 2) * 32 * 2 * 8 * 128
    assert use.octets == pytest.approx(2 * (8.03e9 - looked_up + cached) / chosen.tp, rel=0.01)
    assert use.reading == pytest.approx(use.octets / 3.35e12 / its.step_full_s)
    operations = 2 * 500 * (8.03e9 - 2 * looked_up) / chosen.tp
    assert use.computing == pytest.approx(operations / 989e12 / its.prefill_s, rel=0.02)
    assert 0.2 < use.computing < 1
    assert 0.2 < use.reading < 1


# -- what is not as it was asked for ----------------------------------------------------------------------------------


def test_what_is_not_served_or_misses_is_said_with_the_reason():
    band = Band(value=1.0, low=1.0, high=1.0)
    good = ModelForecast(model="m", ttft_p95_s=band, tpot_p95_s=band, e2e_p95_s=band, utilisation=0.5, served=1.0,
                         slo="meets", replicas=1)  # fmt: skip
    assert shortfall_sentence(good) == ""
    bad = msgspec.structs.replace(
        good, served=0.5, slo="misses", misses=("TTFT within 1s: 72%",), why="no device is free"
    )
    assert shortfall_sentence(bad) == (
        "m: only 50% of the demand can be served; it misses its SLO (TTFT within 1s: 72%), because no device is free"
    )
    instance = problem([ModelNeed("m", 1.0, 0, 1)], [option("m", pool("a"))], [pool("a")])
    assert reasons(instance, solve(instance), "", [bad])[1] == shortfall_sentence(bad)
