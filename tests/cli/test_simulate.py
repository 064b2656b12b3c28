"""``simulate`` from the command line: options, tables, files, pictures, exit codes and Ctrl-C."""

import json
import os
import signal
import struct
import xml.etree.ElementTree as ET

import pytest

from fabrictool.base.errors import UsageError
from fabrictool.cli import simulating
from fabrictool.cli.interrupts import HearingInterrupts, Interrupts
from fabrictool.cli.simulating import stoppable
from fabrictool.cli.simulation_output import terminal_chart
from fabrictool.simulator.deployment import ReplicaEvent
from tests.simulator.fabrics import BLUEPRINT, INVENTORY, WITHOUT_DEMAND

# --- what is printed


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
    (tiny,) = document["models"]
    assert (tiny["model"], tiny["scenario"], tiny["requests"], tiny["finished"]) == ("tiny", None, 200, 200)
    assert (tiny["complete"], tiny["unserved"], tiny["events"]) == (True, 0, [])
    assert len(tiny["utilisation"]) == 2
    assert tiny["rate"] == pytest.approx(0.5, rel=0.2)
    # Two nodes at 0.02 an hour each.
    assert tiny["cost"] == pytest.approx(0.04 * tiny["span_s"] / 3600)
    for metric, (low, high) in tiny["bands"].items():
        assert low < 1 < high, metric


def test_scenarios_are_compared(command, folder):
    code, out, err = command(
        "simulate",
        "-b",
        "blueprint.yaml",
        "--requests",
        200,
        "--scenario",
        "calm",
        "--scenario",
        "rush",
        "-o",
        "out.json",
    )
    assert code == 0, err
    calm, rush = json.loads((folder / "out.json").read_text())["models"]
    assert (calm["scenario"], rush["scenario"]) == ("calm", "rush")
    assert rush["rate"] == pytest.approx(15 * calm["rate"], rel=0.2)
    assert sum(rush["utilisation"]) > sum(calm["utilisation"])
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["calm", "rush"]


def test_a_trace_is_played(command, folder):
    rows = "\n".join(f"{i},30,5" for i in range(40))
    (folder / "trace.csv").write_text(f"t,in,out\n{rows}\nbroken,1,1\n")
    given = ("simulate", "-b", "blueprint.yaml", "--trace", "trace.csv", "--rate", 4, "--requests", 30, "--json")
    code, out, err = command(*given)
    (tiny,) = json.loads(out)["models"]
    assert (code, tiny["requests"]) == (0, 30)
    assert tiny["rate"] == pytest.approx(4.0)
    assert "dropped 1 no time" in err
    assert "10 of 40 requests are not played" in err


def test_a_workload_is_made_up(command):
    """Answers of one token have no time per token."""
    given = ("--workload", "constant,rate=2,input=16,output=1", "--requests", 9, "--json", "--chart")
    code, out, err = command("simulate", "-b", "blueprint.yaml", *given)
    (tiny,) = json.loads(out)["models"]
    assert (code, tiny["requests"], tiny["latency"]["tpot"]["p50"]) == (0, 9, None)
    assert tiny["rate"] == pytest.approx(2.0)
    assert "█" in err


def test_a_chart_of_nothing_is_empty():
    assert terminal_chart([]).splitlines() == ["TTFT", "TPOT", "E2E"]


def test_events_are_told(command, folder):
    """One of two replicas is lost under load, the other would end long after the last answer."""
    given = ("--workload", "constant,rate=3,input=64,output=48", "--requests", 200, "-o", "out.json")
    events = ("--event", "down:tiny/0@20s", "--event", "down:replica/tiny/1@9h")
    code, out, err = command("simulate", "-b", "blueprint.yaml", *given, *events)
    assert code == 0, err
    (half,) = json.loads((folder / "out.json").read_text())["models"]
    assert half["events"] == [
        {"kind": "down", "replica": "tiny/0", "at_s": 20.0, "happened": True},
        {"kind": "down", "replica": "tiny/1", "at_s": 9 * 3600.0, "happened": False},
    ]
    assert half["lost"] > 0
    assert f"{half['finished']}/200" in out
    assert "tiny/0 is lost at 20s" in err
    assert "tiny/1 is lost at 9h: not reached" in err
    assert f"{half['lost']} lost in the middle of an answer" in err


# --- on which placement


def test_a_saved_plan_is_simulated(simulated, command):
    assert command("plan", "-b", "blueprint.yaml", "-o", "plan.json")[0] == 0
    assert simulated("plan.json") == simulated()


def test_a_plan_of_another_fabric_is_refused(command, folder):
    assert command("plan", "-b", "blueprint.yaml", "-o", "plan.json")[0] == 0
    (folder / "inventory.yaml").write_text(INVENTORY.replace("one:", "uno:").replace("two:", "due:"))
    (folder / "blueprint.yaml").write_text(BLUEPRINT.replace("cluster: one", "cluster: uno"))
    code, _, err = command("simulate", "plan.json", "-b", "blueprint.yaml")
    assert (code, "FT2148" in err) == (65, True)


def status_of(*services):
    """One replica runs, one is dead; `services` are what the gateway knows, which none does without any."""
    units = [
        {"address": "gateway/main", "cluster": "one", "state": "running"},
        {"address": "replica/tiny/0", "cluster": "two", "state": "running"},
        {"address": "replica/tiny/1", "cluster": "one", "state": "dead"},
    ]
    gateway = {"nodes": [{"device": "cpu", "services": list(services)}]} if services else None
    return json.dumps({"type": "status", "units": units, "gateway": gateway})


def test_what_runs_is_simulated(simulated, folder):
    (folder / "status.json").write_text(status_of())
    (tiny,) = simulated("--status", "status.json")["models"]
    assert len(tiny["utilisation"]) == 1
    (folder / "status.json").write_text(status_of({"replica": "replica/tiny/0", "tp": 1}))
    assert simulated("--status", "status.json")["models"] == [tiny]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "FT2146"),
        ("[]", "FT2146"),
        ("{}", "FT2146"),
        ('{"units": [1]}', "FT2146"),
        ('{"units": [{"address": "replica/x/0"}]}', "FT2146"),
        ("[" * 99999, "FT2146"),
        (status_of().replace("running", "dead"), "FT2144"),
        (status_of({"replica": "replica/tiny/0", "tp": 9}), "FT2112"),
        (status_of({"replica": "replica/tiny/0", "tp": 1}).replace("cpu", "a100-80g"), "FT2151"),
    ],
)
def test_what_is_no_status_or_cannot_be_simulated(command, folder, text, problem):
    (folder / "status.json").write_text(text)
    code, _, err = command("simulate", "-b", "blueprint.yaml", "--status", "status.json")
    assert (code, problem in err) == (65, True)


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
    (tiny,) = simulated("--chrome-trace", "events.json")["models"]
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
        assert [(event["name"], event["ph"]) for event in track] == [
            ("to first token", "b"), ("to first token", "e"), ("decode", "b"), ("decode", "e")
        ]  # fmt: skip
        begun, first, again, done = (event["ts"] for event in track)
        assert 0 <= begun <= first == again <= done
        assert {event["tid"] for event in track} < {0, 1}
        total += done - begun
    assert total / 200 / 1e6 == pytest.approx(tiny["latency"]["e2e"]["mean"])


def test_a_device_is_written_to_and_never_replaced(simulated, folder):
    (folder / "link").symlink_to(folder / "target")
    simulated("-o", "link")
    assert (folder / "link").is_symlink()
    assert (folder / "target").exists()


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "exit_code", "problem"),
    [
        (["--trace", "t.csv", "--workload", "poisson"], 64, "FT9001"),
        (["plan.json", "--status", "out.json"], 64, "FT9001"),
        (["--calibrations", "."], 65, "FT2120"),
        (["--requests", "0"], 64, "FT9001"),
        (["--requests", "10000001"], 64, "FT9001"),
        (["--workload", "sometimes"], 64, "FT9001"),
        (["--workload", "poisson,models=3"], 65, "FT2153"),
        (["--workload", "poisson,rate=nan"], 65, "FT2202"),
        (["--rate", "nan"], 65, "FT2202"),
        (["--model", "huge"], 65, "FT2143"),
        (["--trace", "no-such.csv"], 1, "FT4302"),
        (["--trace", "blueprint.yaml"], 65, "FT2201"),
        (["--plot", "plot.jpg"], 65, "FT2145"),
        (["-o", "no/such/folder/out.json"], 1, "FT4302"),
        (["--scenario", "panic"], 65, "FT13"),
        (["--event", "down:tiny/7@60s"], 65, "FT2149"),
        (["--event", "melt:tiny/0@60s"], 64, "FT9001"),
        (["--host-cache", "much"], 64, "FT9001"),
        (["blueprint.yaml"], 65, "FT4006"),
        (["--status", "no-such.json"], 1, "FT4302"),
    ],
)
def test_a_mistake_has_a_code(command, arguments, exit_code, problem):
    code, _, err = command("simulate", "-b", "blueprint.yaml", "--requests", 20, *arguments)
    assert problem in err
    assert code == exit_code


@pytest.mark.parametrize(
    "text",
    [
        "melt:tiny/0@60s",
        "down:tiny/0",
        "down@60s",
        "down:tiny@60s",
        "down:tiny/0@60",
        "down:tiny/0@-1s",
        "down:tiny/0@nan",
    ],
)
def test_a_text_that_is_no_event(text):
    with pytest.raises(UsageError) as caught:
        simulating.event(text)
    assert (caught.value.problems[0].code, caught.value.exit_code) == ("FT9001", 64)


def test_events_are_read():
    assert simulating.event("down:tiny/0@60s") == ReplicaEvent("down", "tiny/0", 60.0)
    assert simulating.event("drain: replica/tiny/1 @2m") == ReplicaEvent("drain", "tiny/1", 120.0)


def test_a_model_without_demand(command, folder):
    (folder / "blueprint.yaml").write_text(WITHOUT_DEMAND)
    code, _, err = command("simulate", "-b", "blueprint.yaml")
    assert (code, "no demand is declared" in err, "FT2144" in err) == (65, True, True)


# --- Ctrl-C


def test_interrupting_a_play_shows_what_there_is(interrupted):
    given = ("simulate", "-b", "blueprint.yaml", "--scenario", "calm", "--scenario", "rush", "--json")
    code, out, text = interrupted("tiny: ", *given, "--requests", 3_000_000)
    assert (code, "rush" in text) == (130, True)
    (tiny,) = json.loads(out)["models"]
    assert (tiny["scenario"], tiny["complete"], tiny["unserved"]) == ("calm", False, None)
    assert 0 < tiny["finished"] < 3_000_000


def test_ctrl_c_is_noted_inside_a_command_too():
    """A command has a handler of its own; what that raises, compiled code may drop."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with HearingInterrupts(), Interrupts(at_once=False) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.pressed
            with pytest.raises(KeyboardInterrupt):
                stop.check()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


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


def test_a_narrow_terminal_gets_two_tables(command, monkeypatch):
    given = ("simulate", "-b", "blueprint.yaml", "--requests", 50)
    wide = command(*given)[1].splitlines()
    monkeypatch.setattr("fabrictool.cli.simulation_output.terminal_columns", lambda: 80)
    narrow = command(*given)[1].splitlines()
    assert max(map(len, narrow)) <= 80 < max(map(len, wide))
    assert [line.split()[0] for line in narrow if line.startswith("model")] == ["model", "model"]
    words = {word for line in wide for word in line.split()}
    assert words == {word for line in narrow for word in line.split()}
