"""What `fabrictool --help` costs, and how wrong command lines end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import fabrictool
from fabrictool.catalog.errors import error_codes
from fabrictool.cli.commands import build
from fabrictool.cli.demo import Client, _kept
from fabrictool.cli.help_commands import explain
from fabrictool.cli.help_groups import OTHERS, first_sentence, grouped
from fabrictool.cli.main import main

ROOT = Path(__file__).parents[2]

HEAVY = ("httpx2", "ortools", "textual", "asyncssh", "paramiko", "fabric", "torch", "starlette")


def test_help_loads_none_of_the_heavy_libraries():
    code = (
        "import sys\nfrom fabrictool.cli.main import main\ntry:\n    main(['--help'])\nfinally:\n"
        f"    print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: fabrictool" in done.stdout
    assert done.stderr.strip() == "[]"


def test_generated_pages_are_of_all_commands(tmp_path):
    """Also where the parser was only given the one that writes them."""
    assert main(["schema", "--write-docs", str(tmp_path / "reference")]) == 0
    assert (tmp_path / "reference/cli.md").read_text() == (ROOT / "docs/reference/cli.md").read_text()


def test_help_imports_few_modules():
    """A count instead of a time, which no shared machine can promise; 0.06 s were measured with about 330."""
    code = "import sys, fabrictool.cli.main\nimport fabrictool.cli.commands as c\nc.build()\nprint(len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 450


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nonsense"], 64, "FT9001"),
        (["plan", "--nonsense"], 64, "FT9001"),
        (["gateway", "run"], 64, "--registry"),
        (["explain", "FT0000"], 64, "FT9003"),
        (["gateway", "run", "--registry", "x.yaml", "--listen", "nowhere"], 64, "FT9002"),
        (["gateway", "run", "--registry", "no-such-file.yaml"], 1, "FT4302"),
        (["plan", "-b", "no-such-file.yaml"], 65, "no-such-file.yaml"),
        (["apply", "no-such-plan.json"], 1, "FT4302"),
        (["status", "--url", "http://127.0.0.1:9"], 69, "FT5201"),
        (["status", "--url", "ftp://x"], 69, "FT5201"),
    ],
)
def test_mistakes_end_with_a_code_and_a_hint(arguments, code, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_every_code_can_be_explained(capsys):
    """All by the function: each command line would build the tree of commands anew."""
    assert main(["explain", "ft4021"]) == 0
    assert "What to do" in capsys.readouterr().out
    for code in error_codes():
        explain(code.lower())
        assert capsys.readouterr().out.startswith(code)


def test_a_bare_command_prints_help(capsys):
    assert main([]) == 0
    assert "validate" in capsys.readouterr().out


def test_init_writes_a_valid_fabric_and_never_overwrites(tmp_path, capsys):
    assert main(["init", str(tmp_path / "new")]) == 0
    assert main(["validate", "-b", str(tmp_path / "new" / "blueprint.yaml")]) == 0
    assert main(["init", str(tmp_path / "new")]) == 65
    assert "FT9007" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_in_the_usual_way(option, capsys):
    assert main([option]) == 0
    assert capsys.readouterr().out.strip() == fabrictool.__version__


def test_help_has_every_command_in_a_group_and_cuts_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    commands = typer.main.get_command(build()).commands
    assert OTHERS not in dict(grouped(list(commands)))
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    for name, command in commands.items():
        assert f"{name} {first_sentence(command.help)}" in words
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text.partition("Options:")[2]


@pytest.mark.parametrize("module", ["typer", "fabrictool.cli.fabric_commands", "pydantic", "fabrictool.planner.plan"])
def test_ctrl_c_while_modules_load_ends_the_command(module, tmp_path):
    """It is pressed just when a module is asked for, inside of the import system, where an exception can get lost."""
    code = f"""
import os, signal, sys
class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Presses())
from fabrictool.cli.main import main
sys.exit(main(["plan", "-b", {str(ROOT / "blueprints/local.yaml")!r}]))
"""
    environment = os.environ | {"FABRICTOOL_STATE_DIR": str(tmp_path)}
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (130, "fabrictool: interrupted\n")


def test_the_moment_before_the_handler_loads_next_to_nothing():
    """A Ctrl-C before the first line of ours, while Python itself starts, cannot be helped: it shows a traceback."""
    code = "import sys\nbefore = set(sys.modules)\nimport fabrictool.cli.main\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"typer", "asyncio", "json", "pathlib", "yaml", "enum", "typing", "contextlib", "threading"}


def test_an_interrupt_in_the_middle_ends_with_one_line(monkeypatch, capsys):
    monkeypatch.setattr("fabrictool.cli.help_commands.version", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert main(["--version"]) == 130
    assert capsys.readouterr().err.strip() == "fabrictool: interrupted"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_the_demo_tells_people_to_ask_is_asked_without_chance(capsys):
    _kept(Client("127.0.0.1", 8011, "k", "m"), Path("demo.key"), "-b b.yaml")
    said = capsys.readouterr().out
    assert '"temperature": 0' in said
    assert "temperature=0" in said
    page = (ROOT / "docs/how-to/use-the-openai-sdk.md").read_text()
    assert "temperature=0" in page
    assert '"temperature": 0' in (ROOT / "docs/tutorial/ten-minutes.md").read_text()


def test_setting_up_says_how_far_it_is():
    """The function of `.ci/setup` on what pip prints, for a lock file of thirty packages."""
    script = (ROOT / ".ci/setup").read_text()
    function = script[script.index("progress() {") : script.index("\n}\n") + 3]
    pip = "\n".join([*[f"Collecting p{i}" for i in range(30)], "Installing collected packages: p", "ERROR: no space"])
    code = f'all=30; say() {{ echo "$*" >&2; }}\n{function}\nprogress'
    done = subprocess.run(["bash", "-c", code], input=f"{pip}\n", capture_output=True, text=True, check=True)
    told = [f"{n} of 30 packages" for n in range(4, 30, 4)]
    assert done.stderr.splitlines() == [*told, "all are here; unpacking them", "ERROR: no space"]


def test_after_an_interrupt_nothing_that_still_runs_is_waited_for():
    """Such as a solver's threads; the exit code is ours, and what was printed is out."""
    code = (
        "import threading, time\nfrom fabrictool.cli.interrupts import leave\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\nprint('half a plan')\nleave(130)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (130, "half a plan\n")
