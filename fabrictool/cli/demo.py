"""The main job on this machine, told step by step; every step is an ordinary command that can be run by hand."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.files import file_error, write_atomic
from fabrictool.cli.applying import carry_out, destroy_fabric
from fabrictool.cli.output import data, paint, say
from fabrictool.cli.plan_text import render
from fabrictool.cli.planning import plan_online
from fabrictool.cli.source import Source, find_blueprint
from fabrictool.cli.watching import show_status
from fabrictool.domain.address import Address
from fabrictool.gateway.keys import new_key
from fabrictool.planner.plan import PlanOptions

if TYPE_CHECKING:
    from fabrictool.blueprint import Loaded
    from fabrictool.state.fabric import Fabric

KEY_VARIABLE = "FABRICTOOL_DEMO_KEY"
QUESTION = "What is the capital of France?"
REQUESTS = 24
WORKERS = 4
KILL_AFTER = 8
"""The agent dies when so many requests have been answered, so that others are in flight."""


class DemoError(FabrictoolError):
    """The demo did not show what it is there to show (FT9101)."""


@dataclass(frozen=True, slots=True)
class Client:
    """A minimal client of the gateway."""

    host: str
    port: int
    key: str
    model: str

    def ask(self, text: str, max_tokens: int) -> tuple[int, str]:
        """One whole answer: status and text."""
        connection, response = self._post(text, max_tokens, stream=False)
        try:
            answer = json.loads(response.read())
            if response.status != 200:
                return response.status, str(answer.get("error", {}).get("message", ""))
            return 200, answer["choices"][0]["message"]["content"]
        finally:
            connection.close()

    def stream(self, text: str, max_tokens: int) -> str:
        """One answer, printed as it comes."""
        connection, response = self._post(text, max_tokens, stream=True)
        whole = ""
        try:
            if response.status != 200:
                text = f"the gateway answered HTTP {response.status}: {response.read(2000).decode(errors='replace')}"
                raise DemoError.of("FT9101", text, hint="another fabric may hold this port; `fabrictool destroy` it")
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                for choice in json.loads(line[6:]).get("choices", []):
                    piece = choice["delta"].get("content") or ""
                    whole += piece
                    data(piece, end="")
            data("")
        finally:
            connection.close()
        return whole

    def _post(
        self, text: str, max_tokens: int, *, stream: bool
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
        }
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        return connection, connection.getresponse()


def run_demo(source: Source, *, keep: bool) -> int:
    """All steps; the fabric is taken down again whatever happens, unless `keep`."""
    began = time.monotonic()
    path = find_blueprint(source.path)
    by_hand = f"-b {path}"
    say(f"By hand, every step is a command: export PATH={Path(sys.executable).parent}:$PATH")
    _step(1, "validate the blueprint and its inventory", f"fabrictool validate {by_hand}")
    os.environ.setdefault(KEY_VARIABLE, "read-below")
    loaded = source.loaded
    fabric = source.fabric()
    key_file = fabric.folder.path / "demo.key"
    os.environ[KEY_VARIABLE] = _key(key_file)
    say(f"  fabric {loaded.blueprint.fabric}: {len(loaded.blueprint.models)} model, {len(fabric.clusters)} clusters of")
    say(f"  {len(loaded.inventory.providers)} providers, all on this machine")
    _step(2, "make the federation's root and its providers' certificates", f"fabrictool trust init {by_hand}")
    _trust(fabric, loaded)
    try:
        _serve(source, fabric, by_hand)
        client = _client(loaded)
        _step(5, "ask it, through the gateway, streamed", f"curl -N {_url(client)}/chat/completions …")
        data(f"  > {QUESTION}")
        data("  < ", end="")
        if not client.stream(QUESTION, 32).strip():
            raise DemoError.of("FT9101", "the model gave an empty answer", hint="fabrictool logs gateway/NAME")
        _kill_one(fabric, client)
        _step(7, "look at it", f"fabrictool status {by_hand}")
        show_status(source, "", as_json=False, watch=False)
    finally:
        if not keep:
            _step(8, "take it down: drain, leave the mesh, stop", f"fabrictool destroy {by_hand}")
            destroy_fabric(source, yes=True, as_json=False)
    if keep:
        _kept(client, key_file, by_hand)
    say(f"\ndone in {time.monotonic() - began:.0f} s")
    return 0


def _serve(source: Source, fabric: Fabric, by_hand: str) -> None:
    _step(3, "plan: what would run where, and what it forecasts", f"fabrictool plan {by_hand} -o plan.json")
    plan, evidence = plan_online(source, fabric, PlanOptions())
    data("\n".join(f"  {line}".rstrip() for line in render(plan, evidence.observed).split("\n")))
    _step(
        4, "apply: start the gateway and the node agents, load the model, join the mesh", "fabrictool apply plan.json"
    )
    if plan.changes:
        carry_out(plan, source, fabric, as_json=False)
    else:
        say("  it runs already")


def _kill_one(fabric: Fabric, client: Client) -> None:
    """Kill an agent while requests flow and count what the clients saw."""
    victim = next(u for a, (_, u) in sorted(fabric.observe().running().items()) if Address.parse(a).kind == "replica")
    _step(6, f"kill the agent of {victim.address} with -9 while {REQUESTS} requests flow", f"kill -9 {victim.pid}")
    answered = threading.Semaphore(0)
    failures: list[str] = []

    def one(number: int) -> None:
        try:
            status, text = client.ask(f"Count to {number}.", 6)
            if status != 200:
                failures.append(f"HTTP {status}: {text}")
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            failures.append(repr(error))
        answered.release()

    def kill() -> None:
        for _ in range(KILL_AFTER):
            answered.acquire()
        if victim.pid is not None:
            os.kill(victim.pid, signal.SIGKILL)
            say(f"  killed pid {victim.pid} after {KILL_AFTER} answers")

    killer = threading.Thread(target=kill)
    killer.start()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(one, range(1, REQUESTS + 1)))
    killer.join()
    word = "good" if not failures else "error"
    say("  " + paint(f"{REQUESTS} requests, {len(failures)} failed", word))
    if failures:
        raise DemoError.of("FT9101", f"{len(failures)} requests failed: {failures[0]}", hint="fabrictool events")
    say("  requests in flight on it were sent to the other replica; a stream that had begun would have ended with an")
    say("  error event")


def _trust(fabric: Fabric, loaded: Loaded) -> None:
    now = time.time()
    if not fabric.trust.exists:
        fabric.trust.init(fabric.name, now=now)
    for provider in loaded.inventory.providers:
        if not fabric.trust.has_provider(provider):
            fabric.trust.issue(provider, now=now)
    say(f"  keys in {fabric.trust.folder}")


def _key(path: Path) -> str:
    """The demo's API key: random, made once, readable by its owner alone."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        key = new_key()
        write_atomic(path, key.encode() + b"\n", mode=0o600)
        return key
    except OSError as error:
        raise file_error(error, path) from error


def _client(loaded: Loaded) -> Client:
    gateways = loaded.blueprint.every_gateway.values()
    listen = next((gateway.listen for gateway in gateways if gateway.listen is not None), None)
    if listen is None:
        raise DemoError.of("FT9101", "the blueprint has no gateway", hint="use blueprints/local.yaml")
    return Client(listen.host, listen.port, os.environ[KEY_VARIABLE], next(iter(loaded.blueprint.models)))


def _url(client: Client) -> str:
    return f"http://{client.host}:{client.port}/v1"


def _kept(client: Client, key_file: Path, by_hand: str) -> None:
    body = json.dumps({"model": client.model, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]})
    data(f"""
The fabric stays up: {_url(client)}

  export {KEY_VARIABLE}=$(cat {key_file})
  curl -s {_url(client)}/chat/completions -H "Authorization: Bearer ${KEY_VARIABLE}" \\
    -H 'Content-Type: application/json' -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{_url(client)}", api_key=open("{key_file}").read().strip())
  print(client.chat.completions.create(model="{client.model}", temperature=0,
        messages=[{{"role": "user", "content": "{QUESTION}"}}]).choices[0].message.content)

  fabrictool top {by_hand}         # live status
  fabrictool plan {by_hand}        # shows the killed replica as missing
  fabrictool apply {by_hand}       # brings it back
  fabrictool destroy {by_hand}     # takes everything down""")


def _step(number: int, what: str, by_hand: str) -> None:
    say(f"\n{paint(f'{number}. {what}', 'bold')}\n   by hand: {by_hand}")
