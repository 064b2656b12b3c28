"""Where requests can go: the replicas behind this gateway, from the mesh's registry or from a static list.

Both sources fill the same `RoutingTarget`s, so that everything above them is one code.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fabrictool.domain.specs import Pairing, Phase, label_key, weight_key
from fabrictool.gateway.upstream import Connector, TunnelConnector
from fabrictool.routing.candidates import TrustPolicy, entitled
from fabrictool.routing.dealing import UNDIVIDED
from fabrictool.routing.ejection import Ejection
from fabrictool.routing.requirements import ANYTHING, Requirements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from fabrictool.domain.steps import MeasuredSteps
    from fabrictool.mesh.registry import Serving
    from fabrictool.mesh.transport.listener import Load
    from fabrictool.mesh.transport.node import MeshNode
    from fabrictool.routing.candidates import Refusal


Entitlement = tuple[str, TrustPolicy, str | None, frozenset[str] | None, Requirements | None, bool]
ENTITLED_KEPT: Final = 4096
CHAINS_KEPT: Final = 10_000
"""Answers that a later request may refer to; the oldest are forgotten."""
SERVICE_OCTETS: Final = 16
"""Of a service's id; in the key of an adapter's target its name follows."""
NEWS: Final = 0.1
"""What the last stream counts in a moving mean."""
MISSED_KEPT: Final = 10_000
MISSED_S: Final = 600.0
"""After its last replica was lost a model that is not planned is missed for so long; then it counts as not there."""


@dataclass(frozen=True, slots=True)
class Unmet:
    """What a request asks for and no replica that may serve it is."""

    words: str


class RoutingTarget:
    """One replica as this gateway sees it; a ``routing.protocol.Candidate``."""

    __slots__ = (
        "by_priority", "connector", "context", "declared_slots", "device", "ejection", "engine", "failures", "foreign",
        "group_weights", "in_flight", "introduction", "key", "kv_use", "labelled_as", "labels", "meets_at", "model",
        "pairing", "phase", "precision", "provider", "replica", "requests", "running", "shares", "site", "slots",
        "steps", "tpot_s", "ttft_s", "waiting", "weighed_as", "weight",
    )  # fmt: skip

    # Wide: all that is known of a replica.
    def __init__(
        self,
        key: bytes,
        model: str,
        provider: str,
        connector: Connector,
        replica: str,
        context: int = 0,
        weight: float = 1.0,
        weighed_as: str = "",
        device: str = "",
        precision: str = "",
        engine: str = "",
        phase: Phase = "unified",
        pairing: Pairing = "relayed",
        meets_at: tuple[str, int] | None = None,
        site: str = "",
        labels: frozenset[str] = frozenset(),
        labelled_as: str = "",
        steps: MeasuredSteps | None = None,
        by_priority: bool = False,
        slots: int = 0,
        declared_slots: int = 0,
        session: str = "",
    ) -> None:
        """`session`: the beginning of its agent's, as answers tell it; "": nobody's."""
        self.key = key
        self.model = model
        self.provider = provider
        self.connector: Connector = connector
        self.replica = replica
        whose = f"{replica}@{session}" if session else replica
        self.introduction = f"x-fabric-provider: {provider}\r\nx-fabric-replica: {whose}\r\n"
        """Headers of its answers that say whose they are."""
        self.context = context
        self.weight = weight
        self.group_weights: Mapping[str, float] = UNDIVIDED
        self.weighed_as = weighed_as
        """Its `weight_key` without a variant; "" of one whose weight its list says."""
        self.device = device
        self.precision = precision
        self.engine = engine
        self.phase: Phase = phase
        self.pairing: Pairing = pairing
        self.meets_at: tuple[str, int] | None = meets_at
        """Of one that computes prompts ``together``: where the others find it, for their ears alone."""
        self.site = site
        self.labels: frozenset[str] = labels
        self.labelled_as = labelled_as
        """Its `label_key`; "" of one whose labels its list says."""
        self.in_flight = 0
        self.running = 0
        self.waiting = 0
        self.kv_use = 0.0
        self.foreign = 0
        """Open requests of other gateways, counted by its agent: the engine's own figures are older than ours."""
        self.requests = 0
        self.failures = 0
        self.ttft_s: float | None = None
        """To the first octet of streams, a moving mean of what this gateway saw; None: it saw none."""
        self.tpot_s: float | None = None
        self.steps: MeasuredSteps | None = steps
        """How long its steps take, as measured before it served."""
        self.by_priority = by_priority
        """Its engine serves requests by their ``priority``."""
        self.slots = slots
        """Requests that it works on at the same time, as declared or as its engine's queue showed; 0: unknown."""
        self.declared_slots = declared_slots
        self.ejection: Ejection = Ejection()
        """One for all targets of a server."""
        self.shares: list[RoutingTarget] = []
        """The same server's targets for its other models: their requests load it too."""

    @property
    def in_rooms(self) -> bool:
        """Whether it answers nothing alone: who it works with joins it in a room, at once."""
        return self.phase != "unified" and self.pairing == "together"

    @property
    def ready(self) -> bool:
        """Whether its server can be reached, as far as is known."""
        return self.connector.ready

    @property
    def load(self) -> float:
        """Our own open requests, exactly, and those of others, as of the last report."""
        if not self.shares:
            return self.in_flight + self.foreign
        return self.in_flight + sum(other.in_flight for other in self.shares) + self.foreign

    def loaded(self, running: int, waiting: int) -> None:
        """Its engine's own figures: where requests wait in it, what runs is what it can take; else it may take more."""
        self.running, self.waiting = running, waiting
        if waiting and running:
            self.slots = min(running, self.declared_slots or running)
        elif self.slots and self.load >= self.slots and not waiting:
            self.slots += max(1, self.slots // 10)
            if self.declared_slots:
                self.slots = min(self.slots, self.declared_slots)

    def timed(self, ttft_s: float, tpot_s: float | None) -> None:
        """A stream took so long."""
        self.ttft_s = ttft_s if self.ttft_s is None else self.ttft_s + NEWS * (ttft_s - self.ttft_s)
        if tpot_s is not None:
            self.tpot_s = tpot_s if self.tpot_s is None else self.tpot_s + NEWS * (tpot_s - self.tpot_s)


def meeting_place(told: str) -> tuple[str, int] | None:
    """``address:port`` as an engine may be told it; None where it is the address of no single machine."""
    host, _, port = told.rpartition(":")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    nobodys = address.is_unspecified or address.is_multicast or address.is_link_local or address.is_reserved
    if nobodys or not 0 < int(port) < 1 << 16:
        return None
    return (f"[{address}]" if address.version == 6 else str(address)), int(port)


class Directory:
    """All targets, by model."""

    def __init__(
        self,
        weights: Mapping[str, float] = MappingProxyType({}),
        group_weights: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    ) -> None:
        """Both by `weight_key`: of what is not there `weights` are 1, and `group_weights` say nothing."""
        self.weights, self.group_weights = weights, group_weights
        self.labels: Mapping[str, tuple[str, ...]] = {}
        """By `label_key`; see `label`."""
        self._targets: dict[bytes, RoutingTarget] = {}
        self._by_model: dict[str, list[RoutingTarget]] = {}
        self.split: Counter[str] = Counter()
        """Model → how many replicas compute prompts for others."""
        self.in_rooms: Counter[str] = Counter()
        """Model → how many replicas share requests at once."""
        self._of_session: dict[bytes, set[bytes]] = {}
        self.loading: Callable[[], set[str]] = set
        """Models that engines load now."""
        self.arrived: Callable[[str], object] = str
        """Told of each model that gets a replica more."""
        self.filling_until = -math.inf
        """Monotonic seconds: until then the gateway cannot know which models there are."""
        self._served_at: dict[str, float] = {}
        """Model → when it lost a replica last."""
        self._chains: dict[str, bytes] = {}
        """Id of an answer of ``/v1/responses`` → key of the replica that keeps it."""
        self.planned: Mapping[str, tuple[int, ...]] = {}
        """Model → numbers of the replicas that it should have."""
        self.bases: Mapping[str, str] = {}
        """Adapter → the model with which it is served."""
        self.cache_octets: Mapping[str, float] = {}
        """Model → octets of one token's cache."""
        self._providers: frozenset[str] | None = None
        self._entitled: dict[Entitlement, tuple[RoutingTarget, ...] | Refusal | Unmet] = {}
        """Model, rules, group, the client's own list and what it asks for → who may serve that; emptied whenever a
        replica changes."""

    def __iter__(self) -> Iterator[RoutingTarget]:
        return iter(list(self._targets.values()))

    def of_model(self, model: str) -> list[RoutingTarget]:
        """The replicas of a model, ready or not."""
        return self._by_model.get(model, [])

    def context(self, model: str) -> int | None:
        """Of a model's replicas the largest, 0 if one of them does not say; None: there are none."""
        most: int | None = None
        for target in self.of_model(model):
            if not target.context:
                return 0
            most = target.context if most is None else max(most, target.context)
        return most

    # Wide: what is asked for, and by whom.
    def entitled(
        self,
        model: str,
        trust: TrustPolicy,
        group: str | None,
        requested: frozenset[str] | None,
        required: Requirements = ANYTHING,
        *,
        prefill: bool = False,
    ) -> tuple[RoutingTarget, ...] | Refusal | Unmet:
        """Who may serve such a request and is what it asks for, ready or not; with `prefill` those that may compute its
        prompt for another replica.
        """
        if requested is not None:  # what a client writes is kept: no name but those that are here
            requested &= self._here()
        key = (model, trust, group, requested, None if required is ANYTHING else required, prefill)
        known = self._entitled.get(key)
        if known is None:
            if len(self._entitled) >= ENTITLED_KEPT:
                self._entitled.clear()
            replicas: Iterable[RoutingTarget] = self.of_model(model)
            if model in self.split:
                replicas = [t for t in replicas if (t.phase == "prefill") is prefill] or replicas
            known = entitled(replicas, model=model, trust=trust, group=group, requested=requested)
            if known == "unknown-model":
                return known
            if required != ANYTHING and not isinstance(known, str):
                narrowed = required.narrow(known)
                known = Unmet(narrowed) if isinstance(narrowed, str) else narrowed
            self._entitled[key] = known
        return known

    def may_come(self, model: str, now: float) -> bool:
        """Whether a model that nobody serves now may be served soon; `now` in monotonic seconds."""
        served_at = self._served_at.get(model, -math.inf)
        if self.bases.get(model, model) in self.planned:
            return True  # its job waits in a queue, for days perhaps, or it is started anew
        return now < self.filling_until or model in self.loading() or now < served_at + MISSED_S

    def get(self, key: bytes) -> RoutingTarget | None:
        return self._targets.get(key)

    def keeps(self, response: str, key: bytes) -> None:
        """A replica gave this answer, and keeps it for the next request of the chain."""
        self._chains.pop(response, None)
        self._chains[response] = key
        if len(self._chains) > CHAINS_KEPT:
            del self._chains[next(iter(self._chains))]

    def keeper(self, response: str) -> bytes | None:
        """Key of the replica that gave this answer, as far as this gateway knows."""
        return self._chains.get(response)

    def models(self) -> list[str]:
        return sorted(self._by_model)

    def replace(self, targets: Iterable[RoutingTarget]) -> None:
        """Install a new set; counters of targets that stay are kept by keeping the objects."""
        self._changed()
        self._targets = {target.key: target for target in targets}
        self._by_model = {}
        self.split.clear()
        self.in_rooms.clear()
        for target in self._targets.values():
            self._put(target)

    def weigh(
        self, weights: Mapping[str, float], group_weights: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    ) -> None:
        """Deal out by other weights from now on."""
        self.weights, self.group_weights = weights, group_weights
        self._changed()  # the rules are others, too
        for target in self._targets.values():
            if target.weighed_as:
                self._weigh(target)

    def _weigh(self, target: RoutingTarget) -> None:
        """As one of its model's variants, where the plan tells these apart."""
        kind, variant = target.weighed_as, f"{target.weighed_as} {target.engine} {target.precision}"
        target.weight = self.weights.get(variant, self.weights.get(kind, 1.0))
        target.group_weights = self.group_weights.get(variant, self.group_weights.get(kind, UNDIVIDED))

    def label(self, labels: Mapping[str, tuple[str, ...]]) -> None:
        """What requests may ask for of nodes, from now on."""
        self.labels = labels
        self._changed()
        for target in self._targets.values():
            if target.labelled_as:
                target.labels = frozenset(labels.get(target.labelled_as, ()))

    def follow(self, session: bytes, serving: Iterable[Serving], mesh: MeshNode, now: float) -> None:
        """Make a session's targets those that serve now; who is known already keeps its counters."""
        keys = {
            entry.service.session + entry.service.service + adapter.encode(): (entry, adapter)
            for entry in serving
            for adapter in ("", *entry.service.adapters)
        }
        if keys.keys() != self._of_session.get(session, set()):
            self._changed()
        for key in self._of_session.get(session, set()) - keys.keys():
            target = self._targets.pop(key)
            self._served_at.pop(target.model, None)
            self._served_at[target.model] = now
            if len(self._served_at) > MISSED_KEPT:
                del self._served_at[next(iter(self._served_at))]
            self._drop(target)
        for key, (entry, adapter) in keys.items():
            if key not in self._targets:
                self._targets[key] = target = self._target(key, entry, mesh)
                if adapter:
                    self._stand_on(target, adapter, self._targets[entry.service.session + entry.service.service])
                self._put(target)
                self.arrived(target.model)
        if keys:
            self._of_session[session] = set(keys)
        else:
            self._of_session.pop(session, None)

    def _stand_on(self, target: RoutingTarget, adapter: str, base: RoutingTarget) -> None:
        """One engine serves both: what loads or fails the one does so to the other."""
        target.model, target.connector, target.ejection = adapter, base.connector, base.ejection
        together = [base, *base.shares, target]
        for member in together:
            member.shares = [other for other in together if other is not member]

    def _here(self) -> frozenset[str]:
        """The providers of all replicas."""
        if self._providers is None:
            self._providers = frozenset(target.provider for target in self._targets.values())
        return self._providers

    def _changed(self) -> None:
        """Replicas, or rules: what is known of who may serve whom does not hold any more."""
        self._entitled.clear()
        self._providers = None

    def _put(self, target: RoutingTarget) -> None:
        self._by_model.setdefault(target.model, []).append(target)
        if target.phase == "prefill":
            self.split[target.model] += 1
        if target.in_rooms:
            self.in_rooms[target.model] += 1

    def _drop(self, target: RoutingTarget) -> None:
        others = self._by_model[target.model]
        others.remove(target)
        if not others:
            del self._by_model[target.model]
        if target.phase == "prefill":
            self.split[target.model] -= 1
            self.split = +self.split
        if target.in_rooms:
            self.in_rooms[target.model] -= 1
            self.in_rooms = +self.in_rooms

    def _target(self, key: bytes, entry: Serving, mesh: MeshNode) -> RoutingTarget:
        node, service = entry.node, entry.service
        told = mesh.registry.assignment(node.session) if service.assigned else None
        unit = service.unit or (told.unit if told is not None else None)  # agents of an earlier release do not say it
        partition = unit.partition if unit is not None else node.node
        labelled_as = label_key(node.provider, node.cluster, partition)
        weighed_as = weight_key(service.model, node.cluster, partition, service.tp, service.dp)
        target = RoutingTarget(
            key,
            service.model,
            node.provider,
            TunnelConnector(mesh, service.session, service.service),
            service.replica,
            context=service.context,
            weighed_as=weighed_as,
            device=node.hardware.device if node.hardware else "",
            precision=service.precision,
            engine=service.engine,
            phase=service.phase,
            pairing=service.pairing,
            meets_at=meeting_place(service.meets_at or ""),
            site=node.site,
            labels=frozenset(self.labels.get(labelled_as, ())),
            labelled_as=labelled_as,
            steps=service.steps,
            by_priority=service.by_priority,
            slots=service.max_num_seqs,
            declared_slots=service.max_num_seqs,
            session=service.session.hex()[:8],
        )
        self._weigh(target)
        return target

    def report(self, session: bytes, load: Load) -> None:
        """Volatile load from an agent's beat; none: a relayed tunnel was closed for want of requests.

        What it brought last must not stand: a replica that seemed busy then would never be asked again.
        """
        if not load:
            keys = self._of_session.get(session, ())
            load = tuple(
                (key[len(session) :], 0, 0, 0.0, 0) for key in keys if len(key) == len(session) + SERVICE_OCTETS
            )
        for service, running, waiting, kv_use, foreign in load:
            base = self._targets.get(session + service)
            for target in () if base is None else (base, *base.shares):
                target.loaded(running, waiting)
                target.kv_use, target.foreign = kv_use, foreign
