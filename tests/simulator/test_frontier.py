"""``recommend``'s search: the pick keeps its targets and nothing that was tried is better."""

from dataclasses import replace

import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.catalog import accelerators, model
from fabrictool.domain.blueprint import Slo
from fabrictool.simulator.calibration import shipped
from fabrictool.simulator.cases import Case, predict
from fabrictool.simulator.frontier import Question, cuts, explore, settings
from fabrictool.simulator.operators import Parallelism

DENSE, MIXTURE = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-235B-A22B"


def question(**changes):
    plain = Question(
        model=model(DENSE),
        devices=[accelerators()["h100-sxm"]],
        engines=["vllm"],
        precisions=["fp8"],
        input_len=600,
        output_len=60,
        most_devices=2,
        slo=Slo.model_validate({"ttft_p95": "1s", "tpot_p95": "25ms"}),
    )
    return replace(plain, **changes)


@pytest.fixture(scope="module")
def answer():
    return explore(question(), shipped())


def test_the_pick_keeps_its_targets_and_nothing_else_that_does_is_better(answer):
    pick = answer.pick
    assert pick.worst(answer.question.slo, 0.9) <= 1
    assert pick.latency("tpot", "p95", 0.9) <= 0.025
    assert pick.latency("ttft", "p95", 0.9) <= 1
    better = [p for p in answer.points if p.worth > pick.worth]
    assert better
    assert all(p.worst(answer.question.slo, 0.9) > 1 for p in better)


def test_the_batch_limit_is_found_between_the_powers_of_two(answer):
    pick = answer.pick
    case = Case(
        pick.setting.device,
        answer.question.model,
        "vllm",
        "fp8",
        "bf16",
        pick.setting.cut,
        600,
        60,
        0,
        mode="closed",
        settled=True,
    )

    def at(limit):
        return replace(pick, prediction=predict(replace(case, concurrency=limit, max_num_seqs=limit), shipped()))

    assert at(pick.max_num_seqs).worst(answer.question.slo, 0.9) == pick.worst(answer.question.slo, 0.9)
    assert at(pick.max_num_seqs + pick.max_num_seqs // 8 + 2).worst(answer.question.slo, 0.9) > 1


def test_more_confidence_leaves_more_room(answer):
    slo = answer.question.slo
    for point in answer.points[::7]:
        ratios = [point.worst(slo, confidence) for confidence in (0.5, 0.7, 0.9, 0.95)]
        assert ratios == sorted(ratios)
        assert point.latency("tpot", "p95", 0.5) == point.prediction.report.latency["tpot"]["p95"]
    sure, even = answer.best(0.95), answer.best(0.5)
    assert even.worth > sure.worth


def test_the_front_holds_what_nothing_beats(answer):
    front = {(p.setting, p.max_num_seqs) for p in answer.front}
    for point in answer.points:
        speed, worth = point.prediction.estimate.tpot, point.worth
        beaten = any(
            p.prediction.estimate.tpot <= speed
            and p.worth >= worth
            and (p.prediction.estimate.tpot, p.worth) != (speed, worth)
            for p in answer.points
        )
        assert ((point.setting, point.max_num_seqs) in front) is not beaten
    tpots = [p.prediction.estimate.tpot for p in answer.front]
    assert tpots == sorted(tpots)


def test_a_target_that_nothing_keeps_has_no_pick_but_a_nearest():
    answer = explore(question(slo=Slo.model_validate({"tpot_p50": "100us"})), shipped())
    assert answer.pick is None
    assert answer.nearest.worst(answer.question.slo, 0.9) > 1


def test_worth_is_tokens_for_money():
    answer = explore(question(slo=None, most_devices=1, prices=[2.0]), shipped())
    for point in answer.points:
        dear = point.prediction.report.cost_per_million_tokens
        assert point.worth == pytest.approx(1e6 / dear, rel=0.1)


def test_prices_decide_between_devices():
    devices = [accelerators()["h100-sxm"], accelerators()["a100-80g"]]
    slow = question(devices=devices, precisions=["bf16"], slo=None, most_devices=1)
    assert explore(slow, shipped()).pick.setting.device.id == "h100-sxm"
    assert explore(replace(slow, prices=[10.0, 1.0]), shipped()).pick.setting.device.id == "a100-80g"


def test_what_cannot_run_is_said_and_not_tried():
    answer = explore(question(model=model(MIXTURE), most_devices=4, engines=["vllm"]), shipped())
    assert {s.cut.devices for s in answer.refused} == {1, 2}
    assert all("GB for weights alone" in why for why in answer.refused.values())
    assert {p.setting.cut.devices for p in answer.points} == {4}
    with pytest.raises(InvalidInputError, match="FT2110"):
        explore(question(input_len=10**6), shipped())


def test_the_best_that_a_blueprint_can_say():
    answer = explore(question(model=model("Qwen/Qwen3-30B-A3B"), slo=None), shipped())
    plain = [p for p in answer.points if p.setting.cut.ep == p.setting.cut.dp == 1]
    assert 0 < len(plain) < len(answer.points)
    assert answer.best(0.9, declarable=True) is max(plain, key=lambda p: p.worth)
    assert answer.best(0.9) is max(answer.points, key=lambda p: p.worth)


def test_ways_to_cut():
    assert set(cuts(model(DENSE), "vllm", 4, 8)) == {
        *(Parallelism(tp=1), Parallelism(tp=2), Parallelism(tp=4)),
        *(Parallelism(pp=2), Parallelism(pp=4), Parallelism(tp=2, pp=2)),
    }
    mixture = set(cuts(model(MIXTURE), "vllm", 4, 8))
    assert {Parallelism(tp=4, ep=4), Parallelism(tp=2, ep=4, dp=2), Parallelism(ep=4, dp=4)} <= mixture
    assert all(cut.ep == cut.tp * cut.dp for cut in mixture if cut.ep > 1)
    assert all(cut.tp <= 8 for cut in cuts(model(DENSE), "vllm", 32, 8))
    assert set(cuts(model(DENSE), "llama.cpp", 2, 8)) == {Parallelism(), Parallelism(pp=2)}


def test_usual_precisions_are_those_of_the_device():
    kinds = {
        device: {s.precision for s in settings(question(devices=[accelerators()[device]], precisions=[]))}
        for device in ("a100-80g", "h100-sxm")
    }
    assert kinds == {"a100-80g": {"bf16"}, "h100-sxm": {"bf16", "fp8"}}


def test_quantised_weights_are_served_as_released():
    oss = question(model=model("openai/gpt-oss-120b"), precisions=[])
    assert {s.precision for s in settings(oss)} == {"mxfp4"}


def test_a_rack_that_one_link_joins_is_one_node():
    r1 = question(model=model("deepseek-ai/DeepSeek-R1"), most_devices=16)
    widths = {
        device: max(s.cut.tp for s in settings(replace(r1, devices=[accelerators()[device]])))
        for device in ("h200", "gb200")
    }
    assert widths == {"h200": 8, "gb200": 16}


def test_a_pick_keeps_its_targets_at_the_rate_that_is_said_and_not_at_much_more(answer):
    asked, pick = answer.question, answer.pick
    case = Case(
        pick.setting.device,
        asked.model,
        "vllm",
        "fp8",
        "bf16",
        pick.setting.cut,
        asked.input_len,
        asked.output_len,
        0,
        mode="open",
        max_num_seqs=pick.max_num_seqs,
    )

    def worst(rate):
        return replace(pick, prediction=predict(replace(case, rate=rate), shipped())).worst(asked.slo, 0.9)

    rate, full = answer.rates[0.9], pick.prediction.estimate.tokens_per_s / asked.output_len
    assert 0 < rate <= full
    assert worst(rate) <= 1 < worst(1.1 * full)
    assert rate == full or worst(1.05 * rate) > 1
    assert set(answer.rates) == {0.9, 0.5}


def test_a_target_that_cannot_be_judged_is_not_kept():
    answer = explore(question(output_len=1, slo=Slo.model_validate({"tpot_p50": "1h"})), shipped())
    assert answer.pick is None
    assert not answer.rates


def test_answers_of_one_token_have_a_front_of_first_tokens():
    answer = explore(question(output_len=1, slo=Slo.model_validate({"ttft_p95": "1s"})), shipped())
    ttfts = [p.prediction.estimate.ttft for p in answer.front]
    assert len(ttfts) > 1
    assert ttfts == sorted(ttfts)


def test_no_point_is_there_twice_and_one_at_the_largest_limit_says_so():
    answer = explore(question(slo=Slo.model_validate({"tpot_p95": "1s"}), input_len=20, output_len=20), shipped())
    assert len({(p.setting, p.max_num_seqs) for p in answer.points}) == len(answer.points)
    assert all(p.limited is (p.max_num_seqs == 1024) for p in answer.points)
    assert any(p.limited for p in answer.points)


def test_one_request_keeps_all_devices_of_a_layer_split_replica_busy_in_turn():
    answer = explore(question(engines=["llama.cpp"], precisions=["fp16"], most_devices=2, slo=None), shipped())
    assert {p.setting.cut.pp for p in answer.points if p.max_num_seqs == 1} == {1, 2}
