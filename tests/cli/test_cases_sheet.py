"""``simulate --cases``: a forecast or a code in each row of a sheet."""

import contextlib
import csv
import io
import json
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import pytest

from fabrictool.cli import executors, simulating
from fabrictool.simulator.calibration import dumps, shipped
from tests.testbed.waiting import wait_until

CASES = """\
device,model,engine,precision,tp,input_len,output_len,concurrency,mode,note
h100-sxm,meta-llama/Llama-3.1-8B,vllm,bf16,1,512,64,8,agg,good
h100-sxm,meta-llama/Llama-3.1-8B,vllm,bf16,1,512,64,8,batch,static
abacus,meta-llama/Llama-3.1-8B,vllm,bf16,1,512,64,8,agg,device
h100-sxm,nobody/nothing,vllm,bf16,1,512,64,8,agg,model
h100-sxm,meta-llama/Llama-3.1-8B,steam,bf16,1,512,64,8,agg,engine
h100-sxm,meta-llama/Llama-3.1-8B,vllm,bf16,1,nan,64,8,agg,length
h100-sxm,meta-llama/Llama-3.1-8B,vllm,bf16,1,512,64,-1,agg,load
h100-sxm,meta-llama/Llama-3.1-8B,vllm,bf16,inf,512,64,8,agg,tp
h100-sxm,meta-llama/Llama-3.1-8B,vllm,bf99,1,512,64,8,agg,precision
h100-sxm,meta-llama/Llama-3.1-8B,vllm,bf16,1,512,64,8,never,mode
h100-sxm,meta-llama/Llama-3.1-70B,vllm,bf16,1,512,64,8,agg,memory
h100-sxm,meta-llama/Llama-3.1-8B,vllm,bf16,1,512,64,8,agg,good,one,too,many
h100-sxm,meta-llama/Llama-3.1-8B
"""
CODES = ["", "", "FT2132", "FT2133", "FT2134", *["FT2131"] * 5, "FT2111", "FT2131", "FT2131"]
FORECAST = ["ttft_ms", "tpot_ms", "e2e_ms", "tokens_per_s"]
FORECAST += ["ttft_lo", "ttft_hi", "tpot_lo", "tpot_hi", "e2e_lo", "e2e_hi"]
FORECAST += [f"{metric}_{quantile}" for metric in ("ttft", "tpot", "e2e") for quantile in ("p50", "p90", "p99")]
FORECAST += ["requests_per_s", "attainment", "joules_per_token", "cost_per_million_tokens", "error"]
NOT_ASKED = {"attainment", "cost_per_million_tokens"}


@pytest.fixture(autouse=True)
def cases(folder):
    (folder / "cases.csv").write_text(CASES)


def test_each_row_is_answered_or_has_a_code(command):
    code, out, err = command("simulate", "--cases", "cases.csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["error"][:6] for row in rows] == CODES
    assert f"{len(CODES)} cases, {sum(map(bool, CODES))} with an error" in err
    for row in rows:
        figures = [row[name] for name in FORECAST[:-1] if name not in NOT_ASKED]
        assert all(figures) if not row["error"] else not any(figures)
    for row in rows[:2]:
        assert 0 < float(row["tpot_ms"]) < float(row["ttft_ms"]) < float(row["e2e_ms"])
        for metric in ("ttft", "tpot", "e2e"):
            assert float(row[f"{metric}_lo"]) < float(row[f"{metric}_ms"]) < float(row[f"{metric}_hi"])


def test_given_columns_come_first_then_the_forecast(command, folder):
    assert command("simulate", "--cases", "cases.csv", "-o", "out.csv")[0] == 0
    header = (folder / "out.csv").read_text().splitlines()[0].split(",")
    assert header == [*CASES.splitlines()[0].split(","), *FORECAST]
    # What was written can be read and gives the same.
    assert command("simulate", "--cases", "out.csv", "-o", "again.csv")[0] == 0
    assert (folder / "again.csv").read_text().splitlines()[:3] == (folder / "out.csv").read_text().splitlines()[:3]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"device,model\na,b\n", "engine, input_len, output_len, concurrency"),
        (b"", "lacks columns"),
        (b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_a_sheet_that_is_none(command, folder, text, why):
    (folder / "wrong.csv").write_bytes(text)
    code, _, err = command("simulate", "--cases", "wrong.csv")
    assert code == 65
    assert "FT2130" in err
    assert why in err


def test_mistakes_with_a_sheet(command, folder):
    code, _, err = command("simulate", "--cases", "no-such.csv")
    assert (code, "FT4302" in err) == (1, True)
    (folder / "more.csv").write_text(CASES.replace(",note", ",max_batch", 1))
    code, out, err = command("simulate", "--cases", "more.csv")
    assert (code, out, "FT2135" in err, "max_batch" in err) == (65, "", True, True)
    code, _, err = command("simulate", "--cases", "cases.csv", "--calibrations", ".")
    assert (code, "FT2120" in err) == (65, True)


@pytest.mark.parametrize(
    "given",
    [
        ["plan.json"],
        ["-b", "blueprint.yaml"],
        ["-i", "inventory.yaml"],
        ["--overlay", "x"],
        ["--scenario", "calm"],
        ["--status", "s.json"],
        ["--trace", "t.csv"],
        ["--workload", "poisson"],
        ["--model", "tiny"],
        ["--requests", "7"],
        ["--rate", "1"],
        ["--event", "down:tiny/0@1s"],
        ["--plot", "p.svg"],
        ["--chrome-trace", "c.json"],
        ["--chart"],
        ["--json"],
        ["--seeds", "3"],
    ],
)
def test_what_a_sheet_would_ignore_is_refused(command, folder, given):
    code, out, err = command("simulate", "--cases", "cases.csv", "-o", "out.csv", *given)
    option = given[0] if given[0].startswith("--") else {"-b": "--blueprint", "-i": "--inventory"}.get(given[0], "PLAN")
    assert (code, "FT9001" in out + err, option in out + err) == (64, True, True)
    assert not (folder / "out.csv").exists()


# --- who does the work


def many(folder, count):
    """A sheet of good rows, each with a load of its own, and a bad row after each ten."""
    header, good, *_ = CASES.splitlines()
    rows = [good.replace(",8,agg", f",{1 + i},{'never' if i % 11 == 10 else 'agg'}") for i in range(count)]
    (folder / "many.csv").write_text("\n".join([header, *rows]) + "\n")
    return "simulate", "--cases", "many.csv"


def test_models_and_calibrations_of_ones_own_are_sent(command, folder):
    (folder / "mine").mkdir()
    own = replace(next(shared for shared in shipped() if shared.scope == "online"), device="h100-sxm", engine="vllm")
    own = replace(own, factors=replace(own.factors, request=own.factors.request + 0.5))
    (folder / "mine" / "own.toml").write_text(dumps(own))
    config = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 1000}
    config |= {"model_type": "llama", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
    config |= {"architectures": ["LlamaForCausalLM"], "intermediate_size": 1024, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    header, good, *_ = CASES.splitlines()
    rows = [good.replace("meta-llama/Llama-3.1-8B", "config.json").replace(",8,agg", f",{i},agg") for i in range(1, 9)]
    (folder / "own.csv").write_text("\n".join([header, *rows]) + "\n")
    asked = ("simulate", "--cases", "own.csv", "--calibrations", "mine")
    _, here, _ = command(*asked)
    assert command(*asked, "--workers", 2)[1] == here
    assert not any(row["error"] for row in csv.DictReader(io.StringIO(here)))
    assert all(float(row["ttft_ms"]) > 500 for row in csv.DictReader(io.StringIO(here)))


def test_a_short_sheet_starts_no_process_and_a_long_one_does(command, folder, monkeypatch):
    def started(*_):
        raise BrokenProcessPool

    monkeypatch.setattr(executors, "_processes", started)
    assert command(*many(folder, 12))[0] == 0
    monkeypatch.setattr(simulating, "FEW_CASES", 12)
    code, _, err = command(*many(folder, 12))
    assert (code, "FT2013" in err) == (1, True)


def test_a_sheet_without_rows_is_answered_by_anyone(command, folder):
    (folder / "empty.csv").write_text(CASES.splitlines()[0] + "\n")
    code, out, err = command("simulate", "--cases", "empty.csv", "--workers", 2)
    assert (code, len(out.splitlines()), "0 cases" in err) == (0, 1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--executor", "cloud"], 64, "FT2013"),
        (["--executor", "here", "--workers", "2"], 64, "FT2013"),
        (["--executor", "dask://127.0.0.1:9", "--workers", "2"], 64, "FT2013"),
        (["--executor", "dask://nowhere"], 64, "FT9002"),
        (["--workers", "0"], 64, "FT9001"),
    ],
)
def test_misuse_of_executors_has_a_code(command, folder, arguments, code, said):
    got, out, err = command("simulate", "--cases", "cases.csv", "-o", "out.csv", *arguments)
    assert (got, out, said in err) == (code, "", True)
    assert not (folder / "out.csv").exists()


def long_sheet(folder):
    header, good, *_ = CASES.splitlines()
    rows = [good.replace(",8,agg", f",{100 + i},agg") for i in range(3000)]
    (folder / "many.csv").write_text("\n".join([header, *rows]) + "\n")


@pytest.mark.parametrize("given", [["--executor", "here"], ["--workers", "2"]])
def test_interrupting_a_sheet_writes_nothing(interrupted, folder, given):
    long_sheet(folder)
    code, out, _ = interrupted("cases: ", "simulate", "--cases", "many.csv", "-o", "out.csv", *given)
    assert (code, out, (folder / "out.csv").exists()) == (130, "", False)
    wait_until("a process is left", lambda: not running_in(folder), within_s=60)


def running_in(folder):
    """Processes whose working directory is this folder."""
    places = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            places.append(link.resolve())
    return [place for place in places if place == folder.resolve()]


def test_a_loop_that_is_not_compiled_says_so_once(command, monkeypatch):
    from fabrictool.simulator import kernel

    assert "numba" not in command("simulate", "--cases", "cases.csv")[2]
    monkeypatch.setattr(kernel, "COMPILED", False)
    code, _, err = command("simulate", "--cases", "cases.csv")
    assert (code, err.count("warning: numba is not installed here")) == (0, 1)
