"""`simulate`, `trace` and `calibrate` from the command line: what they print, and how they refuse."""

import csv
import gzip
import io
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from fabrictool.cli.main import main
from fabrictool.cli.simulating import Interrupts, stoppable
from fabrictool.cli.simulation_output import terminal_chart
from fabrictool.simulator.calibration import choose, loads, shipped
from fabrictool.simulator.calibration import dumps as calibration_text
from fabrictool.simulator.replay import recorded
from fabrictool.simulator.sheet import case_of
from fabrictool.workload.formats import read
from fabrictool.workload.generate import Recipe, generate
from fabrictool.workload.trace import dumps

INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}, beta: {}}
sites: {a: {provider: alpha}, b: {provider: beta}}
clusters:
  one:
    site: a
    kind: local
    partitions: {cpu: {device: cpu, nodes: 1, memory_per_node: 4GiB, price: 0.02 CHF/h, power: 65 W}}
    software: {engines: {reference: {}}}
  two:
    site: b
    kind: local
    partitions: {cpu: {device: cpu, nodes: 1, memory_per_node: 4GiB, price: 0.02 CHF/h, power: 65 W}}
    software: {engines: {reference: {}}}
"""
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: what-if
inventory: inventory.yaml
models:
  tiny:
    source: file:///nowhere/tiny.gguf
    architecture: HuggingFaceTB/SmolLM2-135M-Instruct
    engine: reference
    variant: {precision: q4_1, context: 2048 tok}
    demand: {rate: 0.5 req/s, input: 64 tok, output: 48 tok}
    slo: {ttft_p95: 5s, tpot_p95: 250ms, attain: 95%}
    replicas: {min: 2, max: 2}
trust: {groups: {all: {allow: [alpha, beta]}}}
gateway: {cluster: one, listen: 127.0.0.1:8011, mesh: 127.0.0.1:8012}
scenarios:
  calm: {models: {tiny: {demand: {rate: 0.1 req/s}}}}
  rush: {models: {tiny: {demand: {rate: 1.5 req/s}}}}
"""
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
FORECAST += ["ttft_lo", "ttft_hi", "tpot_lo", "tpot_hi", "e2e_lo", "e2e_hi", "error"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FABRICTOOL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    (tmp_path / "blueprint.yaml").write_text(BLUEPRINT)
    (tmp_path / "cases.csv").write_text(CASES)
    return tmp_path


@pytest.fixture
def command(capsys):
    """The command line: (exit code, stdout, stderr); no traceback ever."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(one) for one in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert "Traceback" not in out
        return code, out, err

    return run


@pytest.fixture
def simulated(command):
    """The JSON document of ``simulate`` on the blueprint here."""

    def run(*arguments):
        code, out, err = command("simulate", "-b", "blueprint.yaml", "--requests", 200, "--json", *arguments)
        assert code == 0, err
        return json.loads(out)

    return run


def sheet(text):
    return list(csv.DictReader(io.StringIO(text)))


# --- cases


def test_each_row_is_answered_or_has_a_code(command):
    code, out, err = command("simulate", "--cases", "cases.csv")
    assert code == 0
    rows = sheet(out)
    assert [row["error"][:6] for row in rows] == CODES
    assert f"{len(CODES)} cases, {sum(map(bool, CODES))} with an error" in err
    for row in rows:
        figures = [row[name] for name in FORECAST[:-1]]
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
    ("text", "said"),
    [
        (b"device,model\na,b\n", "engine, input_len, output_len, concurrency"),
        (b"", "no column"),
        (b"\xff\xfe\x00", "UTF-8"),
    ],
)
def test_a_sheet_that_is_none(command, folder, text, said):
    (folder / "wrong.csv").write_bytes(text)
    code, _, err = command("simulate", "--cases", "wrong.csv")
    assert code == 65
    assert "FT2130" in err
    assert said in err


def test_mistakes_with_a_sheet(command):
    code, _, err = command("simulate", "--cases", "no-such.csv")
    assert (code, "FT4302" in err) == (1, True)
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


# --- blueprints


def test_the_table_says_what_to_think_of_it(command):
    code, out, err = command("simulate", "-b", "blueprint.yaml", "--requests", 200, "--chart")
    assert code == 0
    assert "TTFT p50" in out.splitlines()[0]
    assert "200/200" in out
    assert "90 % of measurements lie within TTFT" in err
    assert "█" in err


def test_the_same_seed_gives_the_same_bytes(command):
    def once(seed):
        return command("simulate", "-b", "blueprint.yaml", "--requests", 200, "--seed", seed, "--json")[1]

    first = once(4)
    assert once(4) == first
    assert once(5) != first
    assert json.loads(first)["seed"] == 4


def test_what_the_document_holds(simulated, folder):
    document = simulated("-o", "out.json")
    assert json.loads((folder / "out.json").read_text()) == document
    (found,) = document["models"]
    assert (found["model"], found["requests"], found["finished"], found["complete"]) == ("tiny", 200, 200, True)
    assert len(found["utilisation"]) == 2
    assert found["rate"] == pytest.approx(0.5, rel=0.2)
    # Two nodes at 0.02 an hour each.
    assert found["cost"] == pytest.approx(0.04 * found["span_s"] / 3600)
    for metric, (low, high) in found["bands"].items():
        assert low < 1 < high, metric


def test_scenarios_are_compared(simulated, command):
    calm, rush = simulated("--scenario", "calm", "--scenario", "rush")["models"]
    assert (calm["scenario"], rush["scenario"]) == ("calm", "rush")
    assert rush["rate"] == pytest.approx(15 * calm["rate"], rel=0.2)
    assert sum(rush["utilisation"]) > sum(calm["utilisation"])
    _, out, _ = command(
        "simulate", "-b", "blueprint.yaml", "--requests", 50, "--scenario", "calm", "--scenario", "rush"
    )
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["calm", "rush"]


def test_a_trace_is_played(simulated, command, folder):
    rows = "\n".join(f"{i},30,5" for i in range(40))
    (folder / "trace.csv").write_text(f"t,in,out\n{rows}\nbroken,1,1\n")
    (found,) = simulated("--trace", "trace.csv")["models"]
    assert found["requests"] == 40
    assert found["rate"] == pytest.approx(1.0)
    (faster,) = simulated("--trace", "trace.csv", "--rate", 4)["models"]
    assert faster["rate"] == pytest.approx(4.0)
    assert "dropped 1 no time" in command("simulate", "-b", "blueprint.yaml", "--trace", "trace.csv")[2]


def test_a_workload_is_made_up(simulated):
    (found,) = simulated("--workload", "constant,rate=2,input=16,output=4")["models"]
    assert found["rate"] == pytest.approx(2.0)
    assert found["output_tokens_per_s"] == pytest.approx(8.0, rel=0.05)


def test_answers_of_one_token_have_no_time_per_token(simulated, command):
    workload = "constant,rate=2,input=16,output=1"
    (found,) = simulated("--workload", workload)["models"]
    assert found["latency"]["tpot"]["p50"] is None
    code, _, err = command("simulate", "-b", "blueprint.yaml", "--requests", 9, "--workload", workload, "--chart")
    assert code == 0
    assert "█" in err


def test_a_saved_plan_is_simulated(simulated, command):
    assert command("plan", "-b", "blueprint.yaml", "-o", "plan.json")[0] == 0
    assert simulated("plan.json") == simulated()


def test_a_plan_of_another_fabric_is_refused(command, folder):
    assert command("plan", "-b", "blueprint.yaml", "-o", "plan.json")[0] == 0
    (folder / "inventory.yaml").write_text(INVENTORY.replace("one:", "uno:").replace("two:", "due:"))
    (folder / "blueprint.yaml").write_text(BLUEPRINT.replace("cluster: one", "cluster: uno"))
    code, _, err = command("simulate", "plan.json", "-b", "blueprint.yaml")
    assert (code, "FT2148" in err) == (65, True)


def status_of(state="running", nodes=()):
    units = [
        {"address": "gateway/main", "cluster": "one", "state": "running"},
        {"address": "replica/tiny/0", "cluster": "two", "state": state},
        {"address": "replica/tiny/1", "cluster": "one", "state": "dead"},
    ]
    return {"type": "status", "units": units, "gateway": {"nodes": list(nodes)} if nodes else None}


def test_what_runs_is_simulated(simulated, folder):
    (folder / "status.json").write_text(json.dumps(status_of()))
    (found,) = simulated("--status", "status.json")["models"]
    assert len(found["utilisation"]) == 1
    service = {"replica": "replica/tiny/0", "tp": 1}
    (folder / "status.json").write_text(json.dumps(status_of(nodes=[{"device": "cpu", "services": [service]}])))
    assert simulated("--status", "status.json")["models"] == [found]


ACCELERATED = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}, beta: {}}
sites: {a: {provider: alpha}, b: {provider: beta}}
clusters:
  one:
    site: a
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 2, price: 16 USD/h, power: 8 kW}}
    software: {engines: {vllm: {}}}
  two:
    site: b
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 2}}
    software: {engines: {vllm: {}}}
"""
TWO_MODELS = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: two
inventory: inventory.yaml
models:
  llama:
    source: hf://meta-llama/Llama-3.1-8B
    variant: {precision: bf16, context: 8192 tok}
    demand: {rate: 10 req/s, input: 512 tok, output: 128 tok}
    replicas: {min: 1, max: 1}
  big:
    source: hf://meta-llama/Llama-3.3-70B-Instruct
    variant: {precision: bf16, context: 8192 tok}
    demand: {rate: 1 req/s, input: 512 tok, output: 128 tok}
    replicas: {min: 1, max: 1}
"""


@pytest.fixture
def two_models(folder):
    """A fabric with H100s and two models, and a function that writes what of it runs: replica → (cluster, tp)."""
    (folder / "inventory.yaml").write_text(ACCELERATED)
    (folder / "blueprint.yaml").write_text(TWO_MODELS)

    def runs(replicas, device="h100-sxm"):
        units = [
            {"address": f"replica/{name}", "cluster": at, "state": "running"} for name, (at, _) in replicas.items()
        ]
        services = [{"replica": f"replica/{name}", "tp": tp} for name, (_, tp) in replicas.items() if tp]
        status = {"units": units, "gateway": {"nodes": [{"device": device, "services": services}]}}
        (folder / "status.json").write_text(json.dumps(status))

    return runs


@pytest.mark.parametrize(
    ("tp", "device", "said"),
    [
        (1, "h100-sxm", "FT2111"),
        (9, "h100-sxm", "FT2112"),
        (1000, "h100-sxm", "FT2112"),
        (None, "h100-sxm", "FT2151"),
        (4, "a100-80gb", "FT2151"),
    ],
)
def test_what_cannot_run_so_is_refused(command, two_models, tp, device, said):
    two_models({"big/0": ("one", tp)}, device)
    code, _, err = command("simulate", "-b", "blueprint.yaml", "--status", "status.json", "--requests", 20)
    assert (code, said in err) == (65, True), err
    two_models({"big/0": ("one", 4)})
    assert command("simulate", "-b", "blueprint.yaml", "--status", "status.json", "--requests", 20)[0] == 0


def test_replicas_that_trust_excludes_get_nothing(command, two_models, folder):
    two_models({"llama/0": ("one", 1), "llama/1": ("two", 1)})
    run = ("simulate", "-b", "blueprint.yaml", "--status", "status.json", "--requests", 50, "--model", "llama")

    def devices(text):
        (folder / "blueprint.yaml").write_text(text)
        code, out, err = command(*run, "--json")
        assert code == 0, err
        return len(json.loads(out)["models"][0]["utilisation"]), err

    tenants = "trust: {groups: {ours: {allow: [alpha]}, all: {allow: [alpha, beta]}}}\ntenants:\n"
    ours, everyone = "  {}: {{group: ours, key: secret://env/A}}\n", "  {}: {{group: all, key: secret://env/B}}\n"
    assert devices(TWO_MODELS)[0] == 2
    found, err = devices(TWO_MODELS.replace("  big:", "    trust: [beta]\n  big:"))
    assert (found, "llama/0" in err) == (1, True)
    found, err = devices(TWO_MODELS + tenants + ours.format("a") + ours.format("b"))
    assert (found, "llama/1" in err) == (1, True)
    # Whose requests a demand counts is not declared, so several groups exclude nobody.
    found, err = devices(TWO_MODELS + tenants + ours.format("a") + everyone.format("b"))
    assert (found, "ours" in err) == (2, True)
    two_models({"llama/1": ("two", 1)})
    (folder / "blueprint.yaml").write_text(TWO_MODELS + tenants + ours.format("a"))
    code, _, err = command(*run)
    assert (code, "FT2141" in err) == (65, True)


@pytest.mark.usefixtures("two_models")
def test_a_trace_goes_to_the_models_that_it_names(command, folder):
    def run(*arguments):
        code, out, err = command("simulate", "-b", "blueprint.yaml", "--trace", "t.jsonl", "--json", *arguments)
        return code, {one["model"]: one["requests"] for one in json.loads(out)["models"]} if code == 0 else out, err

    def trace(*names):
        rows = [{"t": i, "in": 50, "out": 5} | ({"model": name} if name else {}) for i, name in enumerate(names)]
        lines(folder / "t.jsonl", rows)

    trace("llama", "other", "llama", "llama")
    code, found, err = run()
    assert (code, found) == (0, {"llama": 3})
    assert "big: the trace has no request for it" in err
    assert "1 request for other is not played" in err
    trace("llama", "big", "llama")
    assert run()[1] == {"llama": 2, "big": 1}
    assert run("--model", "big")[1] == {"big": 1}
    # Without names, or with others, it is said which model is meant.
    for names in (("", "", ""), ("gpt", "gpt", "x")):
        trace(*names)
        code, said, err = run()
        assert (code, "FT2153" in said + err, "--model" in said + err) == (65, True, True)
        assert run("--model", "big")[1] == {"big": 3}
        assert run("--model", "big", "--model", "llama")[0] == 65
    made = "poisson,models=3"
    code, _, err = command("simulate", "-b", "blueprint.yaml", "--workload", made, "--requests", 30)
    assert (code, "FT2153" in err) == (65, True)


def test_a_trace_without_names_is_the_only_models(simulated, command, folder):
    lines(folder / "t.jsonl", [{"t": i, "in": 50, "out": 5} for i in range(9)])
    assert [one["requests"] for one in simulated("--trace", "t.jsonl")["models"]] == [9]
    lines(folder / "t.jsonl", [{"t": i, "in": 50, "out": 5, "model": "gpt"} for i in range(9)])
    code, _, err = command("simulate", "-b", "blueprint.yaml", "--trace", "t.jsonl")
    assert (code, "FT2153" in err) == (65, True)


def test_a_trace_is_played_to_its_end_unless_cut(command, folder):
    lines(folder / "t.jsonl", [{"t": i / 100, "in": 5, "out": 1} for i in range(10_050)])
    given = ("simulate", "-b", "blueprint.yaml", "--trace", "t.jsonl", "--json")
    code, out, err = command(*given)
    assert (code, json.loads(out)["models"][0]["requests"], "not played" in err) == (0, 10_050, False)
    code, out, err = command(*given, "--requests", 50)
    assert (code, json.loads(out)["models"][0]["requests"]) == (0, 50)
    assert "10000 of 10050 requests are not played" in err


@pytest.mark.usefixtures("two_models")
def test_a_request_takes_time_for_each_token_of_its_prompt(command, folder):
    """Of two calibrations that differ in nothing else, prompts of 4,000 tokens tell the difference, answers do not."""
    one = choose(shipped(), "h100-sxm", "nvidia", "vllm", "online")
    found = []
    for seconds in (1e-9, 1e-4):
        (folder / f"own{seconds}").mkdir()
        own = replace(one, factors=replace(one.factors, prompt_token=seconds))
        (folder / f"own{seconds}" / "h100.toml").write_text(calibration_text(own))
        workload = "constant,rate=1,input=4000,output=9"
        code, out, err = command("simulate", "-b", "blueprint.yaml", "--model", "llama", "--workload", workload,
                                 "--requests", 20, "--calibrations", f"own{seconds}", "--json")  # fmt: skip
        assert code == 0, err
        found.append(json.loads(out)["models"][0]["latency"])
    fast, slow = found
    assert slow["ttft"]["mean"] - fast["ttft"]["mean"] == pytest.approx(0.4, rel=0.01)
    assert slow["e2e"]["mean"] - fast["e2e"]["mean"] == pytest.approx(0.4, rel=0.01)
    assert slow["tpot"]["mean"] == pytest.approx(fast["tpot"]["mean"])


def test_a_fabric_where_nothing_runs(command, folder):
    (folder / "status.json").write_text(json.dumps(status_of("dead")))
    code, _, err = command("simulate", "-b", "blueprint.yaml", "--status", "status.json")
    assert (code, "FT2144" in err) == (65, True)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"units": [1]}', '{"units": [{"address": "replica/x/0"}]}', "[" * 99999]
)
def test_what_is_no_status(command, folder, text):
    (folder / "status.json").write_text(text)
    code, _, err = command("simulate", "-b", "blueprint.yaml", "--status", "status.json")
    assert (code, "FT2146" in err) == (65, True)


# --- replicas that come and go

CONSTANT = ("--workload", "constant,rate=3,input=64,output=48")


def fates(found):
    return [found[name] for name in ("finished", "refused", "lost", "unserved")]


def test_losing_one_of_two_replicas_costs_and_loses_nothing_silently(simulated, command):
    (whole,) = simulated(*CONSTANT)["models"]
    (half,) = simulated(*CONSTANT, "--event", "down:tiny/0@20s")["models"]
    assert (whole["events"], fates(whole)) == ([], [200, 0, 0, 0])
    assert half["events"] == [{"kind": "down", "replica": "tiny/0", "at_s": 20.0, "happened": True}]
    assert half["latency"]["ttft"]["p95"] > 1.5 * whole["latency"]["ttft"]["p95"]
    # Answers that had begun are lost, and nothing else.
    assert half["lost"] > 0
    assert fates(half) == [200 - half["lost"], 0, half["lost"], 0]
    for found in (whole, half):
        assert found["output_tokens_per_s"] * found["span_s"] == pytest.approx(48 * found["finished"])
        assert found["input_tokens_per_s"] * found["span_s"] == pytest.approx(64 * found["finished"])
    assert half["attainment"] <= half["finished"] / 200
    _, out, err = command("simulate", "-b", "blueprint.yaml", *CONSTANT, "--requests", 200, "--event",
                          "down:tiny/0@20s")  # fmt: skip
    assert f"{half['finished']}/200" in out
    assert "tiny/0 is lost at 20s" in err
    assert f"{half['lost']} were lost in the middle of an answer" in err


def test_an_end_of_walltime_that_drains_first_loses_nothing(simulated):
    (found,) = simulated(*CONSTANT, "--event", "drain:tiny/0@20s", "--event", "down:replica/tiny/0@2m")["models"]
    assert fates(found) == [200, 0, 0, 0]
    assert [one["happened"] for one in found["events"]] == [True, found["span_s"] > 120]
    assert found["utilisation"][0] < found["utilisation"][1] / 2


def test_a_cold_start_keeps_requests_waiting(simulated):
    cold = [text for i in (0, 1) for text in ("--event", f"up:tiny/{i}@10s")]
    warm, late = (
        simulated("--workload", "constant,rate=1,input=16,output=4", *events)["models"][0] for events in ([], cold)
    )
    assert fates(late) == [200, 0, 0, 0]
    # Those of the first ten seconds wait for 10, 9, … 1 seconds; the others do not.
    waited = 200 * (late["latency"]["ttft"]["mean"] - warm["latency"]["ttft"]["mean"])
    assert waited == pytest.approx(55, rel=0.05)


def test_requests_that_nobody_is_left_for_are_counted(simulated):
    gone = [text for i in (0, 1) for text in ("--event", f"drain:tiny/{i}@20s", "--event", f"down:tiny/{i}@50s")]
    (found,) = simulated(*CONSTANT, *gone)["models"]
    assert 0 < found["finished"] < 70
    assert sum(fates(found)) == 200
    late = simulated(*CONSTANT, "--event", "down:tiny/0@9h")["models"][0]
    assert (late["events"][0]["happened"], fates(late)) == (False, [200, 0, 0, 0])


def test_an_event_that_comes_too_late_is_said_to(command):
    _, _, err = command("simulate", "-b", "blueprint.yaml", "--requests", 20, "--event", "down:tiny/0@9h")
    assert "tiny/0 is lost at 9h: not reached" in err


# --- pictures


def test_plots(simulated, folder):
    simulated("--plot", "plot.svg")
    simulated("--plot", "plot.png")
    root = ET.fromstring((folder / "plot.svg").read_text())  # noqa: S314 -- our own file
    assert len(root.findall(".//{*}path")) > 30
    png = (folder / "plot.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert struct.unpack(">II", png[16:24]) == (1100, 700)
    assert len(png) > 20_000


def test_a_chrome_trace(simulated, folder):
    (found,) = simulated("--chrome-trace", "events.json")["models"]
    events = json.loads((folder / "events.json").read_text())["traceEvents"]
    # Requests overlap, which "X" slices of one thread must not: each has an id and a track of its own.
    assert {event["ph"] for event in events} == {"M", "b", "e"}
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"tiny"}
    tracks = {}
    for event in events:
        if event["ph"] != "M":
            tracks.setdefault((event["cat"], event["id"]), []).append(event)
    assert len(tracks) == 200
    total = 0.0
    for track in tracks.values():
        assert [(one["name"], one["ph"]) for one in track] == [
            ("to first token", "b"), ("to first token", "e"), ("decode", "b"), ("decode", "e")
        ]  # fmt: skip
        begun, first, again, done = (one["ts"] for one in track)
        assert 0 <= begun <= first == again <= done
        assert {one["tid"] for one in track} < {0, 1}
        total += done - begun
    assert total / 200 / 1e6 == pytest.approx(found["latency"]["e2e"]["mean"])


def test_a_device_is_written_to_and_never_replaced(simulated, folder):
    (folder / "link").symlink_to(folder / "target")
    simulated("-o", "link")
    assert (folder / "link").is_symlink()
    assert (folder / "target").exists()


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (["--trace", "t.csv", "--workload", "poisson"], 64, "FT9001"),
        (["plan.json", "--status", "s.json"], 64, "FT9001"),
        (["--calibrations", "."], 65, "FT2120"),
        (["--requests", "0"], 64, "FT9001"),
        (["--workload", "sometimes"], 64, "FT9001"),
        (["--workload", "poisson,rate"], 64, "FT9001"),
        (["--workload", "poisson,rate=fast"], 64, "FT9001"),
        (["--workload", "poisson,models=nan"], 64, "FT9001"),
        (["--workload", "poisson,models=-1"], 64, "FT9001"),
        (["--workload", "poisson,models=inf"], 64, "FT9001"),
        (["--workload", "poisson,input=a:b"], 64, "FT9001"),
        (["--workload", "poisson,input=normal:9:9:1:inf"], 64, "FT9001"),
        (["--workload", "poisson,input=normal:9:9:1:nan"], 64, "FT9001"),
        (["--workload", "poisson,input=nan"], 65, "FT2203"),
        (["--workload", "poisson,output=empirical:9"], 65, "FT2203"),
        (["--workload", "poisson,rate=nan"], 65, "FT2202"),
        (["--workload", "gamma,cv=0"], 65, "FT2202"),
        (["--workload", "bursts,on=0"], 65, "FT2202"),
        (["--workload", "poisson,models=3,rate=0"], 65, "FT2202"),
        (["--rate", "nan"], 65, "FT2202"),
        (["--rate", "-1"], 65, "FT2202"),
        (["--rate", "inf"], 65, "FT2202"),
        (["--model", "huge"], 65, "FT2143"),
        (["--trace", "no-such.csv"], 1, "FT4302"),
        (["--trace", "cases.csv"], 65, "FT2201"),
        (["--requests", "10000001"], 64, "FT9001"),
        (["--plot", "plot.jpg"], 65, "FT2145"),
        (["-o", "no/such/folder/out.json"], 1, "FT4302"),
        (["--scenario", "panic"], 65, "FT13"),
        (["--event", "down:tiny/7@60s"], 65, "FT2149"),
        (["--event", "down:huge/0@60s"], 65, "FT2149"),
        (["--event", "down:tiny/0@0s"], 65, "FT2149"),
        (["--event", "down:tiny/0@1s", "--event", "down:tiny/0@2s"], 65, "FT2149"),
        (["--event", "down:tiny/0@1s", "--event", "up:tiny/0@2s"], 65, "FT2149"),
        (["--event", "down:tiny/0@1s", "--event", "drain:tiny/0@2s"], 65, "FT2149"),
        (["--event", "melt:tiny/0@60s"], 64, "FT9001"),
        (["--event", "down:tiny/0"], 64, "FT9001"),
        (["--event", "down@60s"], 64, "FT9001"),
        (["--event", "down:tiny@60s"], 64, "FT9001"),
        (["--event", "down:tiny/0@60"], 64, "FT9001"),
        (["--event", "down:tiny/0@-1s"], 64, "FT9001"),
        (["--event", "down:tiny/0@nan"], 64, "FT9001"),
        (["cases.csv"], 65, "FT4006"),
        (["--status", "no-such.json"], 1, "FT4302"),
    ],
)
def test_a_mistake_has_a_code(command, arguments, exit_code, said):
    code, _, err = command("simulate", "-b", "blueprint.yaml", "--requests", 20, *arguments)
    assert said in err
    assert code == exit_code


def test_a_model_without_demand(command, folder):
    without = "\n".join(line for line in BLUEPRINT.splitlines() if "demand" not in line and "slo" not in line)
    (folder / "blueprint.yaml").write_text(without.split("scenarios")[0] + "\n")
    code, _, err = command("simulate", "-b", "blueprint.yaml")
    assert (code, "no demand is declared" in err, "FT2144" in err) == (65, True, True)
    code, _, err = command("simulate", "-b", "blueprint.yaml", "--model", "tiny")
    assert (code, "FT2142" in err) == (65, True)
    assert command("simulate", "-b", "blueprint.yaml", "--rate", 1, "--requests", 20)[0] == 0


# --- trace


def test_generate_import_export_and_stats(command, folder):
    recipe = "gamma,rate=4,cv=3,input=lognormal:900:700:10:4000,output=200,models=5"
    code, out, _ = command("trace", "generate", recipe, "--requests", 500, "--seed", 2)
    assert code == 0
    assert command("trace", "generate", recipe, "--requests", 500, "--seed", 2, "-o", "made.jsonl")[0] == 0
    assert (folder / "made.jsonl").read_text() == out
    trace = read(out)
    assert len(trace) == 500
    assert set(trace.output.tolist()) == {200}
    assert trace.prompt.min() >= 10

    (folder / "made.jsonl.gz").write_bytes(gzip.compress(out.encode()))
    code, out, _ = command("trace", "stats", "made.jsonl.gz", "--json")
    found = json.loads(out)
    assert (code, found["requests"], next(iter(found["popularity"]))) == (0, 500, "model-0")
    code, out, _ = command("trace", "stats", "made.jsonl")
    assert (code, "500 in" in out, "5: model-0" in out) == (0, True, True)

    code, out, _ = command("trace", "export", "made.jsonl", "--model", "model-1", "--start", 5, "--end", 40)
    piece = read(out)
    assert code == 0
    assert 0 < len(piece) < 500
    assert piece.span <= 35
    assert piece.models == ("model-1",)


def test_import_counts_what_it_drops(command, folder):
    (folder / "azure.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50,x,109\nnever,396,109\n2023-11-16 18:15:51.5,879,55\n"
    )
    code, _, err = command("trace", "import", "azure.csv", "-o", "own.jsonl")
    assert code == 0
    assert "2 requests over 5 s; dropped: 1 no time, 1 no token count" in err
    assert read((folder / "own.jsonl").read_text()).prompt.tolist() == [374, 879]


def clients(folder, count):
    """A ServeGen folder; every third client is broken."""
    for number in range(count):
        rows = "".join(f"{600 * i},0.5,2.0,Gamma,0.25,8.0\n" for i in range(12))
        lengths = {"input_tokens": "{100: 0.5, 300: 0.5}", "output_tokens": "{20: 1.0}"}
        folder.mkdir(exist_ok=True)
        (folder / f"chunk-{number}-trace.csv").write_text("broken\n" if number % 3 == 2 else rows)
        (folder / f"chunk-{number}-dataset.json").write_text(json.dumps({"0": lengths}))


def test_clients_of_a_folder_are_drawn_from(command, folder):
    clients(folder / "servegen", 9)
    code, _, err = command("trace", "import", "servegen", "-o", "drawn.jsonl", "--seed", 6)
    assert code == 0
    assert "dropped: 3 clients with a broken trace" in err
    text = (folder / "drawn.jsonl").read_text()
    assert command("trace", "import", "servegen", "--seed", 6)[1] == text
    assert command("trace", "import", "servegen", "--seed", 7)[1] != text
    # Six clients with 0.5 req/s for two hours; three standard deviations of a cv of 2.
    assert len(read(text)) == pytest.approx(21600, abs=3 * 2 * 21600**0.5)
    hour = read(command("trace", "import", "servegen", "--hours", "0.5:1.5", "--rate", 1)[1])
    assert len(hour) == pytest.approx(3600, rel=0.1)
    assert hour.span < 3600


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (["servegen", "--hours", "2"], 64, "FT9001"),
        (["servegen", "--hours", "2:1"], 64, "FT9001"),
        (["servegen", "--hours", "nan:1"], 64, "FT9001"),
        (["servegen", "--hours", "0:inf"], 64, "FT9001"),
        (["servegen", "--hours", "a:b"], 64, "FT9001"),
        (["servegen", "--hours", "9:10"], 65, "FT2204"),
        (["servegen", "--rate", "nan"], 65, "FT2202"),
        (["servegen", "--rate", "1e6"], 65, "FT2204"),
        (["servegen", "--seed", "-1"], 64, "FT9001"),
        (["empty"], 65, "FT2204"),
        (["cases.csv", "--hours", "1:2"], 64, "FT9001"),
    ],
)
def test_mistakes_with_a_folder_of_clients(command, folder, arguments, exit_code, said):
    clients(folder / "servegen", 2)
    (folder / "empty").mkdir()
    code, _, err = command("trace", "import", *arguments)
    assert (code, said in err) == (exit_code, True), err


@pytest.mark.parametrize(
    ("content", "exit_code", "said"),
    [
        (b"\x1f\x8bgarbage", 1, "FT4302"),
        (gzip.compress(b"t,in,out\n" * 99)[:-12], 1, "FT4302"),
        (gzip.compress(b"t,in,out\n")[:10] + b"\xff\xff\xff\xff\xff\xff\xff\xff", 1, "FT4302"),
        (b"\xff\xfe\x00\x01", 65, "FT2201"),
        (b"", 65, "FT2201"),
    ],
)
def test_a_file_that_is_no_trace(command, folder, content, exit_code, said):
    (folder / "trace").write_bytes(content)
    for verb in ("import", "stats", "export"):
        code, _, err = command("trace", verb, "trace")
        assert (code, said in err) == (exit_code, True), err


def test_a_piece_with_nothing_in_it(command, folder):
    (folder / "t.csv").write_text("t,in,out\n0,1,1\n1,1,1\n")
    for piece in (["--model", "nobody"], ["--start", "9"], ["--end", "-1"], ["--end", "nan"]):
        code, _, err = command("trace", "export", "t.csv", *piece)
        assert (code, "FT2201" in err) == (65, True), piece


# --- calibrate


def measured(command, folder, factor):
    """Forecasts of some cases, `factor` slower, as if they had been measured."""
    lines = ["device,model,engine,input_len,output_len,concurrency,mode"]
    lines += [
        f"h100-sxm,meta-llama/Llama-3.1-8B,vllm,{inputs},32,{concurrency},batch"
        for inputs in (128, 512)
        for concurrency in (1, 8, 32)
    ]
    (folder / "grid.csv").write_text("\n".join(lines) + "\n")
    assert command("simulate", "--cases", "grid.csv", "-o", "forecast.csv")[0] == 0
    rows = sheet((folder / "forecast.csv").read_text())
    for row in rows:
        for metric in ("ttft_ms", "tpot_ms", "e2e_ms"):
            row[metric] = str(factor * float(row[metric]))
    return rows


def save(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_own_measurements_make_forecasts_better(command, folder):
    rows = measured(command, folder, 1.3)
    unusable = [
        rows[0] | {"device": "abacus"},
        rows[0] | {"ttft_ms": "nan", "tpot_ms": "-1", "e2e_ms": "x"},
        rows[0] | {"error": "FT2111: does not fit"},
        rows[0] | {"input_len": ""},
    ]
    save(folder / 'my "data".csv', rows + unusable)
    code, out, err = command("calibrate", 'my "data".csv', "-o", "mine", "--json")
    assert code == 0
    for line in ("row 8: FT2132", "row 9: FT2147", "row 10: FT2111", "row 11: FT2131"):
        assert line in err
    document = json.loads(out)
    assert document["unusable_rows"] == 4
    (one,) = document["calibrations"]
    assert (one["device"], one["engine"], one["scope"], one["measurements"]) == ("h100-sxm", "vllm", "static", 6)
    assert one["error_before"] == pytest.approx(1 - 1 / 1.3, abs=0.01)
    assert one["error_after"] < one["error_before"] / 2

    assert command("simulate", "--cases", "grid.csv", "-o", "better.csv", "--calibrations", "mine")[0] == 0
    for row, better in zip(rows, sheet((folder / "better.csv").read_text()), strict=True):
        assert float(better["e2e_ms"]) == pytest.approx(float(row["e2e_ms"]), rel=0.15)


def test_measurements_that_are_none(command, folder):
    rows = measured(command, folder, 1.0)
    save(folder / "none.csv", [row | dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms"), "") for row in rows])
    code, _, err = command("calibrate", "none.csv")
    assert (code, "FT2147" in err) == (65, True)
    save(folder / "few.csv", rows[:3])
    code, _, err = command("calibrate", "few.csv", "-o", "few")
    assert (code, "3 measurements are too few" in err) == (65, True)
    assert not (folder / "few").exists()


@pytest.mark.parametrize(
    ("content", "exit_code", "said"), [(b"a,b\n1,2\n", 65, "FT2130"), (b"\xff", 65, "FT2130"), (None, 1, "FT4302")]
)
def test_a_file_that_is_no_sheet_of_measurements(command, folder, content, exit_code, said):
    if content is not None:
        (folder / "data.csv").write_bytes(content)
    code, _, err = command("calibrate", "data.csv")
    assert (code, said in err) == (exit_code, True)


# --- calibrate, from records of requests

SERVICE = ("--device", "h100-sxm", "--engine", "vllm", "--model", "meta-llama/Llama-3.1-8B")


def records(count=300):
    """What a service that is much slower per step than others would have recorded."""
    sheet_row = {"device": "h100-sxm", "model": SERVICE[-1], "engine": "vllm"}
    case = case_of(sheet_row | dict.fromkeys(("input_len", "output_len", "concurrency"), "1"))
    factors = choose(shipped(), "h100-sxm", "nvidia", "vllm", "online").factors
    slow = replace(factors, step=2 * factors.step, layer=2 * factors.layer, bandwidth=0.75 * factors.bandwidth)
    trace = generate(Recipe(8.0), count, 1)
    found = recorded(case, trace).play(slow)
    return [json.loads(line) for line in dumps(replace(trace, ttft=found["ttft"], latency=found["e2e"]))]


def lines(path, rows):
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
    lines(folder / "service.jsonl", rows)
    code, out, err = command("calibrate", "service.jsonl", *SERVICE, "-o", "mine", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["dropped"] == {
        "no ttft and latency to compare with": 4, "no token count": 1, "no time": 1, "not an object": 1
    }  # fmt: skip
    assert document["overloaded"] == 0
    (one,) = document["calibrations"]
    assert (one["device"], one["engine"], one["scope"], one["measurements"]) == ("h100-sxm", "vllm", "online", 293)
    assert one["error_before"] > 0.25
    assert one["error_after"] < 0.05
    assert "293 of 300 requests" in err

    # The file is what `--calibrations` takes, with a band and the range that was seen.
    written = loads((folder / "mine" / "h100-sxm-vllm-online.toml").read_text())
    assert (written.points, written.source) == (293, "calibrate service.jsonl")
    assert all(-0.2 < spread.low <= spread.high < 0.2 for spread in written.spreads.values())
    row = "h100-sxm,meta-llama/Llama-3.1-8B,vllm,512,128,8\n"
    (folder / "one.csv").write_text("device,model,engine,input_len,output_len,concurrency\n" + row)
    (before,), (after,) = (
        sheet(command("simulate", "--cases", "one.csv", *own)[1]) for own in ((), ("--calibrations", "mine"))
    )
    assert float(after["tpot_ms"]) == pytest.approx(float(before["tpot_ms"]) * 1.6, rel=0.15)


def test_records_that_cannot_be_true_are_dropped_and_counted(command, folder):
    rows = records(100)
    rows[3] |= {"in": 9_000_000}
    rows[5] |= {"latency": 1e11}
    rows[7] |= {"ttft": 1e-300}
    lines(folder / "some.jsonl", rows)
    code, out, err = command("calibrate", "some.jsonl", *SERVICE, "-o", "mine", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["dropped"] == {"longer than the cache of the replica": 1, "an absurd ttft or latency": 2}
    assert document["calibrations"][0]["measurements"] == 97
    assert document["calibrations"][0]["error_after"] < 0.1
    for name, spoilt in (("big", {"in": 9_000_000}), ("late", {"latency": 1e11}), ("soon", {"ttft": 1e-300})):
        lines(folder / f"{name}.jsonl", [row | spoilt for row in rows])
        code, _, err = command("calibrate", f"{name}.jsonl", *SERVICE, "-o", name)
        assert (code, "FT2150" in err, (folder / name).exists()) == (65, True, False), err


def test_a_fit_that_explains_nothing_is_not_written(command, folder):
    """A tenth of a token a second: nothing that a replica of this device could be."""
    rows = records(60)
    for i, row in enumerate(rows):
        row |= {"t": 1e5 * i, "ttft": 1e-5, "latency": 40_000.0 if i % 2 else 1e-4}
    lines(folder / "wild.jsonl", rows)
    code, _, err = command("calibrate", "wild.jsonl", *SERVICE, "-o", "mine")
    assert (code, "FT2152" in err, (folder / "mine").exists()) == (65, True, False), err
    rows = measured(command, folder, 1.0)
    wild = [row | {"e2e_ms": "" if i % 2 else "1e12", "tpot_ms": "1e-9", "ttft_ms": ""} for i, row in enumerate(rows)]
    save(folder / "wild.csv", wild)
    code, _, err = command("calibrate", "wild.csv", "-o", "mine")
    assert (code, "FT2152" in err, (folder / "mine").exists()) == (65, True, False), err


def test_an_overloaded_service_is_no_measure(command, folder):
    rows = records(400)
    lines(folder / "over.jsonl", [row | {"ttft": 0.3 * i, "latency": 0.3 * i + 1} for i, row in enumerate(rows)])
    code, _, err = command("calibrate", "over.jsonl", *SERVICE)
    assert (code, "FT2150" in err, "came while it did not keep up" in err) == (65, True, True)


def test_records_that_are_none(command, folder):
    rows = records(100)
    lines(folder / "all-bad.jsonl", [row | {"latency": -1} for row in rows])
    lines(folder / "few.jsonl", rows[:20])
    lines(folder / "several.jsonl", [row | {"model": "ab"[i % 2]} for i, row in enumerate(rows)])
    lines(folder / "no-trace.jsonl", [{"latency": 1}])
    for name, said in (("all-bad", "FT2150"), ("few", "FT2150"), ("several", "FT2150"), ("no-trace", "FT2201")):
        code, _, err = command("calibrate", f"{name}.jsonl", *SERVICE, "-o", "mine")
        assert (code, said in err) == (65, True), err
    assert not (folder / "mine").exists()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
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
def test_mistakes_about_a_running_service(command, folder, arguments, exit_code, said):
    lines(folder / "service.jsonl", records(60))
    code, _, err = command("calibrate", "service.jsonl", *arguments)
    assert (code, said in err) == (exit_code, True), err


def test_a_chart_of_nothing_is_empty():
    assert terminal_chart([]).splitlines() == ["TTFT", "TPOT", "E2E"]


# --- Ctrl-C


def interrupted(said, *arguments):
    """Runs the command on a terminal, sends SIGINT when `said` stands there: (exit code, stdout, the terminal)."""
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fabrictool.cli.main", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    text = ""
    try:
        while True:
            before = said in text
            try:
                text += os.read(terminal, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                break
            if said in text and not before:
                process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=60)[0].decode()
    finally:
        process.kill()
        os.close(terminal)
    assert said in text
    assert "Traceback" not in text
    return process.returncode, out, text


def test_interrupting_a_sheet_writes_nothing(folder):
    lines_ = CASES.splitlines()
    rows = [lines_[1].replace(",8,agg", f",{100 + i},agg") for i in range(3000)]
    (folder / "many.csv").write_text("\n".join([lines_[0], *rows]) + "\n")
    code, out, _ = interrupted("cases: ", "simulate", "--cases", "many.csv", "-o", "out.csv")
    assert (code, out, (folder / "out.csv").exists()) == (130, "", False)


def test_interrupting_a_fit_writes_nothing(command, folder):
    lines(folder / "service.jsonl", records(3000))
    code, out, _ = interrupted("fitting", "calibrate", "service.jsonl", *SERVICE, "-o", "mine")
    assert (code, out, (folder / "mine").exists()) == (130, "", False)
    rows = measured(command, folder, 1.3)
    slow = [row | {"device": "h200-sxm", "concurrency": str(64 + i)} for row in rows for i in range(30)]
    save(folder / "data.csv", rows + slow)
    # One device is fitted already.
    code, out, _ = interrupted("h200-sxm", "calibrate", "data.csv", "-o", "mine")
    assert (code, out, (folder / "mine").exists()) == (130, "", False)


def test_interrupting_a_play_shows_what_there_is():
    given = ("simulate", "-b", "blueprint.yaml", "--scenario", "calm", "--scenario", "rush", "--json")
    code, out, text = interrupted("tiny: ", *given, "--requests", 300_000)
    assert (code, "rush" in text) == (130, True)
    (found,) = json.loads(out)["models"]
    assert (found["scenario"], found["complete"], found["unserved"]) == ("calm", False, None)
    assert 0 < found["finished"] < 300_000


def test_ctrl_c_is_raised_where_it_cannot_be_lost():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    told = []
    try:
        with Interrupts(at_once=False) as stop:
            tell = stoppable(lambda *given: told.append(given), stop)
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.pressed
            tell(9, 9)  # all is over: nothing is interrupted
            with pytest.raises(KeyboardInterrupt):
                tell(5, 9)
            tell(5, 9)
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):  # who presses twice does not want to wait
                os.kill(os.getpid(), signal.SIGINT)
        assert told == [(9, 9), (5, 9), (5, 9)]
        with Interrupts(at_once=True) as stop:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            # Had it been dropped on its way, the next look would raise it.
            with pytest.raises(KeyboardInterrupt):
                stop.check()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with Interrupts(at_once=True) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.pressed
    finally:
        signal.signal(signal.SIGINT, before)
