"""Where looks come from: a recording, or a fabric that is made up; a live one is the command line's affair."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Protocol

from fabrictool import __version__
from fabrictool.domain.plan import Band
from fabrictool.domain.state import ModelPromise
from fabrictool.status.documents import Event, GatewayStatus, ModelRow, NodeRow, ServiceRow, Totals
from fabrictool.status.sightings import JournalLine, OperatorView, Sighting, UnitView

if TYPE_CHECKING:
    from collections.abc import Sequence


class Feed(Protocol):
    """Asked again and again, in a thread of its own."""

    def look(self) -> Sighting:
        """What there is to see now; trouble is said in the look, not raised."""

    def log(self, address: str) -> list[str]:
        """The tail of a unit's log, as far as it can be had. Raises FabrictoolError where it cannot."""


class Playback:
    """A recording, at the place where somebody looks."""

    def __init__(self, looks: Sequence[Sighting]) -> None:
        self.looks = looks
        self.at = 0

    @property
    def moment(self) -> Sighting:
        return self.looks[self.at]

    def step(self, looks: int) -> None:
        """Forth or back, up to either end."""
        self.at = max(0, min(len(self.looks) - 1, self.at + looks))

    def jump(self, share: float) -> None:
        """To a share of its length, by time."""
        first, last = self.looks[0].at, self.looks[-1].at
        wanted = first + share * (last - first)
        before = (at for at, look in enumerate(self.looks) if look.at <= wanted)
        self.at = len(self.looks) - 1 if share >= 1.0 else max(before, default=0)


CLUSTERS = (("clariden", "cscs", "gh200", 4), ("bristen", "cscs", "a100-80g", 4), ("euler", "eth", "h100-sxm", 8))
MADE_UP = (("llama-70b", 12.0, 0.9), ("qwen-32b", 18.0, 0.6), ("apertus-8b", 55.0, 0.25))
"""Model, requests/s, seconds to the first token."""
MADE_UP_PLAN = "5eed0000" * 2


class MadeUpFabric:
    """A fabric that does not exist, for `top --demo`: nodes come and go, a model is slow for a while."""

    def __init__(self, nodes: int = 60, *, begun: float = 0.0, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._nodes, self._begun, self._tick = nodes, begun, 0
        self._lost: dict[int, float] = {}
        self._requests = [0.0] * len(MADE_UP)
        self._failed = 0
        self._events: list[Event] = []

    def look(self) -> Sighting:
        """The fabric a second after the look before."""
        self._tick += 1
        now = self._begun + self._tick
        self._change(now)
        waves = [1.0 + 0.6 * math.sin(self._tick / (20 + 7 * n)) for n in range(len(MADE_UP))]
        for n, (_, rate, _) in enumerate(MADE_UP):
            self._requests[n] += rate * waves[n]
        nodes = [self._node(n, now) for n in range(self._nodes)]
        models = [self._model(n, waves[n], nodes) for n in range(len(MADE_UP))]
        gateway = GatewayStatus(
            release=__version__,
            at=now,
            started_at=self._begun,
            fabric="made-up",
            session="d3m0" * 8,
            listen="127.0.0.1:8011",
            mesh="127.0.0.1:8012",
            policy="least-loaded",
            nodes=nodes,
            models=models,
            totals=Totals(
                requests=int(sum(self._requests)),
                failures=self._failed,
                in_flight=sum(model.in_flight for model in models),
                tokens=sum(model.tokens for model in models),
            ),
            registry_records=2 * self._nodes,
            registry_root="00",
            events=list(self._events[-50:]),
        )
        return Sighting(at=now, live=gateway, operator=self._operator(nodes, now), asked="a made-up fabric")

    def log(self, address: str) -> list[str]:
        """Lines that no engine wrote."""
        return [f"{address}: this fabric is made up, and so is its log"]

    def _change(self, now: float) -> None:
        for n, since in list(self._lost.items()):
            if now - since > 25 + n % 40:
                del self._lost[n]
                self._events.append(Event(at=now, kind="link-up", subject=_replica(n), text="it is back"))
        if self._tick % 15 == 5:
            n = self._rng.randrange(self._nodes)
            self._lost.setdefault(n, now)
            self._failed += self._rng.randrange(3)
            self._events.append(Event(at=now, kind="link-down", subject=_replica(n), text="its tunnel broke"))

    def _node(self, n: int, now: float) -> NodeRow:
        cluster, provider, device, devices = CLUSTERS[n % len(CLUSTERS)]
        lost = self._lost.get(n)
        busy = 0.5 + 0.4 * math.sin(self._tick / 15 + n)
        model = MADE_UP[n % len(MADE_UP)][0]
        service = ServiceRow(
            service=f"{n:032x}", replica=_replica(n), model=model, engine="vllm", precision="fp8", context=32768,
            tp=devices, lifecycle="SERVING", accepting=True, running=int(24 * busy), waiting=int(3 * busy),
            kv_use=busy, in_flight=int(24 * busy), requests=self._tick * 2 + n, ttft_s=0.3 + 0.5 * busy,
            tpot_s=0.02 + 0.02 * busy,
        )  # fmt: skip
        return NodeRow(
            session=f"{n:032x}", role="agent", provider=provider, site=provider, cluster=cluster,
            node=f"{cluster}-n{n:03}", lifecycle="SERVING", connected=lost is None, disconnected_at=lost,
            device=device, devices=devices, memory=devices * 96 << 30, ends_at=self._begun + 3600 + 300 * (n % 40),
            certificate_ends_at=self._begun + 86400, release=__version__, services=[service],
        )  # fmt: skip

    def _model(self, n: int, wave: float, nodes: Sequence[NodeRow]) -> ModelRow:
        name, rate, first = MADE_UP[n]
        mine = [node for node in nodes if node.services[0].model == name]
        slow = 1.0 + (1.2 if n == 1 and self._tick % 90 > 60 else 0.0)
        return ModelRow(
            model=name, ready=sum(node.connected for node in mine), replicas=len(mine), planned=len(mine),
            providers=sorted({node.provider for node in mine}), in_flight=int(rate * wave * 4),
            requests=int(self._requests[n]), failures=self._failed if n == 0 else 0,
            tokens=int(self._requests[n] * 180), ttft_p50_s=first * 0.6 * slow, ttft_p95_s=first * slow,
            tpot_p50_s=0.02, tpot_p95_s=0.031, samples=200,
        )  # fmt: skip

    def _operator(self, nodes: Sequence[NodeRow], now: float) -> OperatorView:
        units = [
            UnitView(
                address=f"replica/{node.services[0].replica}", cluster=node.cluster, state="running",
                ready=node.connected, engine="ready", job=str(4_100_000 + n), ends_at=node.ends_at,
                operation=f"replica-{node.services[0].replica.replace('/', '-')}-g1",
                detail="" if node.connected else "its node does not answer",
            )
            for n, node in enumerate(nodes)
        ]  # fmt: skip
        waiting = UnitView(
            address="replica/llama-70b/99", cluster="euler", state="pending", job="4200000",
            detail="Resources: four nodes with h100-sxm are awaited", begins_at=self._begun + 5400,
        )  # fmt: skip
        journal = [
            JournalLine(at=self._begun - 60, plan=MADE_UP_PLAN, kind="done", address=unit.address, action="create")
            for unit in units
        ]
        begin = JournalLine(at=self._begun - 90, plan=MADE_UP_PLAN, kind="begin", text=f"{len(units)} changes")
        end = JournalLine(at=self._begun - 60, plan=MADE_UP_PLAN, kind="end")
        return OperatorView(
            at=now,
            units=[*units, waiting],
            drift=["replica/llama-70b/99 is not there yet"],
            journal=[begin, *journal, end],
            targets={name: (first * 1.5, 0.04) for name, _, first in MADE_UP},
            forecasts={
                name: ModelPromise(
                    ttft_p95_s=Band(first * 0.95, first * 0.8, first * 1.1),
                    tpot_p95_s=Band(0.03, 0.026, 0.034),
                    slo="meets",
                    attainment=0.996,
                )
                for name, _, first in MADE_UP
            },
        )


def _replica(n: int) -> str:
    return f"{MADE_UP[n % len(MADE_UP)][0]}/{n // len(MADE_UP)}"
