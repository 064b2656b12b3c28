"""Stores of records where traces can stand: ``trace profile``, ``stats``, ``export`` and ``calibrate``."""

import json

import msgspec
import pytest
import yaml

from fabrictool.domain.blueprint import Demand
from fabrictool.gateway.records import RequestRecord
from fabrictool.gateway.store import RecordStore
from tests.cli.test_calibrate import SERVICE, records, write_lines
from tests.gateway.rows import put

BEGIN = 1_763_769_600.0
"""2025-11-22, 0:00 UTC."""
SINCE = ("--since", "2025-11-01")


def fill(path, rows):
    store = RecordStore(str(path))
    put(
        store,
        [
            {"fabric": "f", "gateway": "g", "hour": int(record.at // 3600)} | msgspec.structs.asdict(record)
            for record in rows
        ],
    )
    store.close()


def record(number, at, **about):
    fields = {
        "status": 200,
        "end": "answered",
        "e2e_s": 2.0,
        "model": "org/m",
        "prompt_tokens": 320,
        "completion_tokens": 20,
    }
    return RequestRecord(f"r{number}", BEGIN + at, "/v1/completions", tenant="anna", **fields | about)


@pytest.fixture
def file(folder):
    follows = [{} if n == 0 else {"prefix_of": f"r{n - 1}", "prefix_tokens": 160} for n in range(100)]
    rows = [record(n, 10.0 * n, cached_tokens=80, **follows[n]) for n in range(100)]
    fill(folder / "r.db", [*rows, record("x", 5.0, model="small"), record("y", 6.0, status=502, end="refused")])
    return "r.db"


def test_a_profile_says_what_users_ask_of_each_model(command, file):
    code, out, err = command("trace", "profile", file, *SINCE)
    assert code == 0, err
    head, first, second = out.splitlines()
    assert head.split()[:3] == ["MODEL", "REQUESTS", "RATE"]
    assert first.split() == [
        "org/m", "100", "0.1/s", "0.1/s", "at", "2025-11-22T00:00Z", "0", "320/320/320", "20/20/20", "50%", "25%",
    ]  # fmt: skip
    assert second.split()[:2] == ["small", "1"]
    code, out, _ = command("trace", "profile", file, *SINCE, "--model", "org/m", "--json")
    (model,) = json.loads(out)["models"]
    assert model["repeated_share"] == pytest.approx(99 * 160 / 32000)
    assert (model["requests"], model["first"], model["last"]) == (100, "2025-11-22T00:00:00Z", "2025-11-22T00:16:30Z")


def test_its_yaml_is_a_demand_that_a_blueprint_takes(command, file):
    code, out, err = command("trace", "profile", file, *SINCE, "--model", "org/m", "--yaml")
    assert code == 0, err
    demand = Demand.model_validate(yaml.safe_load(out)["models"]["org/m"]["demand"])
    assert (float(demand.rate), demand.input.mean, demand.output.max, demand.cv) == (0.1, 320, 20, 0.03)


def test_what_may_be_shown_to_others_names_nobody(command, file, folder):
    code, _, err = command("trace", "export", file, *SINCE, "--anonymous", "-o", "t.jsonl")
    assert code == 0
    assert "1 failed requests" in err
    text = (folder / "t.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(rows) == 101
    assert {name for row in rows for name in row} == {"t", "in", "out", "model", "latency", "prefix", "block"}
    assert [row["model"] for row in rows[:3]] == ["model-1", "model-2", "model-1"]
    assert "anna" not in text
    assert "org" not in text
    code, out, _ = command("trace", "stats", "t.jsonl", "--json")
    of_trace = json.loads(out)
    code, out, _ = command("trace", "stats", file, "--json")
    of_store = json.loads(out)
    assert of_trace["prefix_reuse"] == of_store["prefix_reuse"] == pytest.approx(99 * 160 / (101 * 320), rel=1e-3)


def test_a_replica_s_records_calibrate_as_their_lines_do(command, folder):
    lines = records()
    write_lines(folder / "r.jsonl", lines)
    its = {"replica": "m/0", "stream": True, "model": "llama"}
    fill(folder / "r.db", [
        record(
            n, row["t"], prompt_tokens=row["in"], completion_tokens=row["out"], ttft_s=row["ttft"],
            e2e_s=row["latency"], **its
        )
        for n, row in enumerate(lines)
    ])  # fmt: skip
    errors = []
    for source, more in (("r.jsonl", ()), ("r.db", ("--replica", "m/0"))):
        code, out, err = command("calibrate", source, *SERVICE, *more, "-o", "mine", "--json")
        assert code == 0, err
        (fitted,) = json.loads(out)["calibrations"]
        assert (fitted["measurements"], fitted["error_after"] < 0.05) == (300, True)
        errors.append(fitted["error_before"])
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)  # times since 1970 have fewer digits
    fill(folder / "r.db", [record("z", 7.0, replica="m/1", model="llama")])
    code, _, err = command("calibrate", "r.db", *SERVICE, "-o", "mine")
    assert code == 65
    assert "2 replicas answered" in err
    assert "--replica: m/0, m/1" in err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("profile", "none.db"), 1, "none.db"),
        (("profile", "t.jsonl"), 64, "no store of records"),
        (("profile", "r.db", "--since", "2025-12-01"), 65, "since 2025-12-01"),
        (("profile", "r.db", "--since", "soon"), 64, "neither a day nor a duration"),
        (("profile", "r.db", "--yaml", "--json"), 64, "exclude each other"),
        (("profile", "secret://env/NOT_SET"), 1, "NOT_SET is not set"),
        (("stats", "t.jsonl", "--since", "7d"), 64, "no day"),
        (("export", "r.db", "--model", "nobody"), 65, "no usable row"),
    ],
)
@pytest.mark.usefixtures("file")
def test_mistakes_are_explained(command, folder, words, code, said):
    (folder / "t.jsonl").write_text('{"t":0,"in":5,"out":5}\n')
    got, out, err = command("trace", *words)
    assert (got, said in out + err) == (code, True), err
