"""The operator's own keys: read with a place for each mistake, in force on every screen, and listed."""

from pathlib import Path

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.settings import Settings
from fabrictool.cli import top_command
from fabrictool.cli.main import main
from fabrictool.tui.keymap import read_keymap
from fabrictool.tui.keys import PAGE, key_lines, keys_of
from tests.tui.test_top import OPERATOR, column, gateway, settled, text, top


def keymap(tmp_path, words):
    path = tmp_path / "keymap.yaml"
    path.write_text(words)
    return read_keymap(path)


def test_a_file_gives_actions_their_keys(tmp_path):
    words = "quit: x\nfilter: ['/', ctrl+f]\nkeys: '?'\nnodes: 4\njobs: 3\nsort: F5\n".replace("F5", "f5")
    assert keymap(tmp_path, words) == {
        "quit": "x", "filter": "slash,ctrl+f", "keys": "question_mark", "nodes": "4", "jobs": "3", "sort": "f5",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "place", "message", "hint"),
    [
        ("quit: x\nquti: p\n", "2:1", "there is no action `quti`", "did you mean `quit`?"),
        ("fly: x\n", "1:1", "there is no action `fly`", "actions: overview, models"),
        ("quit: hyper+x\n", "1:7", "`hyper+x` is no key", "a character"),
        ("quit: xx\n", "1:7", "`xx` is no key", "a character"),
        ("quit:\n", "1:1", "`quit` has no key", None),
        ("quit: enter\n", "1:7", "`enter` moves in tables", "another"),
        ("quit: d\n", "1:7", "`quit` has the key of `describe`", "give `describe` another one"),
        ("wrap: f\n", "1:7", "`wrap` has the key of `follow`", "give `follow` another one"),
        ("- quit\n", "1:1", "a keymap gives actions their keys", "quit: x"),
    ],
)
def test_a_mistake_has_a_place_and_a_hint(tmp_path, words, place, message, hint):
    with pytest.raises(FabrictoolError) as caught:
        keymap(tmp_path, words)
    (problem,) = caught.value.problems
    assert problem.code == "FT5209"
    assert message in problem.message
    assert f"{problem.place.line}:{problem.place.column}" == place
    assert (hint is None and problem.hint is None) or hint in problem.hint


def test_all_mistakes_are_said_at_once(tmp_path):
    with pytest.raises(FabrictoolError) as caught:
        keymap(tmp_path, "fly: x\nquit: xx\nmark: up\n")
    assert [problem.place.line for problem in caught.value.problems] == [1, 2, 3]


def test_where_two_screens_do_not_meet_a_key_may_mean_two_things(tmp_path):
    assert keymap(tmp_path, "sort: f\n") == {"sort": "f"}
    assert keymap(tmp_path, "describe: l\nlogs-of: d\n") == {"describe": "l", "logs-of": "d"}


@pytest.mark.asyncio
async def test_the_keys_of_the_file_are_in_force_and_listed(tmp_path):
    given = keymap(tmp_path, "describe: l\nlogs-of: d\nnodes: p\nfilter: ctrl+f\nkeys: k\ncompact: [c, Z]\n")
    app = top(gateway, OPERATOR, keymap=given)
    async with app.run_test(size=(80, 30)) as pilot:
        await pilot.press("3")
        await settled(pilot)
        assert app.screen.spec.name == "overview"
        await pilot.press("p")
        await settled(pilot)
        assert app.screen.spec.name == "nodes"
        await pilot.press("l")
        await settled(pilot)
        assert "node n2 of clariden" in text(app, "#text"), "all about it"
        await pilot.press("escape", "ctrl+f", *"bristen", "enter")
        await settled(pilot)
        assert column(app, "NODE") == ["n3"]
        await pilot.press("k")
        await settled(pilot)
        page = app.as_text()
        for line in ("p      nodes ", "ctrl+f filter:", "l      all about it", "c Z    compact", "1      overview"):
            assert line in page
        assert "d its log" in page


def test_every_action_is_on_the_page_of_keys():
    from fabrictool.tui.app import Top
    from fabrictool.tui.keys import REPLAY_PAGE
    from fabrictool.tui.screens.table import TableScreen
    from fabrictool.tui.screens.text import LogScreen

    known = keys_of(Top, TableScreen, LogScreen)
    told = {name for name in known if f"{{{name}}}" in PAGE + REPLAY_PAGE}
    assert set(known) - told == {"interrupt", "back"}, "Ctrl-C and esc are known to all"
    how_to = (Path(__file__).parents[2] / "docs/how-to/watch-a-fabric.md").read_text()
    assert [name for name in known if f"`{name}`" not in how_to] == []
    usual = key_lines(known, replay=False)
    assert max(map(len, usual)) <= 76


def test_top_reads_the_file_that_a_setting_names(tmp_path, monkeypatch, capsys):
    given = []
    monkeypatch.setattr("fabrictool.tui.app.run", lambda *_, keymap, **__: given.append(keymap))
    monkeypatch.setattr(top_command, "on_a_terminal", lambda: True)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["top", "--demo"]) == 0
    usual = tmp_path / ".config/fabrictool/keymap.yaml"
    usual.parent.mkdir(parents=True)
    usual.write_text("quit: x\n")
    assert main(["top", "--demo"]) == 0
    assert given == [{}, {"quit": "x"}]
    monkeypatch.setenv("FABRICTOOL_KEYMAP", str(tmp_path / "none.yaml"))
    assert main(["top", "--demo"]) == 65
    assert "FT1001" in capsys.readouterr().err, "who names a file means one"
    (tmp_path / "none.yaml").write_text("quit: x\nfly: p\n")
    assert main(["top", "--demo"]) == 65
    assert f"{tmp_path}/none.yaml:2:1: error[FT5209]: there is no action `fly`" in capsys.readouterr().err
    assert Settings.from_environment().keymap_path == tmp_path / "none.yaml"
