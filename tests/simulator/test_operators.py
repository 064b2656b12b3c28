"""Operators, memory and step times: counts that can be checked by hand, and bounds that no figure may break."""

import csv
import gzip
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from fabrictool.catalog import accelerators, models
from fabrictool.simulator.memory import adapter_octets, reported_memory, request_memory, room, weight_octets
from fabrictool.simulator.operators import Parallelism, kv_elements_per_token, work
from fabrictool.simulator.stepmodel import OCTETS, Factors, Machine, StepModel

DATA = Path(__file__).parents[1] / "data" / "measured"
DENSE = "meta-llama/Llama-3.1-70B-Instruct"
PERFECT = Factors(
    compute=1.0, narrow=1.0, bandwidth=1.0, expert_compute=1.0, expert_bandwidth=1.0, attention_compute=1.0,
    attention_bandwidth=1.0, tile=1e-9, link=1.0, kernel=1e-12, eager_kernel=1e-12, step=1e-12, sequence=1e-12,
    collective=1e-12, request=1e-12, prompt_token=1e-12,
)  # fmt: skip


def step(model=DENSE, device="h100-sxm", cut=None, factors=None, **precision):
    return StepModel.of(
        models()[model], Machine.of(accelerators()[device]), cut or Parallelism(tp=8), factors or Factors(), **precision
    )


@pytest.mark.parametrize("name", sorted(models()))
def test_the_operators_hold_all_weights_of_the_model(name):
    model = models()[name]
    one = work(model, Parallelism())
    held = sum(m.weights for m in one.matmuls) + one.head.weights
    embedding = 0 if model.tied_embeddings else model.vocab * model.hidden
    # Norms, biases, convolutions and gates are not matrix products; they are below two percent everywhere.
    assert held == pytest.approx(model.parameters - embedding, rel=0.02)


@pytest.mark.parametrize("name", [DENSE, "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-235B-A22B", "openai/gpt-oss-120b"])
def test_cutting_a_model_keeps_its_work(name):
    model = models()[name]
    tokens = np.array([64.0])
    whole = sum(float(m.flops(tokens)[0]) for m in work(model, Parallelism()).matmuls)
    cut = Parallelism(tp=8, ep=8 if model.experts else 1)
    parts = 8 * sum(float(m.flops(tokens)[0]) for m in work(model, cut).matmuls)
    # What is replicated over tensor ranks (routers, latent projections) is computed eight times.
    assert whole <= parts * (1 + 1e-9)
    assert parts == pytest.approx(whole, rel=0.25)


def test_experts_are_touched_as_expected():
    model = models()["mistralai/Mixtral-8x7B-v0.1"]
    up = next(m for m in work(model, Parallelism()).matmuls if m.name == "experts_up")
    one, many = up.touched(np.array([1.0, 1000.0]))
    assert one / up.weights == pytest.approx(2 / 8)
    assert many / up.weights == pytest.approx(1.0)
    assert up.flops(np.array([1.0]))[0] == pytest.approx(2 * 2 / 8 * up.weights)


def test_the_cache_of_one_token_is_what_the_papers_say():
    assert kv_elements_per_token(models()[DENSE], Parallelism()) * 2 == 2 * 80 * 8 * 128 * 2  # 320 KiB at 16 bits
    latent = models()["deepseek-ai/DeepSeek-V3"]
    assert kv_elements_per_token(latent, Parallelism()) == (512 + 64) * 61


@pytest.mark.parametrize(("tp", "published"), [(2, 264e3), (4, 959e3), (8, 2.3e6)])
def test_the_cache_capacities_of_paper_003(tp, published):
    """Table 2: Llama-3-70B, 16 bits, on H200. Its engine keeps communicators for all degrees: 22 GB a device."""
    model = models()["meta-llama/Meta-Llama-3-70B"]
    found = room(
        model,
        Parallelism(tp=tp),
        reported_memory(accelerators()["h200"]),
        weights="bf16",
        kv="bf16",
        usable=0.9,
        reserved=21.9e9,
    )
    assert found.kv_tokens == pytest.approx(published, rel=0.04)


def test_the_indexers_keys_are_part_of_the_cache():
    sparse = models()["zai-org/GLM-5"]
    assert kv_elements_per_token(sparse, Parallelism()) == (512 + 64 + 128 / 2) * 78


@pytest.mark.parametrize("tp", [1, 2])
def test_windows_and_states_take_what_they_hold(tp):
    """gpt-oss: every other layer has a window of 128. Qwen3-Next: 36 of 48 layers have 32 × 128 × 128 states,
    of 32 bits, and three inputs of a convolution over 2 × 16 × 128 + 32 × 128 channels.
    """
    cut = Parallelism(tp=tp)
    windowed = request_memory(models()["openai/gpt-oss-120b"], cut, "bf16")
    assert (windowed.fixed, windowed.window) == (0.0, 128)
    assert windowed.windowed == 1.0, "as many layers of either kind"
    assert [windowed.tokens(n) for n in (0, 100, 5000)] == [0, 100, 128]
    states = request_memory(models()["Qwen/Qwen3-Next-80B-A3B-Instruct"], cut, "bf16")
    held = 36 * (32 * 128 * 128 * 4 + 3 * 2 * (2 * 16 * 128 + 32 * 128))
    assert states.tokens(1) == states.tokens(9000) == pytest.approx(held / (12 * 2 * 2 * 256 * 2))
    assert request_memory(models()[DENSE], cut, "bf16").tokens(5000) == 0.0
    assert request_memory(models()["zai-org/GLM-5"], cut, "fp8").tokens(5000) == 0.0


def test_what_does_not_fit_says_so():
    model = models()[DENSE]
    assert not room(model, Parallelism(), 80e9, weights="bf16", kv="bf16").fits
    assert room(model, Parallelism(tp=2), 80e9, weights="fp8", kv="fp8").fits
    assert weight_octets(model, Parallelism(tp=4), "fp8") < weight_octets(model, Parallelism(tp=4), "bf16")


def test_adapters_take_memory_of_the_cache():
    """PEFT counts 41,943,040 parameters of an adapter of rank 16 of all linear layers of Llama-3.1-8B."""
    model, alone = models()["meta-llama/Llama-3.1-8B-Instruct"], Parallelism()
    assert adapter_octets(model, alone, slots=1, rank=16) == 2 * 41_943_040
    assert adapter_octets(model, alone, slots=3, rank=9) == 6 * 41_943_040, "ranks are rounded up"
    assert adapter_octets(model, alone, slots=0, rank=16) == 0
    cut = Parallelism(tp=4)
    assert 2 * 41_943_040 < adapter_octets(model, cut, slots=1, rank=16) < 8 * 41_943_040, "half of it is everywhere"
    spaces = [
        room(model, alone, 40e9, weights="bf16", kv="bf16", usable=0.9, beside=adapter_octets(model, alone, slots, 64))
        for slots in (0, 8, 64)
    ]
    assert spaces[0].kv_tokens > spaces[1].kv_tokens > 0
    assert not spaces[2].fits


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8", "int4", "fp4"])
@pytest.mark.parametrize("device", ["a100-80g", "h100-sxm", "b200", "rtx4090"])
def test_no_step_is_faster_than_the_physics(device, precision):
    chip = accelerators()[device]
    model = step(device=device, factors=PERFECT, weights=precision)
    tokens = np.array([1.0, 8.0, 64.0, 512.0, 4096.0])
    octets = sum(m.weights for m in model.work.matmuls if m.precision == "weights") * OCTETS[precision]
    flops = sum(m.flops(tokens) for m in model.work.matmuls)
    assert (model.linear(tokens) >= octets / chip.memory_bandwidth * (1 - 1e-12)).all()
    assert (model.linear(tokens) >= flops / max(chip.flops.values()) * (1 - 1e-12)).all()


def test_more_work_never_takes_less_time():
    tables = step().times(256, 8192)
    for table in (tables.decode, tables.mixed, tables.sample):
        assert (np.diff(table) >= -1e-15).all()
    small, large = step("meta-llama/Llama-3.1-8B-Instruct"), step(DENSE)
    tokens = np.array([1.0, 100.0])
    assert (small.linear(tokens) < large.linear(tokens)).all()
    assert small.read < large.read


def test_more_devices_make_a_large_step_shorter_and_links_matter():
    tokens = np.array([4096.0])
    spans = [float(step(cut=Parallelism(tp=tp)).linear(tokens)[0]) for tp in (1, 2, 4, 8)]
    assert spans == sorted(spans, reverse=True)
    far = Machine(**{**_fields(Machine.of(accelerators()["h100-sxm"])), "per_node": 4})
    slow = StepModel.of(models()[DENSE], far, Parallelism(tp=8), Factors())
    assert float(slow.linear(tokens)[0]) > spans[-1]


def _all_reduce(octets, devices, device="h100-sxm", **factors):
    cut = Parallelism(tp=devices)
    return float(step(device=device, cut=cut, factors=Factors(**factors))._all_reduce(np.array(float(octets)), devices))


def test_small_all_reduces_take_one_pass_and_large_ones_two():
    peak = accelerators()["h100-sxm"].link_bandwidth
    ideal = {"link": 1.0, "collective": 5e-6}
    assert _all_reduce(8192, 8, **ideal) == pytest.approx(5e-6 + 7 * 8192 / peak)
    large = 1 << 28
    assert _all_reduce(large, 8, **ideal) == pytest.approx(3 * 5e-6 + 2 * 7 / 8 * large / peak)
    # Of two devices the second pass brings nothing: one reads as much as both halves are.
    assert _all_reduce(large, 2, **ideal) == pytest.approx(5e-6 + large / peak)


def test_all_reduces_take_what_kernels_took_on_four_devices():
    """Timed kernels of two engines, 8 KiB to 256 MiB; the constants of the literature come from them."""
    with gzip.open(DATA / "all-reduce.csv.gz", "rt") as lines:
        rows = list(csv.DictReader(lines))
    off = defaultdict(list)
    for row in rows:
        expected = _all_reduce(int(row["octets"]), int(row["devices"]), row["device"])
        off[row["device"]].append(abs(1e6 * expected / float(row["median_us"]) - 1))
    assert sorted(off) == ["a100-80g", "b200", "h100-sxm", "h200"]
    assert all(np.mean(errors) < 0.3 for errors in off.values()), {k: np.mean(v) for k, v in off.items()}


def test_a_cache_that_is_read_for_each_query_head_takes_as_many_reads_as_share_it():
    once, anew = (step(factors=Factors(reuse=share)).read for share in (1.0, 1e-9))
    assert anew == pytest.approx(8 * once)
    latent = [step("deepseek-ai/DeepSeek-R1", factors=Factors(reuse=share)).read for share in (1.0, 0.5)]
    assert latent[0] == latent[1]


def test_tiles_that_are_filled_badly_cost_small_steps_and_no_large_ones():
    small, large = np.array([16.0]), np.array([8192.0])
    full, wasted = (step(factors=Factors(tile=tile)) for tile in (1e-9, 512.0))
    assert wasted.linear(small) > 1.05 * full.linear(small)
    assert wasted.linear(large) < 1.1 * full.linear(large)


def test_a_windowed_layer_reads_its_window_only():
    tables = step("openai/gpt-oss-120b", cut=Parallelism()).times(16, 1024)
    assert tables.window == 128
    assert tables.read_window == pytest.approx(tables.read)  # every second layer


def test_sparse_attention_reads_what_its_indexer_chooses():
    tables = step("zai-org/GLM-5", device="b200", weights="fp8", kv="fp8").times(16, 1024)
    assert tables.window == 2048
    assert tables.read < 0.3 * tables.read_window


def test_narrower_weights_make_decoding_faster():
    tokens = np.array([1.0])
    spans = [float(step(device="b200", weights=p).linear(tokens)[0]) for p in ("bf16", "fp8", "fp4")]
    assert spans == sorted(spans, reverse=True)


def test_kernels_of_a_step_are_those_that_engines_launch():
    """Counted by hand: 80 layers of ten; 61 of latent attention, of which 58 have experts and a shared one."""
    assert work(models()[DENSE], Parallelism(tp=8)).kernels == 80 * (6 + 4)
    assert work(models()["deepseek-ai/DeepSeek-R1"], Parallelism(tp=8)).kernels == 61 * 10 + 3 * 4 + 58 * 13
    indexed = work(models()["zai-org/GLM-5"], Parallelism(tp=8)).kernels
    assert indexed == 78 * 24 + 3 * 4 + 75 * 13


@pytest.mark.parametrize(
    ("model", "weights", "more"),
    [(DENSE, "fp8", 0), ("Qwen/Qwen3-235B-A22B", "fp8", 94 * 3), ("Qwen/Qwen3-235B-A22B", "fp4", 0)],
)
def test_weights_with_a_scale_for_each_block_want_inputs_made_narrow_by_a_kernel(model, weights, more):
    """Before three products of a layer, not behind its gate."""
    narrow, wide = (step(model, weights=p).overhead() for p in (weights, "bf16"))
    assert narrow - wide == pytest.approx(more * Factors().kernel)


@pytest.mark.parametrize(("weights", "share"), [("bf16", 1.0), ("fp8", 0.5), ("fp4", 0.5)])
def test_experts_lose_a_share_of_the_memorys_peak_at_eight_bits_and_no_further_one_at_four(weights, share):
    def span(left):
        factors = Factors(narrow_bandwidth=left, expert_compute=1.0)
        return step("Qwen/Qwen3-235B-A22B", device="b200", weights=weights, factors=factors)._experts(np.array([1.0]))

    assert span(1.0) / span(0.5) == pytest.approx(share, rel=0.01)


def test_groups_of_attention_compute_the_prompts_of_one_request_on_one_of_them():
    cut = Parallelism(dp=8, ep=8)
    tables = step("deepseek-ai/DeepSeek-R1", device="b200", cut=cut, weights="fp8").times(64, 65536)
    assert tables.groups == 8
    assert len(tables.shared) == len(tables.mixed)
    alone, all_groups = tables.mixed[8192] + tables.shared[8192], tables.mixed[8192] + tables.shared[65536]
    assert alone < 0.8 * all_groups
    assert step(cut=Parallelism(tp=8)).times(64, 8192).shared.tolist() == [0.0]


def _fields(machine):
    return {name: getattr(machine, name) for name in machine.__slots__}
