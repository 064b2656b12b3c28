"""Open-loop load on a gateway from a machine of the testbed: requests come whatever became of those before."""

import http.client
import json
import random
import threading
import time
from dataclasses import dataclass

from tests.bed.federation import KEY


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request that was due at a time; seconds count from then, as its user counts them."""

    due: float
    ttft_s: float | None
    e2e_s: float | None
    """None: no whole answer came."""
    replica: str
    trouble: str = ""

    def attains(self, ttft_s, e2e_s):
        return self.e2e_s is not None and self.ttft_s <= ttft_s and self.e2e_s <= e2e_s


class OpenLoop:
    """Streamed requests at a mean rate with exponential gaps; for `with`, which waits for what is open."""

    def __init__(self, bed, address, port, *, model, rate, prompt, tokens, seed):
        self.bed, self.address, self.port, self.model = bed, address, port, model
        self.rate, self.prompt, self.tokens = rate, prompt, tokens
        self.answers = []
        self._dice = random.Random(seed)
        self._stop = threading.Event()
        self._clock = threading.Thread(target=self._send_all, daemon=True)

    def __enter__(self):
        self._clock.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._clock.join(120)

    def _send_all(self):
        requests, due = [], time.monotonic()
        while not self._stop.is_set():
            due += self._dice.expovariate(self.rate)
            time.sleep(max(0.0, due - time.monotonic()))
            requests.append(threading.Thread(target=self._ask, args=(due,), daemon=True))
            requests[-1].start()
        for request in requests:
            request.join(90)

    def _ask(self, due):
        body = {"model": self.model, "max_tokens": self.tokens, "stream": True, "prompt": self.prompt}
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        first = end = None
        replica = trouble = text = ""
        with self.bed.sockets_in("op"):
            connection = http.client.HTTPConnection(self.address, self.port, timeout=20)
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                answer = connection.getresponse()
                replica = answer.headers.get("x-fabric-replica", "").partition("@")[0]
                text = answer.read(1).decode()
                first = time.monotonic() - due
                text += answer.read().decode()
                end = time.monotonic() - due
                if answer.status != 200:
                    trouble = f"{answer.status} {text[:300]}"
                elif '"error"' in text or not text.rstrip().endswith("[DONE]"):
                    trouble = f"broken off: {text[-300:]}"
            except (OSError, http.client.HTTPException) as error:
                trouble = repr(error)
            finally:
                connection.close()
        whole = None if trouble else end
        self.answers.append(Answer(due, first, whole, replica, trouble))
