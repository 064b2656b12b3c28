"""``gateway run`` goes on as a program of its own: what it is given, and how it ends, are as if it did not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.ports import free_port

RUN = [sys.executable, "-m", "fabrictool.cli.main", "gateway", "run"]
NODES = {"nodes": [{"url": "http://127.0.0.1:9", "models": ["m"], "provider": "p"}]}


def started(*words, **options):
    return subprocess.Popen([*RUN, "--listen", f"127.0.0.1:{free_port()}", *words], stderr=subprocess.PIPE, **options)


def serving(gateway):
    """What it says until it serves; it has to."""
    lines = []
    while not lines or b"serving" not in lines[-1]:
        lines.append(gateway.stderr.readline())
        assert lines[-1], lines
    return lines


def ended(gateway, number=signal.SIGTERM):
    gateway.send_signal(number)
    _, said = gateway.communicate(timeout=30)
    return gateway.returncode, said


def test_it_is_another_program_and_says_which(tmp_path):
    (tmp_path / "nodes.json").write_text(json.dumps(NODES))
    gateway = started("--registry", tmp_path / "nodes.json")
    serving(gateway)
    words = Path(f"/proc/{gateway.pid}/cmdline").read_bytes().split(b"\0")
    code = Path(f"/proc/{gateway.pid}/maps").read_text()
    assert ended(gateway)[0] == 0
    assert words[-4:-1] == [b"fabrictool", b"gateway", b"run"]
    assert "pydantic" not in code, "nothing of the command line's parser is left"


def test_a_pipe_is_read_once():
    gateway = started("--registry", "/dev/stdin", stdin=subprocess.PIPE)
    gateway.stdin.write(json.dumps(NODES).encode())
    gateway.stdin.close()
    gateway.stdin = None
    serving(gateway)
    assert ended(gateway)[0] == 0


def test_the_name_of_a_file_may_be_any_octets(tmp_path):
    name = os.fsencode(tmp_path) + b"/n\xff.json"
    Path(os.fsdecode(name)).write_text(json.dumps(NODES))
    gateway = started(b"--registry", name)
    serving(gateway)
    assert ended(gateway)[0] == 0


def test_standard_output_may_be_closed(tmp_path):
    (tmp_path / "nodes.json").write_text(json.dumps(NODES))
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *RUN, "--listen", f"127.0.0.1:{free_port()}"]
    gateway = subprocess.Popen([*shell, "--registry", tmp_path / "nodes.json"], stderr=subprocess.PIPE)
    serving(gateway)
    gateway.kill()
    gateway.communicate()


def test_mistakes_end_with_their_codes(tmp_path):
    (tmp_path / "nodes.json").write_text('{"nodes": 7}')
    for words, code, said in (
        (["--registry", tmp_path / "nodes.json"], 65, b"FT8001"),
        (["--registry", tmp_path / "none.json"], 1, b"FT4302"),
    ):
        gateway = started(*words)
        _, told = gateway.communicate(timeout=60)
        assert gateway.returncode == code, told
        assert said in told
        assert b"Traceback" not in told


def test_ctrl_c_between_the_two_programs_is_an_interrupt():
    then = "from fabrictool.cli.exits import answered; raise SystemExit(answered(lambda: 0, as_json=False))"
    first = (
        "import os, signal, sys\n"
        "from fabrictool.cli.interrupts import HoldingInterrupts\n"
        "with HoldingInterrupts():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        f"    os.execv(sys.executable, [sys.executable, '-c', {then!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "fabrictool: interrupted")


def test_ctrl_c_while_it_serves_ends_it(tmp_path):
    (tmp_path / "nodes.json").write_text(json.dumps(NODES))
    gateway = started("--registry", tmp_path / "nodes.json")
    serving(gateway)
    code, said = ended(gateway, signal.SIGINT)
    assert code in (0, 130)
    assert b"Traceback" not in said
