"""What needs somebody: who, since when, why, and what to type. From a look and what went before it."""

from __future__ import annotations

import shlex
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fabrictool.base.text import visible
from fabrictool.domain.address import Address
from fabrictool.status.fleet import NEEDS_SOMEBODY
from fabrictool.tui.rows import FEW, LEVELS, PART, Level, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.domain.state import ModelPromise
    from fabrictool.status.documents import GatewayStatus, ModelRow, ServiceRow
    from fabrictool.status.sightings import OperatorView, Sighting, UnitView
    from fabrictool.tui.history import History

WALLTIME_S = 900.0
"""Before an allocation ends it is worth a look."""
CERTIFICATE_S = 4 * 3600.0
HEAL, MEMBERS = "fabrictool reconcile", "fabrictool mesh members"
SLOWER, LEAST_S = 3.0, 0.2
"""A replica is slow that takes so many times as long to the first token as half of its model's others do, and so many
seconds.
"""
WAITING_STATES = ("pending", "starting")
OVER = ("missing", "killed", "ended")
"""States of a unit of which nothing runs; `reconcile` starts it again, and its log is where it was."""
ApplyState = Literal["done", "in part", "interrupted", "under way", "not ended"]
SILENT_S = 300.0
"""An apply that wrote nothing for so long may have died."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is not as it should be."""

    subject: str
    level: Level
    what: str
    since: float | None
    """Wall time; None: from before the first look."""
    why: str
    command: str

    @property
    def key(self) -> str:
        """The same in each look at it, wherever it stands; of a sentence it is all that there is."""
        return PART.join((self.subject, self.what, *([self.why] if self.what in ("drift", "warning") else [])))


def troubles(look: Sighting, history: History, now: float) -> list[Trouble]:
    """The worst first, then the newest; by name where nothing says which is newer."""
    listed: list[Trouble] = []
    gateway = look.gateway
    units = {unit.address.partition("/")[2]: unit for unit in look.operator.units} if look.operator else {}
    if gateway is not None:
        listed += _of_models(gateway, look.operator, history)
        listed += _of_nodes(look, gateway, units, history, now)
        listed += _slow(gateway)
        listed += _flapping(gateway, history, now)
    elif look.mesh is not None:
        listed += _of_members(look, now)
    if look.operator is not None:
        served = _followed(gateway) if gateway is not None else set()
        listed += _of_apply(look.operator, now - look.at)
        listed += _of_operator(look.operator, {trouble.subject for trouble in listed} | served)
    return sorted(listed, key=lambda t: (LEVELS.index(t.level), -(t.since or 0.0), t.subject))


def missed_targets(model: ModelRow, targets: tuple[float | None, float | None]) -> list[str]:
    """Which of the SLO's targets the measured 95th percentiles are over."""
    measured = (("TTFT", model.ttft_p95_s, targets[0]), ("TPOT", model.tpot_p95_s, targets[1]))
    return [
        f"{name} p95 {seconds_text(value)} over {seconds_text(target)}"
        for name, value, target in measured
        if value is not None and target is not None and value > target
    ]


def beyond_forecast(model: ModelRow, promise: ModelPromise | None) -> tuple[bool, bool]:
    """Whether the measured times to the first token, and for each further one, are above the forecast's band; of few
    answers nothing can be said.
    """
    if promise is None or model.samples < FEW:
        return False, False
    ttft, tpot = model.ttft_p95_s, model.tpot_p95_s
    return (
        ttft is not None and ttft > promise.ttft_p95_s.high,
        tpot is not None and tpot > promise.tpot_p95_s.high,
    )


def _of_models(gateway: GatewayStatus, operator: OperatorView | None, history: History) -> Iterator[Trouble]:
    targets = operator.targets if operator is not None else {}
    for model in gateway.models:
        wanted = model.wanted
        if wanted and not model.ready:
            yield Trouble(model.model, "bad", "not served", None, f"0 of {wanted} replicas are ready", HEAL)
        elif wanted and model.ready < wanted and (model.planned is None or model.ready < model.planned - model.dormant):
            why = f"{model.ready} of {wanted} replicas are ready"
            yield Trouble(model.model, "worth a look", "degraded", None, why, HEAL)
        missed = missed_targets(model, targets.get(model.model, (None, None)))
        if missed:
            yield Trouble(model.model, "worth a look", "misses its SLO", None, "; ".join(missed), "fabrictool plan")
        failing = history.rate("failures", model.model)
        if failing:
            why = f"{failing:.2g} a second fail, {model.failures} of {model.requests} in all"
            yield Trouble(model.model, "bad", "requests fail", None, why, "fabrictool events")


def _followed(gateway: GatewayStatus) -> set[str]:
    """Replicas that somebody serves now; what clusters said of them some seconds ago is over."""
    return {
        service.replica
        for node in gateway.nodes
        for service in node.services
        if node.connected and service.lifecycle == "SERVING"
    }


def _of_nodes(
    look: Sighting, gateway: GatewayStatus, units: dict[str, UnitView], history: History, now: float
) -> Iterator[Trouble]:
    followed = _followed(gateway)
    asked_s = look.at - look.operator.at if look.operator is not None else 0.0
    for node in gateway.nodes:
        replicas = [service.replica for service in node.services if service.lifecycle in ("JOIN", "SERVING")]
        name = replicas[0] if replicas else node.node or node.session[:8]
        command = _logs(name) if replicas else MEMBERS
        unit = units.get(name)
        notes = [service.note for service in node.services if service.note]
        gone = not node.connected and node.role != "gateway" and node.lifecycle in ("JOIN", "SERVING")
        # A killed agent is known for minutes; once another one serves its replica, nobody needs to do anything.
        if gone and not (replicas and followed.issuperset(replicas)):
            why = notes[-1] if notes else "its tunnel broke"
            stale = node.disconnected_at is None or now - node.disconnected_at < asked_s
            if unit is not None and not (stale and unit.state == "running"):  # its cluster says what has become of it
                why = unit.detail or why if unit.state == "running" else unit_text(unit)
            where = "/".join(filter(None, (node.cluster, node.node)))
            since = max(node.disconnected_at or 0.0, history.since(name) or 0.0) or None
            over = unit is not None and unit.state in OVER
            yield Trouble(name, "bad", "lost", since, f"{where}: {why}", HEAL if over else command)
        if node.connected and node.ends_at is not None and node.ends_at - now < WALLTIME_S:
            left = max(0.0, node.ends_at - now)
            why = f"its allocation ends in {left / 60:.0f} min"
            yield Trouble(name, "worth a look", "ends soon", None, why, HEAL)
        ends = node.certificate_ends_at
        if node.connected and ends is not None and ends - now < CERTIFICATE_S:
            why = f"its certificate ends in {max(0.0, ends - now) / 60:.0f} min"
            yield Trouble(name, "worth a look", "certificate", None, why, HEAL)
    missing = [replica for model in gateway.models for replica in model.missing]
    for replica in missing:
        unit = units.get(replica)
        why = "planned, and no node serves or loads it"
        if unit is not None:
            before = "no node serves it; its cluster said last: " if unit.state == "running" else ""
            why = f"{before}{unit_text(unit)}"
        waits = unit is not None and unit.state in WAITING_STATES
        level: Level = "worth a look" if waits else "bad"
        command = _logs(replica) if unit is not None and unit.state not in OVER else HEAL
        yield Trouble(replica, level, "missing", history.since(replica), why, command)


def _flapping(gateway: GatewayStatus, history: History, now: float) -> Iterator[Trouble]:
    replicas = {service.replica for node in gateway.nodes for service in node.services}
    replicas.update(replica for model in gateway.models for replica in model.missing)
    for name, count in history.flapping(now).items():
        why = f"changed {count} times in 10 min"
        command = _logs(name) if name in replicas else MEMBERS
        yield Trouble(name, "worth a look", "flapping", history.since(name), why, command)


def _slow(gateway: GatewayStatus) -> Iterator[Trouble]:
    """Replicas beside the others of their model."""
    by_model: dict[str, list[ServiceRow]] = {}
    for node in gateway.nodes:
        for service in node.services:
            if node.connected and service.lifecycle == "SERVING" and service.ttft_s is not None:
                by_model.setdefault(service.model, []).append(service)
    for services in by_model.values():
        in_order = sorted(service.ttft_s or 0.0 for service in services)
        for service in services:
            taken = service.ttft_s or 0.0
            if taken <= LEAST_S or len(services) < 2:
                continue
            usual = median_without(in_order, taken)
            if taken > SLOWER * usual:
                why = f"TTFT {seconds_text(taken)}, half of its model's others take {seconds_text(usual)} at most"
                why += f"; {service.waiting} wait there"
                yield Trouble(service.replica, "worth a look", "slow", None, why, _logs(service.replica))


def median_without(in_order: list[float], value: float) -> float:
    """Of all the others: its own time would move the median of few, and of two it would be half of that."""
    at = bisect_left(in_order, value)
    lower, upper = (len(in_order) - 2) // 2, (len(in_order) - 1) // 2
    return (in_order[lower + (lower >= at)] + in_order[upper + (upper >= at)]) / 2


def _of_members(look: Sighting, now: float) -> Iterator[Trouble]:
    """As an agent knows them."""
    mesh = look.mesh
    for member in mesh.members if mesh is not None else ():
        if member.state in NEEDS_SOMEBODY:
            replicas = [service.replica for service in member.services]
            name = replicas[0] if replicas else member.node or member.session[:8]
            says = ", ".join(sorted({word for told in member.accusations for word in told.evidence}))
            where = "/".join(filter(None, (member.cluster, member.node)))
            why = f"{where}: hubs say {says}" if says else where
            level: Level = "worth a look" if member.state == "suspected" else "bad"
            yield Trouble(name, level, member.state, member.lost_at, why, MEMBERS)
        elif member.ends_at is not None and member.ends_at - now < WALLTIME_S and member.role == "agent":
            why = f"its allocation ends in {max(0.0, member.ends_at - now) / 60:.0f} min"
            yield Trouble(member.node or member.session[:8], "worth a look", "ends soon", None, why, HEAL)


def unit_text(unit: UnitView) -> str:
    """Its state and why, as its cluster says it."""
    return f"{unit.state}: {unit.detail}" if unit.detail else unit.state


def apply_state(operator: OperatorView) -> ApplyState | None:
    """Of the last apply, which may have been a destroy or a reconcile; None: there was none."""
    lines = operator.journal
    begun = max((at for at, line in enumerate(lines) if line.kind == "begin"), default=0)
    if not lines:
        return None
    kinds = {line.kind for line in lines[begun:]}  # after its end it may tell of what it waits for
    last = {line.address: line.kind for line in lines[begun:] if line.address}
    if not {"failed", "capped"}.isdisjoint(last.values()):  # it writes no end then, for the next one is to go on
        return "in part"
    if "end" in kinds:
        return "done"
    if lines[-1].kind == "interrupted":
        return "interrupted"
    return "under way" if operator.at - lines[-1].at < SILENT_S else "not ended"


def _of_apply(operator: OperatorView, ahead: float) -> Iterator[Trouble]:
    """`ahead`: of this clock that of who answers."""
    state = apply_state(operator)
    if state in ("interrupted", "not ended"):
        last = operator.journal[-1]
        why = "the same command again goes on where it stopped"
        if state == "not ended":
            why = f"no word of it for {(operator.at - last.at) / 60:.0f} min: it waits, or its process died"
        yield Trouble(f"apply {last.plan[:8]}", "worth a look", state, last.at + ahead, why, "fabrictool events")


def _of_operator(operator: OperatorView, told: set[str]) -> Iterator[Trouble]:
    for cluster, why in sorted(operator.unknown.items()):
        yield Trouble(cluster, "bad", "cluster unknown", None, why, f"fabrictool doctor {quoted(cluster)}")
    for unit in operator.units:
        name = unit.address.partition("/")[2]
        if name in told or unit.state in ("running", "dormant"):
            continue
        level: Level = "worth a look" if unit.state in WAITING_STATES else "bad"
        command = HEAL if unit.state in OVER else logs_command(unit.address)
        yield Trouble(name, level, unit.state, None, unit.detail or "its cluster says no more", command)
    for text in operator.warnings:
        yield Trouble("operator", "worth a look", "warning", None, text, "fabrictool doctor")
    for text in operator.drift:
        yield Trouble("drift", "worth a look", "drift", None, text, "fabrictool plan")


def quoted(name: str) -> str:
    """A word of a command that others chose: whoever pastes it runs nothing of it."""
    return shlex.quote(visible(name))


def logs_command(address: str) -> str:
    """Of a unit; one whose address cannot be read has no log to name."""
    return "fabrictool status" if Address.parse(address).kind == "damaged" else f"fabrictool logs {quoted(address)}"


def _logs(replica: str) -> str:
    return logs_command(f"replica/{replica}")
