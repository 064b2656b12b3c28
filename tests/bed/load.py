"""Steady load on a gateway from a machine of the testbed, and what became of every request."""

import http.client
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass

from tests.bed.federation import KEY


@dataclass(frozen=True)
class Outcome:
    """Of one request. `verdict`: ok, refused (an error before the first byte), broken (a stream that ended in an error
    event), torn (one that ended without any)."""

    at: float
    verdict: str
    replica: str
    text: str = ""
    begun: bool = False
    """A byte of the answer had come."""


class Load:
    """`streams` + `plain` clients, each with one request open all the time; for `with`.

    They ask the next of `places` (address, port) when one gave them nothing.
    """

    def __init__(self, bed, *places, model, streams=2, plain=2, tokens=24):
        self.bed, self.places, self.model, self.tokens = bed, places, model, tokens
        self.outcomes = []
        self._stop = threading.Event()
        kinds = [True] * streams + [False] * plain
        self._threads = [threading.Thread(target=self._client, args=(stream,), daemon=True) for stream in kinds]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def verdicts(self):
        return Counter(outcome.verdict for outcome in self.outcomes)

    def served(self, replica, since=0.0):
        return sum(o.replica == replica and o.verdict == "ok" and o.at >= since for o in self.outcomes)

    def bad(self):
        return [outcome for outcome in self.outcomes if outcome.verdict != "ok"]

    def _client(self, stream):
        with self.bed.sockets_in("ing"):
            turn = 0
            while not self._stop.is_set():
                turn += 1
                for step in range(len(self.places)):
                    outcome = self._request(stream, *self.places[(turn + step) % len(self.places)])
                    if outcome.verdict == "ok" or outcome.begun:
                        break
                self.outcomes.append(outcome)
                if outcome.verdict != "ok":
                    time.sleep(0.05)

    def _request(self, stream, address, port):
        at = time.time()
        body = {
            "model": self.model, "max_tokens": self.tokens, "stream": stream,
            "messages": [{"role": "user", "content": "tell me more"}],
        }  # fmt: skip
        connection = http.client.HTTPConnection(address, port, timeout=60)
        replica, begun = "", False
        try:
            headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            replica = answer.headers.get("x-fabric-replica", "").partition("@")[0]
            first = answer.read(1)
            begun = bool(first) and answer.status == 200
            text = (first + answer.read()).decode()
        except (OSError, http.client.HTTPException) as error:
            return Outcome(at, "torn", replica, f"{address}:{port}: {error!r}", begun)
        finally:
            connection.close()
        if answer.status != 200:
            return Outcome(at, "refused", replica, f"{answer.status} {text[:300]}")
        if not stream:
            whole = json.loads(text)["choices"][0]["finish_reason"] in ("length", "stop")
            return Outcome(at, "ok" if whole else "torn", replica, "" if whole else text[-300:], begun)
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")]
        if any('"error"' in event and "message" in json.loads(event)["error"] for event in events if event != "[DONE]"):
            return Outcome(at, "broken", replica, text[-300:], begun)
        finished = events and events[-1] == "[DONE]"
        return Outcome(at, "ok" if finished else "torn", replica, "" if finished else text[-300:], begun)
