"""``calibrate``: from a sheet of measurements, and from records of a service's requests."""

import csv
import io
import json
from dataclasses import replace
from functools import cache

import pytest

from fabrictool.simulator.calibration import choose, loads, shipped
from fabrictool.simulator.replay import recorded
from fabrictool.simulator.sheet import answer, case_of
from fabrictool.workload.generate import Recipe, generate
from fabrictool.workload.trace import dumps

SUBJECT = ("device", "engine", "scope", "measurements")


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


# --- from a sheet


GRID = "device,model,engine,input_len,output_len,concurrency,mode\n" + "".join(
    f"h100-sxm,meta-llama/Llama-3.1-8B,vllm,{inputs},32,{concurrency},batch\n"
    for inputs in (128, 512)
    for concurrency in (1, 32)
)


@cache
def forecasts():
    return tuple(answer(rows_of(GRID), shipped()))


def measured(factor):
    """Forecasts of some cases, `factor` slower, as if they had been measured."""
    times = ("ttft_ms", "tpot_ms", "e2e_ms")
    return [row | {name: str(factor * float(row[name])) for name in times} for row in forecasts()]


def save(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_own_measurements_make_forecasts_better(command, folder):
    rows = measured(1.3)
    unusable = [
        rows[0] | {"device": "abacus"},
        rows[0] | {"ttft_ms": "nan", "tpot_ms": "-1", "e2e_ms": "x"},
        rows[0] | {"error": "FT2111: does not fit"},
        rows[0] | {"input_len": ""},
        rows[0] | {"e2e_ms": "90"},
    ]
    save(folder / 'my "data".csv', rows + unusable)
    code, out, err = command("calibrate", 'my "data".csv', "-o", "mine", "--json")
    assert code == 0
    for line in ("row 6: FT2132", "row 7: FT2147", "row 8: FT2111", "row 9: FT2131", "row 10: FT2154: E2E"):
        assert line in err
    document = json.loads(out)
    assert document["unusable_rows"] == 5
    (fitted,) = document["calibrations"]
    assert [fitted[name] for name in SUBJECT] == ["h100-sxm", "vllm", "static", 4]
    assert fitted["error_before"] == pytest.approx(1 - 1 / 1.3, abs=0.01)
    assert fitted["error_after"] < fitted["error_before"] / 2

    (folder / "grid.csv").write_text(GRID)
    assert command("simulate", "--cases", "grid.csv", "-o", "better.csv", "--calibrations", "mine")[0] == 0
    for row, better in zip(rows, rows_of((folder / "better.csv").read_text()), strict=True):
        assert float(better["e2e_ms"]) == pytest.approx(float(row["e2e_ms"]), rel=0.15)


def test_measurements_that_are_none(command, folder):
    rows = measured(1.0)
    save(folder / "none.csv", [row | dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms"), "") for row in rows])
    code, _, err = command("calibrate", "none.csv")
    assert (code, "FT2147" in err) == (65, True)
    save(folder / "few.csv", rows[:3])
    code, _, err = command("calibrate", "few.csv", "-o", "few")
    assert (code, "3 measurements are too few" in err) == (65, True)
    assert not (folder / "few").exists()


@pytest.mark.parametrize(
    ("content", "exit_code", "problem"), [(b"a,b\n1,2\n", 65, "FT2130"), (b"\xff", 65, "FT2130"), (None, 1, "FT4302")]
)
def test_a_file_that_is_no_sheet_of_measurements(command, folder, content, exit_code, problem):
    if content is not None:
        (folder / "data.csv").write_bytes(content)
    code, _, err = command("calibrate", "data.csv")
    assert (code, problem in err) == (exit_code, True)


# --- from records of requests

SERVICE = ("--device", "h100-sxm", "--engine", "vllm", "--model", "meta-llama/Llama-3.1-8B")


@cache
def trace_of_a_slow_service(count):
    """The lines of a service that is much slower per step than others."""
    cells = {"device": "h100-sxm", "model": SERVICE[-1], "engine": "vllm"}
    case = case_of(cells | dict.fromkeys(("input_len", "output_len", "concurrency"), "1"))
    factors = choose(shipped(), "h100-sxm", "nvidia", "vllm", "online").factors
    slow = replace(factors, step=2 * factors.step, kernel=2 * factors.kernel, bandwidth=0.75 * factors.bandwidth)
    trace = generate(Recipe(8.0), count, 1)
    times = recorded(case, trace).play(slow)
    return tuple(dumps(replace(trace, ttft=times["ttft"], latency=times["e2e"])))


def records(count=300):
    """What a service that is much slower per step than others would have recorded."""
    return [json.loads(line) for line in trace_of_a_slow_service(count)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_running_service_calibrates_its_own_forecasts(command, folder):
    rows = records()
    spoilt = [
        rows[9] | {"latency": -1.0},
        rows[19] | {"ttft": float("nan")},
        rows[29] | {"ttft": rows[29]["latency"] + 1},
        {name: value for name, value in rows[39].items() if name != "latency"},
        {name: value for name, value in rows[49].items() if name != "out"},
        rows[59] | {"t": None},
        "text",
    ]
    for at, row in zip((9, 19, 29, 39, 49, 59, 69), spoilt, strict=True):
        rows[at] = row
    write_lines(folder / "service.jsonl", rows)
    code, out, err = command("calibrate", "service.jsonl", *SERVICE, "-o", "mine", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["dropped"] == {
        "no ttft and latency to compare with": 4, "no token count": 1, "no time": 1, "not an object": 1
    }  # fmt: skip
    assert document["overloaded"] == 0
    (fitted,) = document["calibrations"]
    assert [fitted[name] for name in SUBJECT] == ["h100-sxm", "vllm", "online", 293]
    assert fitted["error_before"] > 0.25
    assert fitted["error_after"] < 0.05
    assert "293 of 300 requests" in err

    # The file is what `--calibrations` takes, with a band and the range that was seen.
    written = loads((folder / "mine" / "h100-sxm-vllm-online.toml").read_text())
    assert (written.points, written.source) == (293, "calibrate service.jsonl")
    assert all(-0.2 < spread.low <= spread.high < 0.2 for spread in written.spreads.values())
    row = "h100-sxm,meta-llama/Llama-3.1-8B,vllm,512,128,8\n"
    (folder / "one.csv").write_text("device,model,engine,input_len,output_len,concurrency\n" + row)
    (before,), (after,) = (
        rows_of(command("simulate", "--cases", "one.csv", *own)[1]) for own in ((), ("--calibrations", "mine"))
    )
    assert float(after["tpot_ms"]) == pytest.approx(float(before["tpot_ms"]) * 1.6, rel=0.15)


# --- planning with them


def of_this_machine(tpot_s):
    """A service of the reference engine that takes so long for a token, alone."""
    return [
        {"t": 5.0 * i, "in": 40 + i % 50, "out": 20, "ttft": 0.2 + 0.002 * (i % 50), "latency": 0.2 + 19 * tpot_s}
        for i in range(80)
    ]


def forecast_of(command):
    code, out, err = command("plan", "--json")
    assert code == 0, err
    plan = json.loads(out)
    return plan["forecast"]["models"][0]["tpot_p95_s"]["value"], plan["forecast"]["basis"], plan["blueprint_digest"]


@pytest.fixture
def trusted(command):
    assert command("trust", "init")[0] == 0


@pytest.mark.usefixtures("trusted")
def test_a_plan_forecasts_with_the_inventorys_calibrations(command, folder):
    assert forecast_of(command)[1].startswith("uncalibrated")
    inventory, seen = (folder / "inventory.yaml").read_text(), []
    for name, tpot_s in (("fast", 0.03), ("slow", 0.12)):
        write_lines(folder / f"{name}.jsonl", of_this_machine(tpot_s))
        own = ("--device", "cpu", "--engine", "reference", "--model", "HuggingFaceTB/SmolLM2-135M-Instruct")
        assert command("calibrate", f"{name}.jsonl", *own, "-o", name)[0] == 0
        (folder / "inventory.yaml").write_text(f"{inventory}calibrations: [{name}]\n")
        seen.append(forecast_of(command))
        simulated = command("simulate", "--requests", "50", "--json")[1]
        assert "calibrated: reference on cpu" in json.loads(simulated)["models"][0]["basis"]
    (fast, basis, first), (slow, _, second) = seen
    assert basis == "calibrated: reference on cpu, 80 measurements"
    assert slow == pytest.approx(4 * fast, rel=0.3)
    assert first != second
    # What counts is what a file says, and not its name.
    (folder / "slow").rename(folder / "other")
    (folder / "inventory.yaml").write_text(f"{inventory}calibrations: [other/cpu-reference-online.toml]\n")
    assert forecast_of(command)[2] == second


@pytest.mark.usefixtures("trusted")
def test_calibrations_that_no_plan_takes_are_said(command, folder):
    save(folder / "batches.csv", measured(1.3))
    assert command("calibrate", "batches.csv", "-o", "mine")[0] == 0
    (folder / "inventory.yaml").write_text((folder / "inventory.yaml").read_text() + "calibrations: [mine]\n")
    code, out, err = command("plan")
    assert (code, "vllm on h100-sxm, static: no plan takes it" in out + err) == (0, True)
    text = (folder / "mine" / "h100-sxm-vllm-static.toml").read_text()
    (folder / "mine" / "again.toml").write_text(text)
    code, _, err = command("plan")
    assert (code, "two calibrations are of vllm on h100-sxm, static" in err) == (65, True)


@pytest.mark.usefixtures("trusted")
def test_calibrations_that_an_inventory_names_and_that_are_none(command, folder):
    (folder / "empty").mkdir()
    long = "x" * 300
    (folder / "notes.toml").write_text("device = 3\n")
    inventory = (folder / "inventory.yaml").read_text()
    lines = len(inventory.splitlines())
    (folder / "inventory.yaml").write_text(
        f"{inventory}calibrations:\n  - gone.toml\n  - empty\n  - notes.toml\n  - {long}\n"
    )
    code, _, err = command("plan")
    assert (code, err.count("error[FT1128]")) == (65, 4)
    for below, name in enumerate(("gone.toml", "empty", "notes.toml", long), start=2):
        assert f"inventory.yaml:{lines + below}:5: error[FT1128]" in err
        assert f"- {name}" in err


# --- what is no measurement


def test_records_that_cannot_be_true_are_dropped_and_counted(command, folder):
    rows = records(100)
    rows[3] |= {"in": 9_000_000}
    rows[5] |= {"latency": 1e11}
    rows[7] |= {"ttft": 1e-300}
    write_lines(folder / "some.jsonl", rows)
    code, out, err = command("calibrate", "some.jsonl", *SERVICE, "-o", "mine", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["dropped"] == {"longer than the replica's cache": 1, "an impossible ttft or latency": 2}
    assert document["calibrations"][0]["measurements"] == 97
    assert document["calibrations"][0]["error_after"] < 0.1
    for name, spoilt in (("big", {"in": 9_000_000}), ("late", {"latency": 1e11}), ("soon", {"ttft": 1e-300})):
        write_lines(folder / f"{name}.jsonl", [row | spoilt for row in rows])
        code, _, err = command("calibrate", f"{name}.jsonl", *SERVICE, "-o", name)
        assert (code, "FT2150" in err, (folder / name).exists()) == (65, True, False), err


def test_a_fit_that_explains_nothing_is_not_written(command, folder):
    """A tenth of a token a second: nothing that a replica of this device could be."""
    rows = records(60)
    for i, row in enumerate(rows):
        row |= {"t": 1e5 * i, "ttft": 1e-5, "latency": 40_000.0 if i % 2 else 1e-4}
    write_lines(folder / "wild.jsonl", rows)
    code, _, err = command("calibrate", "wild.jsonl", *SERVICE, "-o", "mine")
    assert (code, "FT2152" in err, (folder / "mine").exists()) == (65, True, False), err
    rows = measured(1.0)
    save(folder / "wild.csv", [row | {"e2e_ms": "", "tpot_ms": "1e-9", "ttft_ms": ""} for row in rows])
    code, _, err = command("calibrate", "wild.csv", "-o", "mine")
    assert (code, err.count("FT2154"), "FT2147" in err, (folder / "mine").exists()) == (65, 4, True, False), err


def test_an_overloaded_service_is_no_measure(command, folder):
    rows = records(400)
    write_lines(folder / "over.jsonl", [row | {"ttft": 0.3 * i, "latency": 0.3 * i + 1} for i, row in enumerate(rows)])
    code, _, err = command("calibrate", "over.jsonl", *SERVICE)
    assert (code, "FT2150" in err, "arrived while the service did not keep up" in err) == (65, True, True)


def test_records_that_are_none(command, folder):
    rows = records(100)
    write_lines(folder / "all-bad.jsonl", [row | {"latency": -1} for row in rows])
    write_lines(folder / "few.jsonl", rows[:20])
    write_lines(folder / "several.jsonl", [row | {"model": "ab"[i % 2]} for i, row in enumerate(rows)])
    write_lines(folder / "no-trace.jsonl", [{"latency": 1}])
    for name, problem in (("all-bad", "FT2150"), ("few", "FT2150"), ("several", "FT2150"), ("no-trace", "FT2201")):
        code, _, err = command("calibrate", f"{name}.jsonl", *SERVICE, "-o", "mine")
        assert (code, problem in err) == (65, True), err
    assert not (folder / "mine").exists()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "problem"),
    [
        (SERVICE[:4], 64, "FT9001"),
        (SERVICE[2:], 64, "FT9001"),
        ((*SERVICE, "--tp", "0"), 64, "FT9001"),
        ((*SERVICE, "--max-num-seqs", "0"), 64, "FT9001"),
        ((*SERVICE, "--precision", "bf99"), 65, "FT2131"),
        ((*SERVICE[:-1], "nobody/nothing"), 65, "FT2133"),
        (("--device", "abacus", *SERVICE[2:]), 65, "FT2132"),
        ((*SERVICE[:2], "--engine", "steam", *SERVICE[4:]), 65, "FT2134"),
        ((*SERVICE[:-1], "meta-llama/Llama-3.1-70B"), 65, "FT2111"),
    ],
)
def test_mistakes_about_a_running_service(command, folder, arguments, exit_code, problem):
    write_lines(folder / "service.jsonl", records(60))
    code, _, err = command("calibrate", "service.jsonl", *arguments)
    assert (code, problem in err) == (exit_code, True), err


def test_interrupting_a_fit_writes_nothing(interrupted, folder):
    write_lines(folder / "service.jsonl", records(3000))
    code, out, _ = interrupted("fitting", "calibrate", "service.jsonl", *SERVICE, "-o", "mine")
    assert (code, out, (folder / "mine").exists()) == (130, "", False)
    rows = measured(1.3)
    slow = [row | {"device": "h200-sxm", "concurrency": str(64 + i)} for row in rows for i in range(45)]
    save(folder / "data.csv", rows + slow)
    # One device is fitted already.
    code, out, _ = interrupted("h200-sxm", "calibrate", "data.csv", "-o", "mine")
    assert (code, out, (folder / "mine").exists()) == (130, "", False)
