"""Each open stream takes two files of a gateway, and a process may have so many."""

import asyncio
import json
import re
import resource
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fabrictool.base.openfiles import MOST, open_files, raise_open_files
from fabrictool.gateway.gateway import OWN_FILES
from fabrictool.gateway.upstream import IDLE_KEPT
from tests.gateway.conftest import until
from tests.ports import free_port

pytestmark = pytest.mark.asyncio
MOCK = Path(__file__).with_name("mock_process.py")
STREAMED = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
REQUEST = f"{HEAD}content-length: {len(STREAMED)}\r\n\r\n".encode() + STREAMED
FEW = IDLE_KEPT + 100
"""Where nobody asks: connections to the server are kept for those who come."""


class Gateway:
    """A process that may open so many files, before one mock server."""

    def __init__(self, folder):
        self.folder, self.server_port, self.port = folder, free_port(), free_port()

    async def start(self, soft, hard):
        self.server = await asyncio.create_subprocess_exec(
            sys.executable, str(MOCK), str(self.server_port), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert await self.server.stdout.readline() == b"ready\n"
        (self.folder / "registry.yaml").write_text(
            f"nodes: [{{url: 'http://127.0.0.1:{self.server_port}', models: [m]}}]\n"
        )
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fabrictool.cli.main", "gateway", "run", "--registry",
            str(self.folder / "registry.yaml"), "--listen", f"127.0.0.1:{self.port}",
            stderr=subprocess.PIPE, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        )  # fmt: skip
        self.log = []
        self.reading = asyncio.create_task(self.read_log())
        await until(lambda: any("serving" in line for line in self.log), 20)

    async def read_log(self):
        while line := await self.process.stderr.readline():
            self.log.append(line.decode())

    async def stop(self):
        self.process.terminate()
        await self.process.wait()
        await self.reading
        self.server.kill()
        await self.server.wait()

    def tell(self, word):
        self.server.stdin.write(word.encode() + b"\n")

    async def ask(self):
        """What a client gets of one stream; "" where it got nothing."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(REQUEST)
            text = await reader.read()
            writer.close()
        except ConnectionError:
            return ""
        return text.decode()

    def open_files(self):
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def octets(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])

    def at_once(self, number):
        """Streams that have no octet yet, until the server is told to go on."""
        self.tell("mute")
        return [asyncio.create_task(self.ask()) for _ in range(number)]


@asynccontextmanager
async def gateway(folder, soft, hard):
    running = Gateway(folder)
    try:
        await running.start(soft, hard)
        yield running
    finally:
        await running.stop()


def hard_limit():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.skipif(hard_limit() < 2000, reason="this system lets a process open too few files")
async def test_a_gateway_opens_more_files_than_a_shell_lets_it(tmp_path):
    async with gateway(tmp_path, 256, hard_limit()) as running:
        asked = running.at_once(400)
        await until(lambda: running.open_files() > 800, 30)
        running.tell("ok")
        assert all(text.endswith("data: [DONE]\n\n\r\n0\r\n\r\n") for text in await asyncio.gather(*asked))
        await until(lambda: running.open_files() < FEW, 20)


async def test_who_comes_when_no_file_is_left_hinders_nobody_and_later_all_is_well(tmp_path):
    async with gateway(tmp_path, 200, 200) as running:
        first = running.at_once(50)
        await until(lambda: running.open_files() > 100, 30)
        flood = running.at_once(300)
        most = (200 - OWN_FILES) // 2
        await until(lambda: sum(task.done() for task in flood) >= len(flood) - (most - len(first)), 30)
        running.tell("ok")
        assert all("data: [DONE]" in text for text in await asyncio.gather(*first))
        texts = await asyncio.gather(*flood)
        assert {text[9:12] for text in texts} <= {"200", "503", ""}
        assert all("FT8115" in text for text in texts if text[9:12] == "503")
        assert "data: [DONE]" in await running.ask(), "no replica was blamed"
        assert "Traceback" not in "".join(running.log)


@pytest.mark.long
async def test_nine_and_a_half_thousand_streams_are_open_at_once(tmp_path):
    """Their server, their clients and their gateway need 19,000 files each."""
    number = 9500
    raise_open_files()
    if open_files() < 2 * number + 200:
        pytest.skip("this system lets a process open too few files")
    async with gateway(tmp_path, 1024, hard_limit()) as running:
        idle = running.octets()
        asked = running.at_once(number)
        await until(lambda: running.open_files() > 2 * number, 120)
        print(f"{(running.octets() - idle) / number:.0f} octets a stream")
        running.tell("ok")
        texts = await asyncio.gather(*asked)
        assert sum(text.endswith("data: [DONE]\n\n\r\n0\r\n\r\n") for text in texts) == number
        await until(lambda: running.open_files() < FEW, 30)


async def test_what_is_allowed_is_not_made_less(monkeypatch):
    limits = [(MOST + 5, MOST + 9)]
    monkeypatch.setattr("resource.getrlimit", lambda _: limits[-1])
    monkeypatch.setattr("resource.setrlimit", lambda _, new: limits.append(new))
    raise_open_files()
    assert open_files() == MOST + 5
    limits[:] = [(1024, 1 << 30)]
    raise_open_files()
    assert open_files() == MOST
