"""One engine under the supervisor: its log, its end, and what it leaves behind."""

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from fabrictool.agent import ports as ports_module
from fabrictool.agent import supervisor as supervisor_module
from fabrictool.agent.process import LINE_OCTETS
from fabrictool.agent.supervisor import EngineFailedError, Supervisor
from fabrictool.engines.protocol import Capabilities, EngineCommand, EngineLaunch, MetricNames, Readiness
from fabrictool.engines.reference_adapter import Reference
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.asyncio

ENGINE = """
import http.server, json, subprocess, sys
port, mode = int(sys.argv[1]), sys.argv[2]
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "m"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
if mode == "long-line":
    print("x" * 300_000, flush=True)
    print("after", flush=True)
if mode == "worker":
    print("worker", subprocess.Popen(["sleep", "600"]).pid, flush=True)
if mode == "escaped":
    print("worker", subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Page).serve_forever()
"""


class FakeAdapter:
    name = "fake"
    readiness = Readiness("/health", 5, 0.05)
    metrics = MetricNames("r", "w", "k")
    capabilities = Capabilities()


async def started(mode):
    up = asyncio.Event()
    supervisor = Supervisor(
        FakeAdapter(),
        lambda at, _: EngineCommand((sys.executable, "-c", ENGINE, str(at.port), mode), {}),
        "m",
        lambda: up.set() if supervisor.state == "ready" else None,
        start_timeout_s=20,
    )
    running = asyncio.create_task(supervisor.run())
    await asyncio.wait_for(up.wait(), 20)
    return supervisor, running


async def stopped(supervisor, running):
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await asyncio.wait_for(supervisor.stop(), 20)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


async def until(condition, seconds=30.0):
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)


def worker_of(supervisor):
    return int(next(line for line in supervisor.lines if line.startswith("worker ")).split()[1])


HUNG = """
import http.server, sys
port, kind = int(sys.argv[1]), sys.argv[2]
tokens = 0
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global tokens
        tokens += kind == "works"
        running = 0 if kind == "idle" else 1
        body = b'{"data": [{"id": "m"}]}'
        if self.path == "/metrics":
            body = f"r{{a=\\"b\\"}} {running}\\nw 0\\nk 0.5\\ntokens_total {tokens}\\n".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Page).serve_forever()
"""


class CountingAdapter(FakeAdapter):
    """Of an engine that says how far its requests are."""

    metrics = MetricNames("r", "w", "k", ("tokens_total",))


@pytest.mark.parametrize(("kind", "restarts"), [("hangs", 1), ("works", 0), ("idle", 0)])
async def test_an_engine_whose_requests_get_no_further_is_started_anew(monkeypatch, kind, restarts):
    monkeypatch.setattr(supervisor_module, "WATCH_SECONDS", 0.05)
    supervisor = Supervisor(
        CountingAdapter(),
        lambda at, _: EngineCommand((sys.executable, "-c", HUNG, str(at.port), kind), {}),
        "m",
        lambda: None,
        start_timeout_s=20,
        hang_s=1.0,
    )
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.state == "ready")
    await asyncio.sleep(2.0)
    if restarts:
        await until(lambda: supervisor.restarts == restarts)
        assert "its 1 requests got no further for 1 s: it hangs" in supervisor.progress
    assert supervisor.restarts == restarts
    await stopped(supervisor, running)


async def test_a_log_line_of_any_length_is_cut_and_the_next_is_still_read():
    supervisor, running = await started("long-line")
    await until(lambda: "after" in supervisor.lines)
    assert {len(line) for line in supervisor.lines} <= {*range(LINE_OCTETS + 1)}
    assert sum(line.count("x") for line in supervisor.lines) == 300_000
    await stopped(supervisor, running)


@pytest.mark.parametrize("mode", ["worker", "escaped"])
async def test_stopping_does_not_wait_for_a_worker_that_holds_the_log(mode):
    supervisor, running = await started(mode)
    await until(lambda: any(line.startswith("worker ") for line in supervisor.lines))
    worker = worker_of(supervisor)
    await stopped(supervisor, running)
    if mode == "worker":
        await until(lambda: not alive(worker))
    else:
        os.kill(worker, signal.SIGKILL)  # it left the group: stop() must end all the same


AGENT = """
import asyncio, sys
from tests.agent.test_supervisor import started, until, worker_of
async def main():
    supervisor, _ = await started("worker")
    await until(lambda: any(line.startswith("worker ") for line in supervisor.lines))
    print(supervisor.pid, worker_of(supervisor), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_an_engine_and_its_workers_die_with_a_killed_agent():
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", AGENT, stdout=asyncio.subprocess.PIPE)
    engine, worker = map(int, (await agent.stdout.readline()).split())
    assert alive(engine)
    assert alive(worker)
    agent.kill()
    await agent.wait()
    await until(lambda: not alive(engine) and not alive(worker))


async def test_an_engine_that_refuses_its_input_is_started_once_and_its_words_are_said():
    script = "import sys; print('tiny.gguf: error[FT7020]: cut off', flush=True); sys.exit(65)"
    starts = []

    def command(at, _):
        starts.append(at.port)
        return EngineCommand((sys.executable, "-c", script), {})

    supervisor = Supervisor(FakeAdapter(), command, "m", lambda: None, start_timeout_s=20)
    with pytest.raises(EngineFailedError) as error:
        await supervisor.run()
    await supervisor.stop()
    (problem,) = error.value.problems
    assert (problem.code, len(starts), supervisor.state) == ("FT7105", 1, "failed")
    assert "tiny.gguf: error[FT7020]: cut off" in problem.message


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (
            (sys.executable, "-c", "import sys; print('a b'); sys.exit('no such module: vllm/9')"),
            "no such module: vllm/9",
        ),
        (("/no/such/python", "-c", ""), "/no/such/python: no such file or directory"),
        (("false",), "looked for with false"),
    ],
    ids=["it says why", "no interpreter", "no word"],
)
async def test_an_engine_that_is_not_installed_is_said_once_and_nothing_is_started(tmp_path, probe, words):
    begun, asked = tmp_path / "begun", []

    def command(_at, _ports):
        asked.append(1)
        return EngineCommand(("touch", str(begun)), {}, probe=probe)

    supervisor = Supervisor(FakeAdapter(), command, "m", lambda: None, start_timeout_s=20)
    with pytest.raises(EngineFailedError) as caught:
        await supervisor.run()
    assert caught.value.problems[0].code == "FT7107"
    assert words in caught.value.problems[0].message
    assert (supervisor.state, supervisor.restarts, len(asked), begun.exists()) == ("failed", 0, 1, False)


async def test_an_engine_is_looked_for_before_its_first_start_only(tmp_path):
    looks = tmp_path / "looks"
    probe = ("sh", "-c", f"echo x >>{looks}")
    supervisor = Supervisor(
        FakeAdapter(), lambda *_: EngineCommand(("false",), {}, probe=probe), "m", lambda: None, start_timeout_s=20
    )
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.restarts >= 2)
    await stopped(supervisor, running)
    assert looks.read_text() == "x\n"


async def test_what_an_engine_does_not_inherit_it_does_not_see(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/agents/own")
    monkeypatch.setenv("KEPT", "yes")
    show = ("sh", "-c", "echo <$PYTHONPATH> <$KEPT> <$SET>".replace("<", "\\<").replace(">", "\\>"))
    supervisor = Supervisor(
        FakeAdapter(), lambda *_: EngineCommand(show, {"SET": "too"}, unset=("PYTHONPATH",)), "m", lambda: None,
        start_timeout_s=20,
    )  # fmt: skip
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.lines)
    await stopped(supervisor, running)
    assert supervisor.lines[0] == "<> <yes> <too>"


SOCKET_ENGINE = """
import http.server, socketserver, sys
class Server(socketserver.ThreadingUnixStreamServer):
    def get_request(self):
        return self.socket.accept()[0], ("local", 0)
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data": [{"id": "m"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body)
Server(sys.argv[1], Page).serve_forever()
"""


class FakeSocketAdapter(FakeAdapter):
    capabilities = Capabilities(sockets=True)


async def test_an_engine_at_a_socket_is_reached_by_its_user_alone_and_stays_there(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    addresses, blocks = [], []

    def command(at, ports):
        addresses.append(at)
        blocks.append(ports.inner)
        return EngineCommand((sys.executable, "-c", SOCKET_ENGINE, at.socket), {})

    supervisor = Supervisor(FakeSocketAdapter(), command, "m", lambda: None, start_timeout_s=20)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.state == "ready")
    (folder,) = tmp_path.iterdir()
    assert Path(addresses[0].socket).parent == folder
    assert (folder.stat().st_mode & 0o777, addresses[0].port) == (0o700, 0)
    os.kill(supervisor.pid, signal.SIGKILL)
    await until(lambda: len(addresses) == 2 and supervisor.state == "ready")
    assert addresses[0] == addresses[1]
    assert blocks[0] != blocks[1] or supervisor.restarts == 1
    await stopped(supervisor, running)
    assert list(tmp_path.iterdir()) == []


async def test_where_no_ports_are_left_that_is_said(monkeypatch):
    # A range without any block: whether one is free would depend on the engines that other tests run at this moment.
    monkeypatch.setattr(ports_module, "LAST", ports_module.FIRST + ports_module.SIZE)
    supervisor = Supervisor(FakeAdapter(), lambda *_: None, "m", lambda: None, start_timeout_s=20)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.restarts)
    assert "ports in a row are free" in supervisor.progress
    await stopped(supervisor, running)


async def test_how_an_engine_changes_is_known_beside_it(tmp_path):
    """A real one, whose two replicas answer as a group."""
    write_tiny_model(tmp_path / "tiny.gguf")
    adapter = Reference()

    def command(at, ports):
        launch = EngineLaunch(
            engine="reference",
            model=str(tmp_path / "tiny.gguf"),
            served_name="m",
            host="127.0.0.1",
            port=at.port or ports.api,
            socket=at.socket,
            context=64,
            python=sys.executable,
            cache_dir=str(tmp_path / "cache"),
            dp=2,
        )
        return adapter.command(launch)

    supervisor = Supervisor(adapter, command, "m", lambda: None, start_timeout_s=60)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: supervisor.elastic is not None, 60)
    assert supervisor.elastic.replicas == 2
    async with supervisor.address.http(10.0) as http:
        ask = {"model": "m", "prompt": "hello", "max_tokens": 20}
        for page, body in (("/fabric/mode", {"merged": True}), ("/v1/completions", ask)):
            async with http.post(f"{supervisor.address.url}{page}", json=body) as answer:
                assert answer.status == 200
    await until(lambda: supervisor.elastic.formed == 1)
    await stopped(supervisor, running)
