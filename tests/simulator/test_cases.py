"""Forecasts of single configurations: the sheet, the choice of calibrations, the bands, the fit."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.catalog import accelerators, engines, models
from fabrictool.domain.blueprint import Model
from fabrictool.domain.inventory import Partition
from fabrictool.simulator import fitting, sheet
from fabrictool.simulator.calibration import Calibration, Hull, Spread, choose, choose_own, dumps, loads, shipped
from fabrictool.simulator.cases import Case, PhaseWorkers, estimate, predict
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.stand import stand
from fabrictool.simulator.stepmodel import Factors

ROW = {
    "device": "h100-sxm",
    "model": "meta-llama/Llama-3.1-70B-Instruct",
    "engine": "vllm",
    "precision": "fp8",
    "kv_precision": "bf16",
    "tp": "4",
    "pp": "1",
    "ep": "1",
    "input_len": "1024",
    "output_len": "256",
    "concurrency": "16",
    "mode": "agg",
}


def case(**changes):
    return sheet.case_of(ROW | {k: str(v) for k, v in changes.items()})


@pytest.mark.parametrize("mode", ["batch", "closed", "agg"])
def test_every_mode_gives_consistent_latencies(mode):
    found = predict(case(mode=mode), shipped())
    one = found.estimate
    assert 0 < one.tpot < one.ttft < one.e2e
    assert one.e2e == pytest.approx(one.ttft + one.tpot * 255, rel=0.15)
    for metric, (low, high) in found.bands.items():
        assert low <= getattr(one, metric) <= high


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("device", ["l4", "a100-40g", "h100-sxm", "b200"])
def test_a_plan_and_a_case_give_a_replica_the_same_cache(engine, device):
    source = "hf://meta-llama/Llama-3.1-8B-Instruct"
    wanted = Model.model_validate({"source": source, "engine": engine, "variant": {"precision": "bf16"}})
    partition = Partition.model_validate({"device": device, "devices_per_node": 8, "nodes": 1})
    alike = case(device=device, engine=engine, model=wanted.architecture_id, precision="bf16", tp=2)
    planned = stand(wanted, alike.model, partition, 2)
    assert planned.room == alike.room(alike.cut)
    assert 0 < planned.room.kv_tokens < 2 * accelerators()[device].memory / planned.kv_octets


def test_a_pair_of_phases_pays_for_the_hand_over():
    pools = {"prefill_tp": 4, "prefill_workers": 1, "decode_tp": 4, "decode_workers": 2}
    found = estimate(case(mode="disagg", **pools), Factors())
    assert found.ttft > 0
    # Decoding alone is not disturbed by prompts.
    assert found.tpot < estimate(case(concurrency=64), Factors()).tpot


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"device": "abacus"}, "FT2132"),
        ({"model": "nobody/nothing"}, "FT2133"),
        ({"engine": "warp"}, "FT2134"),
        ({"mode": "sometimes"}, "FT2131"),
        ({"precision": "fp3"}, "FT2131"),
        ({"input_len": "NaN"}, "FT2131"),
        ({"concurrency": "0"}, "FT2131"),
        ({"output_len": ""}, "FT2131"),
        ({"tp": "2.5"}, "FT2131"),
        ({"tp": "1", "precision": "bf16"}, "FT2111"),
        ({"pp": "500"}, "FT2112"),
        ({"tp": "1", "precision": "fp8", "input_len": "100000"}, "FT2111"),
        ({"input_len": "130900"}, "FT2110"),
        ({"concurrency": "100000000"}, "FT2110"),
        ({"tp": "7"}, "FT2112"),
        ({"tp": "10000000"}, "FT2112"),
        ({"dp": "10000000"}, "FT2112"),
        ({"ep": "2"}, "FT2112"),
        ({"model": "deepseek-ai/DeepSeek-R1", "tp": "8", "ep": "3"}, "FT2112"),
        ({"model": "deepseek-ai/DeepSeek-R1", "tp": "2", "ep": "8", "dp": "2"}, "FT2112"),
        ({"rate": "2"}, "FT2131"),
        ({"mode": "open"}, "FT2131"),
        ({"mode": "open", "concurrency": ""}, "FT2131"),
        ({"mode": "open", "concurrency": "", "rate": "0"}, "FT2131"),
        ({"mode": "open", "concurrency": "", "rate": "1e9"}, "FT2110"),
        ({"mode": "batch", "concurrency": "", "rate": "2"}, "FT2131"),
        ({"max_num_seqs": "0"}, "FT2131"),
        ({"max_num_seqs": "5000"}, "FT2110"),
        ({"prefill_tp": "2"}, "FT2131"),
        ({"draft_tokens": "3"}, "FT2131"),
        ({"draft_acceptance": "0.7"}, "FT2131"),
        ({"draft_tokens": "3", "draft_acceptance": "1.2"}, "FT2131"),
        ({"draft_tokens": "65", "draft_acceptance": "0.7"}, "FT2110"),
        ({"slo_ttft_ms": "-1"}, "FT2131"),
        ({"slo_tpot_ms": "soon"}, "FT2131"),
        ({"price": "nan"}, "FT2131"),
        ({"mode": "disagg", "prefill_tp": "3", "decode_tp": "4"}, "FT2112"),
        ({"mode": "disagg", "prefill_tp": "4", "decode_tp": "4", "decode_workers": "100000000"}, "FT2110"),
    ],
)
def test_a_bad_row_is_answered_with_a_code(change, code):
    good, bad = sheet.answer([ROW, ROW | change], shipped())
    assert good["error"] == ""
    assert float(good["tpot_ms"]) > 0
    assert bad["error"].startswith(code)
    assert bad["tpot_ms"] == ""


def test_a_sheet_keeps_its_columns_and_adds_ours():
    text = ",".join(["note", *ROW]) + "\n" + ",".join(["hello", *ROW.values()]) + "\n"
    columns, rows = sheet.read(text)
    out = sheet.write(columns, list(sheet.answer(rows, shipped())))
    head, line = out.splitlines()
    assert head.split(",")[: len(ROW) + 1] == ["note", *ROW]
    assert head.split(",")[len(ROW) + 1 :] == list(sheet.ANSWERS)
    assert line.startswith("hello,")


def test_a_sheet_without_the_needed_columns_is_refused():
    with pytest.raises(InvalidInputError, match="concurrency"):
        sheet.read("device,model,engine,input_len,output_len\n")


@pytest.mark.parametrize("name", ["max_batch", "rates", "tp_degree", "silicon_ttft_ms", "TTFT_MS"])
def test_a_column_that_means_nothing_to_us_is_refused_and_not_left_out(name):
    with pytest.raises(InvalidInputError) as caught:
        sheet.read(",".join([*ROW, name]) + "\n")
    assert caught.value.problems[0].code == "FT2135"
    assert name in caught.value.problems[0].message


def test_columns_of_ones_own_are_kept():
    kept = ["id", "note", "version", "note_rack", "ttft_ms", "error", "e2e_p99"]
    assert sheet.read(",".join([*ROW, *kept]) + "\n")[0] == [*ROW, *kept]


def test_a_comma_at_each_lines_end_is_no_column():
    lines = [",".join(ROW), ",".join(ROW.values()), ",".join([*ROW.values(), "", ""]), ",".join([*ROW.values(), "x"])]
    columns, rows = sheet.read("".join(f"{line},\n" for line in lines))
    assert columns == list(ROW)
    assert [row.get("error", "") for row in rows] == ["", "", "FT2131: more fields than columns"]
    with pytest.raises(InvalidInputError, match="one without a name"):
        sheet.read(",".join(["", *ROW]) + "\n")


def test_one_column_by_two_names_is_refused():
    with pytest.raises(InvalidInputError, match="input_len 2 times: input_len, isl") as caught:
        sheet.read(",".join([*ROW, "isl"]) + "\n")
    assert caught.value.problems[0].code == "FT2130"


def test_the_error_of_an_earlier_forecast_is_forgotten():
    _, (row,) = sheet.read(f"{','.join(ROW)},error\n{','.join(ROW.values())},FT2111: too large\n")
    (answered,) = sheet.answer([row], shipped())
    assert answered["error"] == ""
    assert answered["tpot_ms"]


OPEN = ROW | {"concurrency": "", "mode": "open"}


def test_an_open_loop_goes_by_its_rate():
    slow, fast, flood = sheet.answer([OPEN | {"rate": rate} for rate in ("0.5", "4", "500")], shipped())
    assert [row["error"] for row in (slow, fast, flood)] == ["", "", ""]
    assert float(slow["requests_per_s"]) == pytest.approx(0.5, rel=0.1)
    assert float(fast["requests_per_s"]) == pytest.approx(4, rel=0.1)
    assert float(flood["requests_per_s"]) < 100, "more come than it can serve"
    assert float(slow["tpot_ms"]) < float(fast["tpot_ms"])
    assert float(fast["ttft_p99"]) < 0.1 * float(flood["ttft_p99"])
    without = sheet.case_of(OPEN | {"rate": "4", "mode": ""})
    assert (without.mode, without.concurrency) == ("open", 0), "a rate says it all"


def test_a_batch_limit_makes_requests_wait_and_tokens_quick():
    free, bound = sheet.answer([ROW | {"concurrency": "64", "max_num_seqs": most} for most in ("", "4")], shipped())
    assert float(bound["tpot_ms"]) < float(free["tpot_ms"])
    assert float(bound["ttft_p50"]) > 2 * float(free["ttft_p50"])
    assert float(bound["tokens_per_s"]) < float(free["tokens_per_s"])


def test_in_an_open_loop_each_rank_of_attention_has_the_engines_limit():
    narrow = OPEN | {"model": "Qwen/Qwen3-235B-A22B", "tp": "1", "ep": "8", "rate": "200", "output_len": "512"}
    both = [narrow | {"max_num_seqs": most} for most in ("", str(8 * engines()["vllm"].default_max_num_seqs))]
    free, bound = sheet.answer(both, shipped())
    assert free["error"] == ""
    assert {**free, "max_num_seqs": ""} == {**bound, "max_num_seqs": ""}


def test_what_requests_have_to_keep_and_what_they_cost():
    (row,) = sheet.answer([ROW], shipped())
    assert (row["attainment"], row["cost_per_million_tokens"]) == ("", ""), "nobody asked"
    assert float(row["ttft_p50"]) <= float(row["ttft_p90"]) <= float(row["ttft_p99"])
    median = row["ttft_p50"]
    half, all_kept, none = sheet.answer(
        [ROW | {"slo_ttft_ms": median}, ROW | {"slo_ttft_ms": "1e9"}, ROW | {"slo_ttft_ms": "1e9", "slo_e2e_ms": "1"}],
        shipped(),
    )
    assert float(half["attainment"]) == pytest.approx(0.5, abs=0.1)
    assert (all_kept["attainment"], none["attainment"]) == ("1", "0")
    once, twice = sheet.answer([ROW | {"price": "2"}, ROW | {"price": "4"}], shipped())
    tokens = float(once["tokens_per_s"])
    assert float(once["cost_per_million_tokens"]) == pytest.approx(1e6 * 4 * 2 / 3600 / tokens, rel=0.02)
    assert float(twice["cost_per_million_tokens"]) == pytest.approx(
        2 * float(once["cost_per_million_tokens"]), rel=1e-4
    )
    watts = float(row["joules_per_token"]) * float(row["tokens_per_s"]) / 4
    assert 70 < watts <= 0.75 * 700, "between idling and what saturated ones were seen to draw"


@pytest.mark.parametrize("name", ["ep", "prefill_ep", "decode_ep"])
def test_no_expert_parallelism_is_written_as_0_or_1(name):
    pools = {"mode": "disagg", "prefill_tp": 4, "decode_tp": 4}
    assert case(**pools, **{name: 0}) == case(**pools, **{name: 1})


def test_other_spellings_are_understood():
    row = {"system": "b200", "model": "deepseek-ai/DeepSeek-R1", "backend": "trtllm", "isl": "1024", "osl": "1024"}
    found = sheet.case_of(row | {"batch_size": "8", "precision": "nvfp4", "tp_size": "8", "moe_ep_size": "8"})
    assert found.engine == "tensorrt-llm"
    assert found.precision == "fp4"
    assert found.cut == Parallelism(tp=8, ep=8)


@pytest.mark.parametrize(
    ("widths", "cut"),
    [
        ({"tp": 16, "ep": 8}, Parallelism(tp=16, ep=8)),
        ({"tp": 64, "ep": 8}, Parallelism(tp=64, ep=8)),
        ({"tp": 8, "ep": 64, "dp": 8}, Parallelism(tp=8, ep=64, dp=8)),
        ({"tp": 8, "ep": 4, "dp": 2}, Parallelism(tp=8, ep=4, dp=2)),
        ({"tp": 4, "ep": 3}, Parallelism(tp=4, ep=3)),
        # Only what is left out is filled in: as many groups as the experts' devices need.
        ({"tp": 1, "ep": 8}, Parallelism(tp=1, ep=8, dp=8)),
        ({"tp": 4, "ep": 16}, Parallelism(tp=4, ep=16, dp=4)),
        ({"tp": 4, "ep": 16, "dp": 1}, Parallelism(tp=4, ep=16, dp=1)),
    ],
)
def test_widths_are_taken_as_they_are_written(widths, cut):
    assert case(**widths).cut == cut
    pools = case(mode="disagg", **{f"{phase}_{k}": v for phase in ("prefill", "decode") for k, v in widths.items()})
    assert pools.prefill == pools.decode == PhaseWorkers(cut)


def test_an_answer_of_one_token_has_no_time_per_token():
    one, two = sheet.answer([ROW | {"output_len": "1"}, ROW | {"output_len": "8"}], shipped())
    assert one["error"] == ""
    assert [one[name] for name in ("tpot_ms", "tpot_lo", "tpot_hi")] == ["", "", ""]
    assert float(one["ttft_lo"]) < float(one["ttft_ms"]) < float(one["ttft_hi"])
    assert float(two["tpot_ms"]) > 0


SHEET = ",".join([*ROW, "note"]) + "\n" + "".join(",".join([*ROW.values(), f"{n}\n"]) for n in ("a", '"b', "c", "d"))


def test_a_stray_quote_costs_its_own_row_only():
    _, rows = sheet.read(SHEET)
    assert [row["note"] for row in rows] == ["a", "b", "c", "d"]
    assert [row.get("error", "")[:6] for row in rows] == ["", "FT2131", "", ""]
    assert {row["model"] for row in rows} == {ROW["model"]}
    # A second one does not hide the rows between them, which would give a cell too many.
    _, rows = sheet.read(SHEET + ",".join(ROW.values()) + ',x",y\n')
    assert [row.get("error", "")[:6] for row in rows] == ["", "FT2131", "", "", "FT2131"]


def test_cells_may_hold_quotes_and_line_breaks():
    text = ",".join([*ROW, "note"]) + "\n" + "".join(
        ",".join([*ROW.values(), f"{note}\n"]) for note in ('"8" rack', '"two\nlines, ""quoted"""', "last")
    )  # fmt: skip
    columns, rows = sheet.read(text)
    assert [row["note"] for row in rows] == ["8 rack", 'two\nlines, "quoted"', "last"]
    assert not any("error" in row for row in rows)
    assert sheet.read(sheet.write(columns, rows))[1][1]["note"] == rows[1]["note"]


@pytest.mark.parametrize("end", ["\r", "\r\n", "\n\n"])
def test_every_kind_of_line_end_is_one(end):
    _, rows = sheet.read(end.join([",".join(ROW), ",".join(ROW.values()), ",".join(ROW.values()), ""]))
    assert rows == [ROW, ROW]


@pytest.mark.parametrize("text", ["x" * 200_000, '"' * 9, '"a\n"b'])
def test_a_header_that_is_none(text):
    with pytest.raises(InvalidInputError) as caught:
        sheet.read(text)
    assert caught.value.problems[0].code == "FT2130"


def test_more_load_never_makes_a_token_cheaper_to_wait_for():
    found = [estimate(case(concurrency=c), Factors()) for c in (1, 4, 16, 64)]
    assert [f.tpot for f in found] == sorted(f.tpot for f in found)
    assert [f.ttft for f in found] == sorted(f.ttft for f in found)


def test_the_nearest_calibration_is_chosen():
    def one(device, engine, scope="online"):
        return Calibration(device, engine, scope, Factors())

    known = [
        one("*", "*"),
        one("*", "vllm"),
        one("nvidia/*", "vllm"),
        one("h100-sxm", "vllm"),
        one("h100-sxm", "sglang"),
    ]
    assert choose(known, "h100-sxm", "nvidia", "vllm", "online").device == "h100-sxm"
    assert choose(known, "l4", "nvidia", "vllm", "online").device == "nvidia/*"
    assert choose(known, "mi300x", "amd", "vllm", "online").device == "*"
    assert choose([], "l4", "nvidia", "vllm", "online").points == 0


def test_bands_widen_outside_the_measured_range():
    hull = Hull(concurrency=(1, 64), input_len=(1, 2000), output_len=(1, 2000), devices=(1, 8), models=("a",))
    one = Calibration("d", "e", "online", Factors(), {"tpot": Spread(-0.1, 0.2)}, {"tpot": Spread(-0.3, 0.3)}, hull, 50)
    inside, outside = (one.spread("tpot", "a", inside=x) for x in (True, False))
    assert outside.high > inside.high
    assert outside.low < inside.low
    assert one.spread("tpot", "b", inside=True).high == 0.3
    assert not hull.outside(concurrency=64, input_len=100, output_len=100, devices=4)
    assert hull.outside(concurrency=128, input_len=100, output_len=100, devices=4) == {"concurrency": hull.concurrency}


def test_a_calibration_survives_its_file():
    for one in shipped():
        again = loads(dumps(one))
        assert again.factors.vector() == pytest.approx(one.factors.vector(), abs=1e-3)
        assert again.hull == one.hull
    with pytest.raises(InvalidInputError) as caught:
        loads("device = 3")
    assert caught.value.problems[0].code == "FT2120"


def test_every_shipped_calibration_obeys_the_physics_and_names_its_source():
    assert len(shipped()) > 20
    for one in shipped():
        assert one.source
        assert one.points >= 20
        for name, most in fitting.LIMIT.items():
            assert 0 < getattr(one.factors, name) <= most * 1.001, (one.device, one.engine, name)


def test_a_fit_finds_the_factors_that_made_the_data():
    truth = Factors(compute=0.45, bandwidth=0.6, step=4e-3, kernel=2.5e-6)
    made = []
    for concurrency in (1, 8, 64):
        for length in (256, 2048):
            one = case(mode="batch", concurrency=concurrency, input_len=length, output_len=64)
            found = estimate(one, truth)
            made.append(fitting.Observation(one, found.ttft, found.tpot, found.e2e))
    fitted = fitting.fit(made, Factors(), rounds=10)
    before = [abs(e) for o in made for e in o.log_errors(Factors()).values()]
    after = [abs(e) for o in made for e in o.log_errors(fitted).values()]
    assert max(after) < 0.1
    assert sum(after) < 0.3 * sum(before)


def test_the_load_of_an_open_loop_is_what_was_in_flight():
    timed = case(concurrency="", mode="open", rate="2")
    rows = [
        fitting.Observation(timed, e2e=3.0),
        fitting.Observation(timed, ttft=1.0, tpot=0.1),
        fitting.Observation(timed, ttft=0.5),
        fitting.Observation(case(concurrency="4"), e2e=3.0),
    ]
    assert [row.in_flight for row in rows] == pytest.approx([6.0, 2 * (1.0 + 0.1 * 255), 1.0, 4.0])
    assert fitting.hull(rows).concurrency == pytest.approx((1.0, 53.0))


def test_few_points_give_wide_bands():
    few = fitting.spreads([{"tpot": 0.1 * i} for i in (-1, 0, 1)])["tpot"]
    many = fitting.spreads([{"tpot": 0.1 * math.sin(i)} for i in range(400)])["tpot"]
    assert few.high > 0.1
    assert few.low < -0.1
    assert many.high < 0.1


@pytest.mark.parametrize("count", [4, 8, 18, 19, 40, 100])
def test_bands_hold_one_more_error_nine_times_in_ten_however_few_there_were(count):
    rng = np.random.default_rng(count)
    held = 0
    for _ in range(400):
        middle, *errors = rng.normal(rng.normal(0, 0.1), 0.1, count + 1)
        band = fitting.spreads([{"tpot": error} for error in errors])["tpot"]
        held += band.low <= middle <= band.high
    assert held / 400 > 0.87


def test_another_model_or_cut_than_the_measured_has_the_wider_band_of_both():
    narrow = Spread(-0.05, 0.4)
    own = Calibration(
        "h100-sxm", "vllm", "online", Factors(), dict.fromkeys(("ttft", "tpot", "e2e"), narrow),
        hull=Hull(devices=(1.0, 2.0), models=("a",)), points=60,
    )  # fmt: skip
    common = choose(shipped(), "h100-sxm", "nvidia", "vllm", "online").spread("tpot", "", inside=True)
    for model, devices, seen in (("a", 1, True), ("a", 2, True), ("b", 1, False), ("a", 4, False)):
        chosen = choose_own([own], "h100-sxm", "nvidia", "vllm", model, devices)
        band = chosen.spread("tpot", model, inside=True)
        assert chosen.factors is own.factors
        assert (band == narrow) is seen
        assert band == chosen.spread("tpot", "", inside=True)
        if not seen:
            assert band == Spread(min(1.5 * narrow.low, common.low), max(1.5 * narrow.high, common.high))
    batches = replace(own, scope="static")
    assert choose_own([batches], "h100-sxm", "nvidia", "vllm", "a", 1).scope == "online"
    assert choose_own([batches], "cpu", "", "vllm", "a", 1).points == 0, "no server was measured there"


def test_a_pair_needs_both_pools():
    base = case()
    with pytest.raises(InvalidInputError, match="disagg"):
        estimate(replace(base, mode="disagg", prefill=PhaseWorkers(Parallelism(tp=4))), Factors())


def test_layer_split_adds_memory_and_no_speed():
    model, device = models()["meta-llama/Meta-Llama-3-8B"], accelerators()["h100-sxm"]
    one, four = (
        estimate(Case(device, model, "llama.cpp", "fp16", "fp16", Parallelism(tp=tp), 128, 64, 1, "batch"), Factors())
        for tp in (1, 4)
    )
    assert one.e2e == pytest.approx(four.e2e)


def test_drafts_save_time_where_steps_wait_for_memory_and_cost_it_where_they_are_full():
    def tpot(concurrency, **drafts):
        return predict(case(concurrency=concurrency, **drafts), shipped()).estimate.tpot

    alone = tpot(1)
    right = [tpot(1, draft_tokens=3, draft_acceptance=a) for a in (0.01, 0.5, 0.8, 1.0)]
    assert right == sorted(right, reverse=True)
    assert right[0] > alone > right[1], "guesses that are never right cost their making and verifying"
    assert alone / 4 < right[3] < alone / 2, "four tokens a step, for more than one step's time"
    gains = [tpot(n) / tpot(n, draft_tokens=3, draft_acceptance=0.5) for n in (1, 64, 1024)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.3
    assert gains[2] < 1


def test_the_head_that_drafts_takes_memory():
    plain, drafting = case(), case(draft_tokens=1, draft_acceptance=0.8)
    more = drafting.room(drafting.cut).weights / plain.room(plain.cut).weights
    assert 1 + 0.8 / 80 < more < 1 + 1.2 / 80


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_num_batched_tokens": 1 << 18, "cut": Parallelism(tp=1, ep=8, dp=8)},
            "for each of dp 8; at most 1048576",
        ),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 65, "cut": Parallelism()}, "less than max_num_seqs, 65"),
    ],
)
def test_limits_of_a_step_that_no_engine_takes_are_said(changes, message):
    served = replace(case(), model=models()["Qwen/Qwen3-30B-A3B"], **changes)
    with pytest.raises(InvalidInputError, match=message) as caught:
        predict(served, shipped())
    assert caught.value.problems[0].code == "FT2110"
