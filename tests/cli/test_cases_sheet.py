"""``simulate --cases``: a forecast or a code in each row of a sheet."""

import csv
import io

import pytest

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
    ],
)
def test_what_a_sheet_would_ignore_is_refused(command, folder, given):
    code, out, err = command("simulate", "--cases", "cases.csv", "-o", "out.csv", *given)
    option = given[0] if given[0].startswith("--") else {"-b": "--blueprint", "-i": "--inventory"}.get(given[0], "PLAN")
    assert (code, "FT9001" in out + err, option in out + err) == (64, True, True)
    assert not (folder / "out.csv").exists()


def test_interrupting_a_sheet_writes_nothing(interrupted, folder):
    header, good, *_ = CASES.splitlines()
    rows = [good.replace(",8,agg", f",{100 + i},agg") for i in range(3000)]
    (folder / "many.csv").write_text("\n".join([header, *rows]) + "\n")
    code, out, _ = interrupted("cases: ", "simulate", "--cases", "many.csv", "-o", "out.csv")
    assert (code, out, (folder / "out.csv").exists()) == (130, "", False)


def test_a_loop_that_is_not_compiled_says_so_once(command, monkeypatch):
    from fabrictool.simulator import kernel

    assert "numba" not in command("simulate", "--cases", "cases.csv")[2]
    monkeypatch.setattr(kernel, "COMPILED", False)
    code, _, err = command("simulate", "--cases", "cases.csv")
    assert (code, err.count("warning: numba is not installed here")) == (0, 1)
