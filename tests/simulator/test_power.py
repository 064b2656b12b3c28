"""What devices draw: by the work of the steps, never more than they are designed for."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from fabrictool.catalog import accelerators, model
from fabrictool.domain.plan import StagePlacement
from fabrictool.simulator import sheet
from fabrictool.simulator.calibration import shipped
from fabrictool.simulator.cases import predict
from fabrictool.simulator.fleet import Accounts
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.play import PlayOptions, play
from fabrictool.simulator.power import (
    ANSWER,
    ANSWER_EXPERT,
    BUSY_SHARE,
    IDLE_SHARE,
    Exertion,
    computing_watts,
)
from fabrictool.simulator.stepmodel import Factors, Machine, StepModel
from tests.simulator.fabrics import ACCELERATED, TWO_MODELS, loaded, replica

DENSE, MIXTURE = "meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen3-30B-A3B"
H100 = accelerators()["h100-sxm"]


class Quiet:
    """A watcher that wants to know nothing."""

    def note(self, text):
        pass

    def playing(self, model, *, last):
        return nullcontext(lambda over, total: None)


def step_of(name=DENSE, **more):
    cut = Parallelism(**{key: more.pop(key) for key in ("tp", "pp", "ep", "dp") if key in more})
    return StepModel.of(model(name), Machine.of(H100), cut, Factors(), **more)


def did(*, busy=1.0, steps=1.0, prompts=0.0, answers=0.0, pairs=0.0, read=0.0):
    """The accounts of a single replica."""
    columns = (busy, steps, prompts + answers, pairs, read, 0.0)
    return Accounts(*(np.array([value]) for value in columns), itl=np.array([[0.0, answers]]))


def test_prompts_take_two_operations_a_weight_and_answers_read_the_weights_once_a_step():
    step = step_of()
    embedding = step.work.head.weights
    weights = model(DENSE).parameters - 2 * embedding
    prompt = Exertion.of(step, did(prompts=1000.0), 0)
    assert prompt.compute * H100.flops["bf16"] == pytest.approx(2 * weights * 1000, rel=1e-3)
    attended = Exertion.of(step, did(prompts=1000.0, pairs=5e5), 0)
    of_pairs = 4 * 64 * 128 * 80 * 5e5
    assert (attended.compute - prompt.compute) * H100.flops["bf16"] == pytest.approx(of_pairs, rel=1e-6)
    answers = Exertion.of(step, did(steps=30.0, answers=30.0), 0)
    assert answers.octets == pytest.approx(30 * 2 * (weights + embedding), rel=1e-3)
    narrow = Exertion.of(step_of(weights="fp8"), did(steps=30.0, answers=30.0), 0)
    assert narrow.octets == pytest.approx(30 * (weights + 2 * embedding), rel=1e-3)
    longer = Exertion.of(step, did(steps=30.0, answers=30.0, read=1e6), 0)
    cache = 2 * 2 * 8 * 128 * 80
    assert longer.octets - answers.octets == pytest.approx(1e6 * cache, rel=1e-6)


@pytest.mark.parametrize("cut", [{"tp": 4}, {"pp": 4}, {"dp": 4}, {"tp": 2, "pp": 2}])
def test_devices_share_the_work_of_a_replica(cut):
    accounts = did(steps=10.0, prompts=4000.0, answers=640.0, pairs=1e6, read=1e5)
    whole, part = (Exertion.of(step_of(**shape), accounts, 0) for shape in ({}, cut))
    assert 4 * part.compute == pytest.approx(whole.compute, rel=1e-6)
    # Groups and stages hold whole matrices: each group reads its own, each stage its own for each micro-batch.
    again = cut.get("pp", 1) * cut.get("dp", 1)
    no_cache = replace(accounts, read=np.zeros(1))
    weights, weights_of_part = (Exertion.of(step_of(**shape), no_cache, 0).octets for shape in ({}, cut))
    assert 4 * weights_of_part == pytest.approx(again * weights, rel=1e-6)
    assert 4 * (part.octets - weights_of_part) == pytest.approx(whole.octets - weights, rel=1e-6)


def test_a_lone_request_has_one_stage_of_a_pipeline_at_work():
    alone, four = (Exertion.of(step_of(pp=4), did(steps=10.0, answers=10.0 * count), 0) for count in (1, 4))
    assert 4 * alone.octets == pytest.approx(four.octets, rel=1e-6)


def test_operations_of_answers_count_more_than_those_of_prompts_and_most_for_experts():
    for name, least, most in ((DENSE, ANSWER, 1.1 * ANSWER), (MIXTURE, 1.5 * ANSWER, ANSWER_EXPERT)):
        step = step_of(name)
        prompt, answer = (Exertion.of(step, did(**{kind: 1000.0}), 0).compute for kind in ("prompts", "answers"))
        assert least * prompt < answer < most * prompt


def test_experts_are_read_as_far_as_they_are_chosen():
    few, many = (Exertion.of(step_of(MIXTURE), did(answers=count), 0).octets for count in (1.0, 4096.0))
    assert few < 0.15 * many
    assert many == pytest.approx(2 * (model(MIXTURE).parameters - step_of(MIXTURE).work.head.weights), rel=0.02)


def test_a_window_bounds_what_is_read_of_the_cache():
    step = step_of("openai/gpt-oss-120b", weights="mxfp4")
    near, far = (
        Exertion.of(step, did(answers=10.0, read=10.0 * context), 0).octets
        - Exertion.of(step, did(answers=10.0), 0).octets
        for context in (128, 1280)
    )
    assert far == pytest.approx(near * (10 + 1) / 2, rel=1e-6), "half of the layers look back 128 tokens only"


def test_who_computes_more_draws_more_and_nobody_more_than_the_design_power():
    step = step_of("meta-llama/Llama-3.1-8B")
    alone = computing_watts(step, did(busy=7e-3, answers=1.0), 0, 1, 700.0)
    batch = computing_watts(step, did(busy=14e-3, answers=128.0), 0, 1, 700.0)
    prompts = computing_watts(step, did(prompts=25_000.0), 0, 1, 700.0)
    base = computing_watts(step, did(busy=1e3, answers=1.0), 0, 1, 700.0)
    assert 700 * IDLE_SHARE < base < alone < batch < 700
    assert alone < prompts < 700
    assert computing_watts(step, did(busy=1e-6, prompts=1e6), 0, 1, 700.0) == 700.0


def test_what_nobody_knows_is_a_mean_share():
    assert computing_watts(None, did(answers=1.0), 0, 4, 700.0) == BUSY_SHARE * 700.0


def test_of_layers_spread_over_devices_a_single_one_works():
    accounts = did(busy=0.1, answers=1.0)
    works = Exertion.of(step_of(), accounts, 0).watts(700.0)
    assert computing_watts(step_of(), accounts, 0, 4, 700.0) == pytest.approx((works + 3 * IDLE_SHARE * 700.0) / 4)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_batch_draws_more_than_a_single_request(engine):
    rows = [
        {
            "device": "h100-sxm",
            "model": DENSE,
            "engine": engine,
            "precision": "fp8",
            "tp": "4",
            "input_len": "512",
            "output_len": "128",
            "concurrency": str(concurrency),
            "mode": "closed",
        }
        for concurrency in (1, 16, 256)
    ]
    drawn = []
    for row in rows:
        figures = predict(sheet.case_of(row), shipped()).report
        assert 0.95 < figures.utilisation[0] <= 1.0
        drawn.append(figures.energy_j / figures.span_s / 4)
    assert IDLE_SHARE * 700 < drawn[0] < drawn[1] < drawn[2] <= 700.0
    assert drawn[2] - drawn[0] > 70.0


def test_replicas_of_a_plan_draw_by_their_work_and_unlike_pipelines_by_a_share(tmp_path):
    there = loaded(tmp_path, TWO_MODELS, ACCELERATED)
    alike = structs.replace(replica("big/0", there.inventory, tp=4), pp=2)
    stages = [StagePlacement(cluster="one", partition="gpu", device="h100-sxm", tp=tp) for tp in (4, 2)]
    unlike = structs.replace(alike, tp=4, pp=1, stages=tuple(stages))
    drawn = {}
    for name, placed in {"alike": alike, "unlike": unlike}.items():
        (played,) = play(there.blueprint, there.inventory, [placed], None, PlayOptions(("big",), requests=200), Quiet())
        (busy,), (count,) = played.outcome.accounts.busy, played.simulation.hardware.devices
        figures = played.report
        idle = IDLE_SHARE * 1000.0 * (figures.span_s - busy)
        drawn[name] = (figures.energy_j / count - idle) / busy
    assert drawn["unlike"] == pytest.approx(BUSY_SHARE * 1000.0, rel=0.01), "nodes of 8 kW, so a device counts as 1 kW"
    assert IDLE_SHARE * 1000.0 < drawn["alike"] < 0.9 * drawn["unlike"], "a request a second leaves the units empty"
