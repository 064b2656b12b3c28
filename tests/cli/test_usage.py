"""``usage`` on real stores: what it sums up, in three forms, and what it says of mistakes."""

import csv
import io
import json

import msgspec
import pytest

from fabrictool.gateway.keeping import RECORDS_FILE, records_folder
from fabrictool.gateway.records import RequestRecord
from fabrictool.gateway.store import RecordStore
from tests.gateway.conftest import postgres  # noqa: F401 - a fixture
from tests.gateway.rows import put

DAY = 1_763_769_600.0
"""2025-11-22, 0:00 UTC."""


def fill(store):
    names = {"fabric": "f", "gateway": "main"}

    def row(number, tenant, model, at, **more):
        fields = {"status": 200, "end": "answered", "e2e_s": 2.0} | more
        record = RequestRecord(f"r{number}", at, "/v1/completions", tenant=tenant, model=model, key="00", **fields)
        return msgspec.structs.asdict(record) | names | {"hour": int(at // 3600)}

    counted = {"prompt_tokens": 100, "completion_tokens": 7, "cached_tokens": 64, "counted": True}
    put(
        store,
        [
            row(1, "anna", "m", DAY + 10, provider="alpha", **counted),
            row(2, "anna", "m", DAY + 3700, provider="beta", ttft_s=0.5, stream=True, **counted),
            row(3, "ben", "n", DAY + 20, provider="alpha", **counted),
            row(4, "ben", "m", DAY + 30, status=503, end="refused"),
            row(5, "ben", "m", DAY + 90000, provider="alpha", end="broken", completion_tokens=3),
        ],
    )
    store.close()


@pytest.fixture
def file(tmp_path):
    fill(RecordStore(str(tmp_path / "r.db")))
    return tmp_path / "r.db"


SINCE = ("--since", "2025-11-01")


def rows(command, *arguments):
    code, out, err = command("usage", *arguments, *SINCE, "--json")
    assert code == 0, err
    return json.loads(out)["rows"]


def test_sums_by_what_is_asked_for(command, file):
    assert [(r["tenant"], r["model"], r["requests"], r["failed"], r["prompt_tokens"]) for r in rows(command, file)] == [
        ("anna", "m", 2, 0, 200),
        ("ben", "m", 2, 2, 0),
        ("ben", "n", 1, 0, 100),
    ]
    hours = rows(command, file, "--by", "hour,provider", "--tenant", "anna")
    assert [(r["hour"], r["provider"], r["ttft_s"]) for r in hours] == [
        ("2025-11-22T00:00Z", "alpha", None),
        ("2025-11-22T01:00Z", "beta", 0.5),
    ]
    days = rows(command, file, "--by", "day")
    assert [(r["day"], r["requests"], r["completion_tokens"]) for r in days] == [
        ("2025-11-22", 4, 21),
        ("2025-11-23", 1, 3),
    ]
    assert [r["requests"] for r in rows(command, file, "--by", "key", "--until", "2025-11-23")] == [4]
    assert [r["requests"] for r in rows(command, file, "--by", "")] == [5]


def test_a_table_and_csv(command, file):
    code, out, err = command("usage", file, *SINCE)
    assert code == 0
    assert out.splitlines()[0].split() == [
        "TENANT",
        "MODEL",
        "REQUESTS",
        "FAILED",
        "PROMPT",
        "CACHED",
        "COMPLETION",
        "E2E",
        "TTFT",
    ]
    assert out.splitlines()[1].split() == ["anna", "m", "2", "0", "200", "128", "14", "2.00", "s", "0.50", "s"]
    assert "1 answers broke off" in err
    _, out, _ = command("usage", file, *SINCE, "--csv")
    table = list(csv.DictReader(io.StringIO(out)))
    assert [line["completion_tokens"] for line in table] == ["14", "3", "7"]
    code, _, err = command("usage", file, "--since", "2020-01-01", "--until", "2020-01-02")
    assert code == 0
    assert "no requests" in err


def test_the_same_of_postgresql_by_a_reference(command, file, postgres, monkeypatch):  # noqa: F811
    fill(RecordStore(postgres.url))
    monkeypatch.setenv("RECORDS", postgres.url)
    for by in ("tenant,model,provider,key", "hour", "day", ""):
        assert rows(command, "secret://env/RECORDS", "--by", by) == rows(command, file, "--by", by)


def test_a_blueprint_leads_to_its_gateways_file(command, folder):
    place = records_folder(folder / "state" / "what-if" / "clusters" / "one", "what-if", "main")
    place.mkdir(parents=True)
    fill(RecordStore(str(place / RECORDS_FILE)))
    assert [r["requests"] for r in rows(command, "--by", "gateway", "-b", folder / "blueprint.yaml")] == [5]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nowhere.db"], 1, "FT8120"),
        (["blueprint.yaml"], 65, "FT8122"),
        (["secret://env/NOWHERE"], 1, "FT1401"),
        (["secret://env/BAD"], 65, "FT8121"),
        (["secret://what"], 64, "FT9001"),
        (["x", "--by", "colour"], 64, "FT9001"),
        (["x", "--since", "yesterday"], 64, "FT9001"),
        (["x", "--csv", "--json"], 64, "FT9001"),
        (["--gateway", "other"], 64, "FT9001"),
        ([], 1, "FT8120"),
    ],
)
def test_mistakes(command, monkeypatch, arguments, code, said):
    monkeypatch.setenv("BAD", "mysql://anna:hunter2@example/db")
    ended, out, err = command("usage", *arguments)
    assert (ended, said in err + out) == (code, True)
    assert "hunter2" not in err + out
