"""Keys with limits and budgets, records, the mesh, and a real vLLM among the replicas, while one after the other is
killed or stopped: who had no octet yet sees no error, and what the records say is what was asked.
"""

import asyncio
import json
import os
import random
import re
import signal
import time
from collections import Counter

import aiohttp
import pytest
from sqlalchemy import func, select

from fabrictool.gateway.keeping import RECORDS_FILE, records_folder
from fabrictool.gateway.store import RecordStore
from fabrictool.gateway.tables import REQUESTS
from tests.conftest import BLUEPRINT, KEY
from tests.e2e.test_join import Contributor, wait_for
from tests.gateway.conftest import until
from tests.vllm.conftest import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1800)]

SECONDS = float(os.environ.get("FT_TEST_CHURN_S", "120"))
CLIENTS = 6
BUDGET = 50_000_000
TERMS = f"limits: {{requests_per_minute: 1000000, concurrency: 100}}, budget: {{tokens: {BUDGET}, per: month}}"


class Replica:
    """An agent and its engine, by pid, as they are now."""

    def __init__(self, agent, engine, restart):
        self.agent, self.engine, self.restart = agent, engine, restart
        self.mend, self.killed = None, False

    def harm(self, fault):
        part, number = fault
        pid = self.agent() if part == "agent" else self.engine()
        os.kill(pid, number)
        self.killed = number == signal.SIGKILL
        self.mend = self.restart if self.killed else (lambda: os.kill(pid, signal.SIGCONT))


STOPS = [("agent", signal.SIGSTOP), ("engine", signal.SIGSTOP)]
FAULTS = [*STOPS, ("agent", signal.SIGKILL), ("engine", signal.SIGKILL)]


class Churn:
    """Clients that ask for ever, and somebody who does harm to all replicas but one."""

    def __init__(self, url, replicas, faults, ready):
        self.url, self.replicas, self.faults, self.ready = url, replicas, faults, ready
        self.rng = random.Random(7)
        self.over = False
        self.open, self.seen, self.harms, self.wrong, self.providers = {}, Counter(), Counter(), [], Counter()

    async def run(self, seconds):
        headers = {"authorization": f"Bearer {KEY}"}
        limit = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(headers=headers, timeout=limit) as http:
            clients = [asyncio.create_task(self.ask_for_ever(http, number)) for number in range(CLIENTS)]
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await self.harm_and_mend()
            self.over = True
            await asyncio.gather(*clients)

    async def harm_and_mend(self):
        harmed = self.rng.sample(sorted(self.replicas), self.rng.choice([1, len(self.replicas) - 1]))
        for name in harmed:
            fault = self.rng.choice(self.faults[name])
            self.harms[name, *fault] += 1
            self.replicas[name].harm(fault)
        await asyncio.sleep(self.rng.uniform(1, 6))
        for name in sorted(harmed, key=lambda name: self.replicas[name].killed):  # apply waits for who stands still
            await asyncio.to_thread(self.replicas[name].mend)
        # Whoever asked before has tried those that were harmed: the next fault is for others.
        before = set(self.open)
        await until(lambda: not before & self.open.keys(), 120)
        await asyncio.to_thread(wait_for, self.ready)

    async def ask_for_ever(self, http, number):
        turn = number
        while not self.over:
            turn += CLIENTS
            self.open[turn] = True
            stream = turn % 3 == 0
            body = {"model": "tiny", "messages": [{"role": "user", "content": f"say {turn}"}], "max_tokens": 8}
            async with http.post(f"{self.url}/v1/chat/completions", json=body | {"stream": stream}) as answer:
                text = await answer.text()
            kind = self.kind(answer.status, text, stream=stream)
            self.seen[kind] += 1
            self.providers[re.split("[/@]", answer.headers.get("x-fabric-replica", ""))[0]] += kind in (
                "whole",
                "streamed",
            )
            if kind in ("error", "malformed"):
                self.wrong.append((answer.status, text[-300:]))
            del self.open[turn]

    def kind(self, status, text, *, stream):
        if status != 200:
            return "error"
        if not stream:
            return "whole" if json.loads(text)["choices"] else "error"
        events = text.split("\n\n")
        if events[-1] or any(not event.startswith("data: ") for event in events[:-1]):
            return "malformed"
        if events[-2] == "data: [DONE]":
            return "streamed"
        told = json.loads(events[-2].removeprefix("data: "))
        lost = told.get("error", {}).get("fabric_code") in ("FT8106", "FT8109")
        return "lost in mid-stream, and told so" if lost and "[DONE]" not in text else "malformed"


def engine_of(bed, address):
    """The pid of a replica's engine, as its agent says."""
    unit = bed.units()[address, "running"]
    cluster = next(c for c in bed.clusters().values() if c.state(unit.operation) is not None)
    return cluster.document(unit.operation).engine.pid


def test_a_fabric_with_a_real_vllm_under_faults(fabric_bed, random_model, tmp_path):
    bed, spare = fabric_bed, tmp_path / "vllm"
    spare.mkdir()
    bed.write(blueprint=BLUEPRINT.replace("FT_TEST_KEY}", f"FT_TEST_KEY, {TERMS}}}"))
    bed.up()
    side, vllm = Contributor(bed), Vllm(spare, random_model, "tiny")
    try:
        vllm.start()
        vllm.wait()
        side.start_issuer()
        side.token("token", "--models", "tiny")
        join = side.join("job", "token", "--url", vllm.url, "--model", "tiny")

        def of_apply(address):
            def agent():
                return bed.units()[address, "running"].pid

            return Replica(agent, lambda: engine_of(bed, address), lambda: bed.run("apply", "--yes", code=None))

        def ready():
            status = json.loads(bed.run("status", "--json").stdout)
            return [model["ready"] for model in status["gateway"]["models"]] == [3]

        replicas = {name: of_apply(f"replica/{name}") for name in ("tiny/0", "tiny/1")}
        replicas["joined"] = Replica(lambda: join.pid, lambda: vllm.process.pid, None)
        try:
            wait_for(ready, join, 120)
        except AssertionError:
            pytest.fail(side.log("job"))
        churn = Churn(bed.url, replicas, {"tiny/0": FAULTS, "tiny/1": FAULTS, "joined": STOPS}, ready)
        asyncio.run(churn.run(SECONDS))
        print(dict(churn.seen), dict(churn.providers), {" ".join(map(str, k)): n for k, n in churn.harms.items()})
        assert churn.wrong == []
        assert min(churn.providers[name] for name in ("tiny", "joined")) > 0
        totals = json.loads(bed.run("status", "--json").stdout)["gateway"]["totals"]
        assert totals["in_flight"] == 0
        assert totals["requests"] == churn.seen.total()
        bed.run("destroy", "--yes")
    finally:
        side.clean_up()
        vllm.stop()
    store = RecordStore(str(records_folder(bed.folder / "state/t/clusters/one", "t", "main") / RECORDS_FILE))
    tokens = REQUESTS.c.prompt_tokens + REQUESTS.c.completion_tokens
    ((count, used),) = store.read(select(func.count(), func.sum(tokens)))
    left = store.take("t:tester", time.strftime("%Y-%m", time.gmtime()), wanted=BUDGET, limit=BUDGET)
    store.close()
    assert count == churn.seen.total()
    lost = churn.seen["lost in mid-stream, and told so"]
    assert used <= BUDGET - left <= used + lost * 1000, "what was not counted is estimated"
