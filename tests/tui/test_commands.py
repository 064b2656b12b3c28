"""Commands that `top` shows: the command line knows them, and names that others chose run nothing."""

import shlex
import subprocess

import msgspec
import pytest
import typer

from fabrictool.cli.commands import build
from fabrictool.domain.address import Address
from fabrictool.status.sightings import OperatorView, Sighting, UnitView
from fabrictool.tui.details import lines_about, subject_of
from fabrictool.tui.history import History
from fabrictool.tui.tables import TABLES
from fabrictool.tui.view import ScreenView
from tests.status_views import fleet
from tests.tui.test_questions import ALIKE, SLOW, USUAL
from tests.tui.test_top import NOW, OPERATOR, gateway, node

HOSTILE = "x;touch owned $(touch owned) `touch owned` '\"&|"


def shown(view):
    """Every command of every row, and of what stands behind it."""
    for spec in TABLES:
        for row in spec.rows(view):
            yield from subject_of(view, spec.name, row.key).commands
    yield from (trouble.command for trouble in view.troubles)


def views():
    bare = msgspec.structs.replace(node("n9", "c", "p", connected=False), services=[])
    ending = node("n5", "clariden", "cscs", replica="qwen/3", ends_at=NOW + 300, certificate_ends_at=NOW + 60)
    models = [msgspec.structs.replace(gateway().models[0], missing=["llama/7", "llama/1"], failures=5)]
    live = gateway(nodes=[*gateway().nodes, bare, ending, SLOW, USUAL, ALIKE], models=models)
    odd = UnitView(address="what is this", cluster="c", state="failed")
    operator = msgspec.structs.replace(OPERATOR, units=[*OPERATOR.units, odd], unknown={"clariden": "no way there"})
    history = History()
    for number in range(12):
        flapping = [msgspec.structs.replace(each, connected=number % 2 == 0) for each in (*gateway().nodes, bare)]
        history.add(Sighting(at=NOW, live=gateway(at=NOW - 12 + number, nodes=flapping)))
    yield ScreenView(Sighting(at=NOW, live=live, operator=operator), NOW, history)
    yield ScreenView(Sighting(at=NOW, live=fleet()), NOW)


def test_every_command_is_one_that_the_command_line_takes():
    commands = {command for view in views() for command in shown(view)}
    assert {"fabrictool logs replica/qwen/2", "fabrictool mesh members", "fabrictool doctor clariden"} <= commands
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "fabrictool"
        group = typer.main.get_command(build())
        context = group.make_context(program, list(words), resilient_parsing=True)
        name, inner, rest = group.resolve_command(context, words)
        while hasattr(inner, "resolve_command"):
            context = inner.make_context(name, list(rest), parent=context, resilient_parsing=True)
            name, inner, rest = inner.resolve_command(context, rest)
        context = inner.make_context(name, list(rest), parent=context)  # raises where it takes no such words
        if name == "logs":
            assert Address.parse(context.params["unit"]).kind != "damaged", command


def test_flapping_replicas_have_logs_and_nodes_have_members():
    view = next(views())
    flapping = {trouble.subject: trouble.command for trouble in view.troubles if trouble.what == "flapping"}
    assert flapping["llama/0"] == "fabrictool logs replica/llama/0"
    assert flapping["n9"] == "fabrictool mesh members"


def test_names_that_others_chose_run_nothing(tmp_path):
    sick = node(HOSTILE, HOSTILE, HOSTILE, connected=False, replica=f"{HOSTILE}/0")
    models = [msgspec.structs.replace(gateway().models[0], model=HOSTILE, missing=[f"{HOSTILE}/1"])]
    operator = OperatorView(
        at=NOW,
        units=[UnitView(address=f"replica/{HOSTILE}/{n}", cluster=HOSTILE, state="failed") for n in (0, 1, 2)],
        unknown={HOSTILE: HOSTILE},
        drift=[HOSTILE],
    )
    view = ScreenView(Sighting(at=NOW, live=gateway(nodes=[sick], models=models), operator=operator), NOW)
    commands = list(shown(view))
    assert any("touch owned" in command for command in commands)
    script = "fabrictool() { :; }\n" + "\n".join(commands)
    subprocess.run(["/bin/sh", "-e", "-c", script], cwd=tmp_path, check=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [2, 3, 4])
def test_a_slow_replica_is_told_by_the_others_however_few(number):
    nodes = [SLOW, USUAL, ALIKE, msgspec.structs.replace(ALIKE, session="n8", node="n8")][:number]
    view = ScreenView(Sighting(at=NOW, live=gateway(nodes=nodes)), NOW)
    (slow,) = [trouble for trouble in view.troubles if trouble.what == "slow"]
    assert slow.subject == "qwen/2"
    assert "others take 300 ms" in slow.why
    alone = ScreenView(Sighting(at=NOW, live=gateway(nodes=[SLOW])), NOW)
    assert not [trouble for trouble in alone.troubles if trouble.what == "slow"]


def test_rows_keep_their_keys_when_others_come():
    def keys(view, screen):
        (spec,) = (spec for spec in TABLES if spec.name == screen)
        return [row.key for row in spec.rows(view)]

    before = ScreenView(Sighting(at=NOW, live=gateway(), operator=OPERATOR), NOW)
    journal = [*OPERATOR.journal, msgspec.structs.replace(OPERATOR.journal[-1], at=NOW, text="newer")]
    drift = ["gateway/main does not run yet", *OPERATOR.drift]
    more = msgspec.structs.replace(OPERATOR, journal=journal, drift=drift, unknown={"alps": "no way there"})
    after = ScreenView(Sighting(at=NOW, live=gateway(), operator=more), NOW)
    for screen in ("overview", "events", "plan"):
        assert set(keys(before, screen)) <= set(keys(after, screen)), screen
        assert len(set(keys(after, screen))) == len(keys(after, screen))
    for trouble in before.troubles:
        assert subject_of(after, "overview", trouble.key).name == trouble.subject
    assert subject_of(after, "overview", "gone\x1flost").commands == ()
    event = subject_of(after, "events", keys(after, "events")[0])
    assert event.name == "replica/qwen/1"
    assert lines_about(after, event)


@pytest.mark.parametrize("seconds", [1000, 5000])
def test_a_history_forgets_names_that_are_gone(seconds):
    history = History()
    history.add(Sighting(at=NOW, live=gateway()))
    live = gateway(at=NOW + seconds, nodes=[node("new", "c", "p", replica="new/0")], models=gateway().models[:1])
    history.add(Sighting(at=NOW + seconds, live=live))
    assert set(history._changes) == {"new/0"}
    assert set(history._counts) == {"", "llama"}
