"""Turns the public measurements into slices of one shape: `python tests/bench/simulator/import_measured.py FOLDER`.

FOLDER holds one folder a source, as tests/data/measured/SOURCE.md lists them. Run once when a source is updated; the
slices are committed. Only sources whose licence allows redistribution are written.
"""

from __future__ import annotations

import csv
import gzip
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from fabrictool.catalog import engines, model

OUT = Path(__file__).parents[2] / "data" / "measured"
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "scheduler_recv_interval", "gpu_memory_utilization")
COLUMNS = [
    *("device", "model", "engine", "precision", "kv_precision", "tp", "pp", "ep", "dp"),
    *("input_len", "output_len", "concurrency", "mode"),
    *(f"{phase}_{name}" for phase in ("prefill", "decode") for name in ("workers", "tp", "pp", "ep", "dp")),
    *LIMITS,
    *("ttft_ms", "tpot_ms", "e2e_ms", "version", "mark"),
]
KERNEL_COLUMNS = [
    *("op", "dtype", "m", "n", "k", "experts", "chosen", "batch", "context", "heads", "kv_heads", "head_dim", "note"),
    *("median_us", "p10_us", "p90_us", "repeats"),
]
KERNEL_DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8"}
ALL_REDUCE_COLUMNS = ["device", "engine", "devices", "octets", "median_us"]
ALL_REDUCES = {
    "a100_sxm": ("vllm_0.14.0", "trtllm_1.0.0"),
    "h100_sxm": ("vllm_0.24.0", "trtllm_1.3.0rc20"),
    "h200_sxm": ("vllm_0.24.0", "trtllm_1.3.0rc20"),
    "b200_sxm": ("vllm_0.24.0", "trtllm_1.3.0rc20"),
}
DEVICES = {"b200_sxm": "b200", "b300_sxm": "b300", "h100_sxm": "h100-sxm", "h200_sxm": "h200"}
DRAFTING = ("deepseek-ai/DeepSeek-R1", "Qwen/Qwen3.5-397B-A17B", "zai-org/GLM-5")
"""Models that come with heads for multi-token prediction."""
CACHED = ("h200_sxm", "vllm", "nvidia/Llama-3.1-8B-Instruct-FP8")
"""Runs whose prompts alone would take up to 85 % of the units' peak at 8 bits, and in no other run more than 44 %: vLLM
caches prefixes unless told otherwise, and these prompts it must have known.
"""
RECIPES = (
    ("sglang b[23]00 DeepSeek-R1 fp4 .*", lambda load: (256, 16384, load.seldom)),
    (
        "sglang b[23]00 DeepSeek-R1 fp8 .*",
        lambda load: (128, 32768, load.seldom) if load.tp == 8 else (32, 8192, 10, 0.95),
    ),
    ("sglang h200 DeepSeek-R1 .*", lambda load: (512 if load.output == load.input else 256, 32768, 1)),
    ("sglang h200 Qwen3.5-397B-A17B .*", lambda _: (128, 16384, 1)),
    ("sglang b200 Qwen3.5-397B-A17B fp4 .*", lambda load: (max(128, load.flying), 32768, 30)),
    ("sglang b300 Qwen3.5-397B-A17B fp8 0.5.10.*", lambda load: (load.flying, 16384, 10)),
    ("sglang b[23]00 Qwen3.5-397B-A17B .*", lambda load: (max(128, load.flying), 32768, load.seldom)),
    ("sglang b[23]00 GLM-5 fp8 .*", lambda load: (load.flying, 32768, 1)),
    ("sglang b[23]00 GLM-5 fp4 .*", lambda _: ("", 32768, 10)),
    ("vllm b[23]00 MiniMax-M2.5 fp[48] (0.19.0|nightly.*)", lambda load: ("", 2 * load.input, 1)),
    ("vllm h100-sxm MiniMax-M2.5 .*", lambda _: (256, "", 1)),
    ("tensorrt-llm b200 Llama-3.1-70B fp8 .*", lambda _: ("", 16384, 1)),
    ("tensorrt-llm b200 Llama-3.1-70B fp4 .*", lambda load: ("", load.input + load.output + 200, 1)),
    ("tensorrt-llm b200 DeepSeek-R1 fp4 ", lambda _: ("", 2200, 1)),
    (  # on four devices: three quarters of what the weights leave
        "tensorrt-llm b200 DeepSeek-R1 fp8 .+",
        lambda load: ("", load.prompt_and_answers, 1, 0.97 if load.tp == 4 else ""),
    ),
    ("tensorrt-llm (b200|h200) DeepSeek-R1 fp[48] .+", lambda load: ("", load.prompt_and_answers, 1)),
)
"""What the servers of one project's runs were told, by engine, device, model, precision and version: most requests and
tokens of a step, decode steps between looks for new requests, and share of memory. From its public scripts
(SemiAnalysisAI/InferenceX, benchmarks/: the versions that are nearest before the runs' dates); what no script says
stays empty, the default."""
COLD, COLD_TOKENS = ("b200_sxm", "sglang", "deepseek-ai/DeepSeek-R1", "fp4", ""), 16_384
"""Runs whose first tokens took 5 to 12 s on average as soon as there were prompts for a step of so many tokens,
whatever the load (tp 4, 1024 tokens in: 0.9 s with 16 requests in flight, 7.1 s with 32, 7.6 s with 128): the first
such step waited for its kernels to be compiled."""
ENGINES = {"trtllm": "tensorrt-llm", "vllm": "vllm", "sglang": "sglang"}
ARGONNE_DEVICES = {
    "Nvidia A100 GPU": "a100-40g",
    "Nvidia H100 GPU": "h100-sxm",
    "AMD MI300X GPU": "mi300x",
    "Habana Gaudi2": "gaudi2",
    "Intel PVC GPU": "max1550",
}
ARGONNE_ENGINES = {"vLLM": "vllm", "TensorRT-LLM": "tensorrt-llm", "llama.cpp": "llama.cpp"}
ARGONNE_MODELS = re.compile(
    r"(meta-llama/Llama-2-70b-hf|meta-llama/Llama-2-7b-hf|meta-llama/Meta-Llama-3-\d+B|mistralai/.*)"
)


def main(argv: list[str]) -> None:
    folder = Path(argv[0])
    _write("silicon", list(_silicon(folder / "aiconfigurator-silicon" / "silicon_sample.csv")))
    _write("argonne", list(_argonne(folder / "argonne-llm-inference-bench" / "All_results.csv.gz")))
    _write("kernels-h100", list(_kernels(folder / "aiconfigurator-operators")), KERNEL_COLUMNS)
    _write("all-reduce", list(_all_reduces(folder / "aiconfigurator-operators")), ALL_REDUCE_COLUMNS)


def _silicon(path: Path):
    rows = [row for row in csv.DictReader(path.open()) if _in_flight(row)]
    speculative = _speculative_sessions(rows)
    runs: dict[tuple[object, ...], dict[str, str]] = {}
    for row in sorted(rows, key=_trusted, reverse=True):
        # Several dumps hold the same run, some under another model's name.
        figures = (f"{float(row[name]):.4g}" for name in ("silicon_ttft_ms", "silicon_tpot_ms"))
        run = (*_setting(row), *figures)
        runs.setdefault(run, row)
    for row in runs.values():
        # What does not state it are runs of a dense model whose weights would take more than all of the memory's
        # bandwidth at 16 bits if they were 8: no quantisation was asked for.
        precision = row["precision"] or "bf16"
        line = {
            "device": DEVICES[row["system"]],
            "model": _model(row),
            "engine": ENGINES[row["backend"]],
            "precision": precision,
            "kv_precision": _cache(row, precision),
            "input_len": row["isl"],
            "output_len": row["osl"],
            "concurrency": _in_flight(row),
            "mode": row["mode"],
            "ttft_ms": f"{float(row['silicon_ttft_ms']):.4g}",
            "tpot_ms": f"{float(row['silicon_tpot_ms']):.4g}",
            "version": row["backend_version"],
            "mark": _mark(row, speculative),
        }
        if row["mode"] == "agg":
            line |= _whole_experts(_cut(row, "", ""), line)
            line |= _limits(row, line)
        else:
            line |= _cut(row, "prefill_", "prefill_") | _cut(row, "decode_", "decode_")
            if not row["prefill_num_workers"] or not row["decode_num_workers"]:
                continue  # over how many replicas the load is spread is not stated
            line["prefill_workers"], line["decode_workers"] = row["prefill_num_workers"], row["decode_num_workers"]
        yield line


@dataclass(frozen=True)
class Load:
    """What recipes depend on."""

    flying: int
    input: int
    output: int
    tp: int

    @property
    def seldom(self) -> int:
        """With many requests the scripts let the scheduler look for new ones less often."""
        return 30 if self.flying >= 16 else 10

    @property
    def prompt_and_answers(self) -> int:
        """Tokens of a step with one whole prompt and all answers, in blocks of 64."""
        return max(8192, (self.flying + self.input + 127) // 64 * 64)


def _limits(row: dict[str, str], line: dict[str, object]) -> dict[str, object]:
    """Of runs by scripts that are public; others' servers were told nothing that is known."""
    if "/Users/" in row["silicon_data_source"]:
        return {}
    words = (line["engine"], line["device"], str(line["model"]).split("/")[-1], line["precision"], line["version"])
    name = " ".join(map(str, words))
    load = Load(*(int(str(line[key])) for key in ("concurrency", "input_len", "output_len", "tp")))
    chosen = next((limits(load) for pattern, limits in RECIPES if re.fullmatch(pattern, name)), ())
    return dict(zip(LIMITS, chosen, strict=False))


def _in_flight(row: dict[str, str]) -> str:
    """Requests of the whole system; empty where the load is not stated, or not over how many replicas it is spread."""
    if row["mode"] == "agg" and "gtl_job_id" in row["silicon_data_source"]:
        return ""
    stated = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    return stated.group(1) if stated else row["batch_size"]


def _model(row: dict[str, str]) -> str:
    """Runs that one dump calls DeepSeek-V3 are those of DeepSeek-R1, by their names and by equal figures."""
    return "deepseek-ai/DeepSeek-R1" if row["id"].startswith("dsr1_") else row["model_path"]


def _trusted(row: dict[str, str]) -> bool:
    """Whether the run comes from the dump that names each configuration and leaves speculative ones out."""
    return bool(re.search(r"_cfg\d+$", row["id"]))


def _setting(row: dict[str, str]) -> tuple[object, ...]:
    prefixes = ("",) if row["mode"] == "agg" else ("prefill_", "decode_")
    widths = tuple(tuple(_cut(row, prefix, "").values()) for prefix in prefixes)
    workers = row["prefill_num_workers"], row["decode_num_workers"]
    names = tuple(row[name] for name in ("system", "backend", "precision", "mode", "isl", "osl"))
    return (*names, _model(row), widths, workers, _in_flight(row))


def _mark(row: dict[str, str], speculative: set[tuple[str, ...]]) -> str:
    """Why nothing may be learned from a run: what its columns say is not what was computed."""
    if not _trusted(row) and _session(row) in speculative:
        return "speculative"
    release = (row["system"], row["backend"], _model(row), row["precision"], row["backend_version"])
    if release == COLD and row["mode"] == "agg" and int(_in_flight(row)) * int(row["isl"]) > COLD_TOKENS:
        return "cold"
    return "cached" if (row["system"], row["backend"], row["model_path"]) == CACHED else ""


def _session(row: dict[str, str]) -> tuple[str, ...]:
    """Runs of one day with one version."""
    day = re.search(r"measured=([0-9-]+)", row["silicon_data_source"])
    return row["system"], row["backend"], _model(row), row["backend_version"], day.group(1) if day else ""


def _speculative_sessions(rows: list[dict[str, str]]) -> set[tuple[str, ...]]:
    """Sessions with a run that decodes over a tenth faster than the trusted run of the same setting or, where there is
    none, than those of the same load on at least twice as many devices with as many groups for attention.

    The models have heads that draft tokens, and first tokens of these runs come later than those of the trusted ones:
    what is faster is not the step.
    """
    plain: dict[tuple[object, ...], float] = {}
    for row in filter(_trusted, rows):
        tpot = float(row["silicon_tpot_ms"])
        plain[_setting(row)] = min(tpot, plain.get(_setting(row), tpot))
        for devices in _fewer(row):
            key = (*_load(row), devices)
            plain[key] = min(tpot, plain.get(key, tpot))
    return {
        _session(row)
        for row in rows
        if _model(row) in DRAFTING
        and not _trusted(row)
        and float(row["silicon_tpot_ms"]) < 0.9 * plain.get(_setting(row), plain.get(_on(row), 0.0))
    }


def _load(row: dict[str, str]) -> tuple[object, ...]:
    names = tuple(row[name] for name in ("system", "backend", "precision", "mode", "isl", "osl"))
    return (*names, _model(row), _in_flight(row), _cut(row, "", "")["dp"])


def _on(row: dict[str, str]) -> tuple[object, ...]:
    return (*_load(row), _devices(row) if row["mode"] == "agg" else 0)


def _devices(row: dict[str, str]) -> int:
    cut = _cut(row, "", "")
    return int(str(cut["tp"])) * int(str(cut["pp"])) * int(str(cut["dp"]))


def _fewer(row: dict[str, str]) -> list[int]:
    """Numbers of devices that are half of a run's, or less."""
    return [n for n in (1, 2, 4, 8) if 2 * n <= _devices(row)] if row["mode"] == "agg" else []


def _cache(row, precision: str) -> str:
    """Not stated. vLLM keeps 16 bits unless told otherwise, and the loads at which its runs on Hopper began to queue
    agree; its runs on Blackwell queue as late as only 8 bits allow."""
    narrow = row["backend"] != "vllm" or row["system"].startswith("b")
    return "fp8" if narrow and precision != "bf16" else "bf16"


def _cut(row: dict[str, str], prefix: str, to: str) -> dict[str, object]:
    """Widths. The dumps of one project multiply them: 64 = 8 × 8, 16 = 4 × 4 and 4 = 2 × 2 stand for 8, 4 and 2
    devices, as equal runs of another dump and the names of the configurations say.
    """
    tp, dp, ep = (int(row[f"{prefix}{k}_size"] or 1) for k in ("tp", "attention_dp", "moe_ep"))
    split = int(row[f"{prefix}moe_tp_size"] or 1)
    stated = bool(row[f"{prefix}attention_dp_size"])
    if stated and split == ep > 1 and tp * dp == split * ep:
        tp, dp = (ep, 1) if dp == 1 else (1, ep)
    elif stated and tp > 1 and dp > 1 and ep == tp * dp:
        dp, ep = 1, tp
    elif split * ep > tp * dp:  # experts lie on all devices, and attention has groups
        dp = split * ep // tp
    pp = int(row[f"{prefix}pp_size"] or 1)
    return {f"{to}tp": tp, f"{to}pp": pp, f"{to}ep": min(ep, tp * dp), f"{to}dp": dp}


def _whole_experts(cut: dict[str, object], line: dict[str, object]) -> dict[str, object]:
    """Of a run that its engine would have refused to start with experts cut in pieces: each device had whole ones."""
    served, tp = model(str(line["model"])), int(str(cut["tp"]))
    engine, precision = engines()[str(line["engine"])], str(line["precision"])
    if served is None or cut["ep"] != 1 or not engine.unsplittable(served, tp, 1, precision):
        return cut
    return cut | {"ep": tp}


def _argonne(path: Path):
    for row in csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines()):
        engine = ARGONNE_ENGINES.get(row["Framework"], "deepspeed" if "Deepspeed" in row["Framework"] else None)
        if row["Hardware"] not in ARGONNE_DEVICES or engine is None or not ARGONNE_MODELS.match(row["Model"]):
            continue
        length = int(float(row["Input Output Length"]))
        batch = int(row["Batch Size"])
        if engine == "llama.cpp":
            # Its batch is the chunk in which one prompt is read (n_batch): latencies fall with it.
            if batch < 64:
                continue
            batch = 1
        yield {
            "device": ARGONNE_DEVICES[row["Hardware"]],
            "model": row["Model"],
            "engine": engine,
            "precision": "bf16" if row["Hardware"] == "Habana Gaudi2" else "fp16",
            "kv_precision": "fp16",
            "tp": row["Num of Hardware"],
            "pp": 1,
            "ep": 1,
            "dp": 1,
            "input_len": length,
            "output_len": length,
            "concurrency": batch,
            "mode": "batch",
            "e2e_ms": f"{1e3 * float(row['Latency']):.5g}",
        }


def _kernels(folder: Path):
    """Of vLLM on H100: 16-bit and 8-bit products and experts, 16-bit attention of 128 wide heads; powers of two."""
    tables = {}
    for op in ("gemm", "generation_attention", "context_attention", "moe"):
        lines = (
            gzip.decompress((folder / f"h100_sxm__vllm_0.24.0__{op}_perf.csv.gz").read_bytes()).decode().splitlines()
        )
        tables[op] = list(csv.DictReader(lines))
    for row in tables["gemm"]:
        m, n, k = (int(row[name]) for name in "mnk")
        if row["gemm_dtype"] in ("bfloat16", "fp8") and min(n, k) >= 1024 and not m & (m - 1):
            yield _kernel("matmul", row, row["gemm_dtype"], m=m, n=n, k=k)
    for op, name in (("decode_attention", "generation_attention"), ("prefill_attention", "context_attention")):
        for row in tables[name]:
            plain = row["kv_cache_dtype"] == "bfloat16" and row["head_dim"] == "128" and row["window_size"] == "0"
            length = int(row["step"]) + 1 if "step" in row else int(row["isl"])
            if plain and row["kernel_source"].endswith("fa3") and not length & (length - 1):
                heads, kv_heads = row["num_heads"], row["num_key_value_heads"]
                sizes = {"batch": row["batch_size"], "context": length, "heads": heads, "kv_heads": kv_heads}
                yield _kernel(op, row, "bfloat16", head_dim=128, **sizes)
    for row in tables["moe"]:
        whole = row["moe_tp_size"] == row["moe_ep_size"] == "1" and row["distribution"] == "balanced"
        m = int(row["num_tokens"])
        if whole and row["moe_dtype"] in ("bfloat16", "fp8_block") and not m & (m - 1):
            sizes = {"n": row["inter_size"], "k": row["hidden_size"], "experts": row["num_experts"]}
            yield _kernel("experts", row, row["moe_dtype"], m=m, chosen=row["topk"], **sizes)


def _kernel(op: str, row: dict[str, str], dtype: str, **sizes: object) -> dict[str, object]:
    time = f"{1e3 * float(row['latency']):.4g}"
    return {"op": op, "dtype": KERNEL_DTYPES[dtype], "note": row["kernel_source"], "median_us": time, **sizes}


def _all_reduces(folder: Path):
    """In a captured graph where that was timed, of 16-bit messages of 8 KiB to 256 MiB, within one node."""
    for system, tables in ALL_REDUCES.items():
        for name in tables:
            text = gzip.decompress((folder / f"{system}__{name}__custom_allreduce_perf.csv.gz").read_bytes()).decode()
            for row in csv.DictReader(text.splitlines()):
                octets = 2 * int(row["message_size"])  # counted in elements
                if not row.get("backend", "").endswith("eager") and 1 << 13 <= octets <= 1 << 28:
                    yield {
                        "device": (DEVICES | {"a100_sxm": "a100-80g"})[system],
                        "engine": ENGINES[name.partition("_")[0]],
                        "devices": row["num_gpus"],
                        "octets": octets,
                        "median_us": f"{1e3 * float(row['latency']):.4g}",
                    }


def _write(name: str, lines: list[dict[str, object]], columns: list[str] = COLUMNS) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(OUT / f"{name}.csv.gz", "wb", mtime=0) as raw:
        text = [",".join(columns)] + [",".join(str(line.get(c, "")) for c in columns) for line in lines]
        raw.write(("\n".join(text) + "\n").encode())
    print(name, len(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
