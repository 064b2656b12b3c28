"""A row in full: what is known of a model, a node, a replica or a unit, and which commands go with it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fabrictool.base.text import visible
from fabrictool.status.documents import AgentStatus, GatewayStatus
from fabrictool.status.elastic import in_words
from fabrictool.tui.problems import (
    HEAL,
    MEMBERS,
    OVER,
    WAITING_STATES,
    beyond_forecast,
    logs_command,
    missed_targets,
    quoted,
)
from fabrictool.tui.rows import APPLY, DRIFT, EVENT_SUBJECT, PART, passed_text, seconds_text, until_text
from fabrictool.tui.view import rate_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.status.documents import ModelRow, NodeRow, ServiceRow
    from fabrictool.status.sightings import UnitView
    from fabrictool.tui.view import ScreenView


@dataclass(frozen=True, slots=True)
class Subject:
    """What a row is about; empty where that is not known."""

    name: str
    model: str = ""
    session: str = ""
    replica: str = ""
    unit: UnitView | None = None
    cluster: str = ""
    commands: tuple[str, ...] = field(default=())


_OF_NO_UNIT = {
    "apply": Subject("apply", commands=("fabrictool events",)),
    "drift": Subject("drift", commands=("fabrictool plan",)),
}


def subject_of(view: ScreenView, screen: str, key: str) -> Subject:
    """Of the row with that key on that screen."""
    if screen == "overview":
        trouble = next((trouble for trouble in view.troubles if trouble.key == key), None)
        if trouble is None:  # it is over since the row was drawn
            return Subject("")
        its = _named(view, trouble.subject)
        return Subject(trouble.subject, its.model, its.session, its.replica, its.unit, commands=(trouble.command,))
    if screen == "models":
        return Subject(key, model=key, commands=("fabrictool plan --explain", "fabrictool plan"))
    if screen == "plan" and key.startswith((APPLY, DRIFT)):
        return _OF_NO_UNIT[key.partition(PART)[0]]
    if screen in ("jobs", "plan"):
        name = key.partition("/")[2]
        its = _named(view, name)
        commands = _of_unit_row(its.unit) if its.unit else (logs_command(key),)
        return Subject(name, its.model, its.session, its.replica, its.unit, commands=commands)
    if screen == "nodes":
        return _of_node_row(view, key)
    if screen == "clusters":
        return Subject(key, cluster=key, commands=(f"fabrictool doctor {quoted(key)}",))
    if screen == "events":
        return Subject(key.split(PART)[EVENT_SUBJECT], commands=("fabrictool events",))
    return Subject(key, commands=(MEMBERS,))


def lines_about(view: ScreenView, subject: Subject) -> list[str]:
    """For people; each line is fit for a terminal."""
    lines: list[str] = []
    if subject.commands:  # first: nobody scrolls to what they are to do
        lines += ["type", *(f"  {command}" for command in subject.commands), ""]
    live = view.moment.live
    for model in live.models if isinstance(live, GatewayStatus) else ():
        if model.model == subject.model:
            lines += [*_of_model(view, model), ""]
    for node in _nodes(view):
        its = [service for service in node.services if service.lifecycle in ("JOIN", "SERVING")]
        mine = its if subject.cluster else [service for service in its if service.model == subject.model]
        there = node.cluster == subject.cluster if subject.cluster else node.session == subject.session
        if there or (not subject.session and not subject.cluster and mine):
            lines += [*_of_node(view, node), *(line for service in mine for line in _of_service(service)), ""]
    if isinstance(live, AgentStatus):
        lines += [*_of_agent(live), ""]
    if subject.unit is not None:
        lines += [*_of_unit(view, subject.unit), ""]
    happened = [
        f"  {source}: {event.kind} {event.subject} {event.text}".rstrip()
        for source, event in view.events
        if subject.name and (subject.name in event.subject or subject.name in event.text)
    ]
    lines += ["events", *happened[-12:], ""] if happened else []
    return [visible(line) for line in lines or ["nothing more is known of it"]]


def _named(view: ScreenView, name: str) -> Subject:
    """A replica, a node or a model by its name."""
    operator = view.moment.operator
    units = operator.units if operator is not None else []
    unit = next((unit for unit in units if unit.address.partition("/")[2] == name), None)
    for node in _nodes(view):
        for service in node.services:
            if service.replica == name:
                return Subject(name, service.model, node.session, name, unit, commands=_of_replica(service))
        if name in (node.node, node.session[:8]):
            return Subject(name, session=node.session, unit=unit)
    live = view.moment.live
    models = {model.model for model in live.models} if isinstance(live, GatewayStatus) else set()
    model = name if name in models else name.partition("/")[0] if name.partition("/")[0] in models else ""
    return Subject(name, model, unit=unit, replica=name if "/" in name else "")


def _nodes(view: ScreenView) -> list[NodeRow]:
    live = view.moment.live
    return live.nodes if isinstance(live, GatewayStatus) else []


def _of_node_row(view: ScreenView, key: str) -> Subject:
    for node in _nodes(view):
        for service in node.services:
            if node.session + service.service == key:
                its = _named(view, service.replica)
                words = service.replica, service.model, node.session, service.replica
                return Subject(*words, its.unit, commands=_of_replica(service))
        if node.session == key:
            return Subject(node.node, session=node.session, commands=(MEMBERS,))
    its = _named(view, key)
    return replace(its, commands=its.commands or (_of_unit_row(its.unit) if its.unit else (HEAL,)))


def _of_unit_row(unit: UnitView) -> tuple[str, ...]:
    log = logs_command(unit.address)
    return (HEAL, log) if unit.state in OVER else (log,)


def _of_replica(service: ServiceRow) -> tuple[str, ...]:
    log = logs_command(f"replica/{service.replica}")
    return (log, f"{log} --follow", HEAL)


def _of_model(view: ScreenView, model: ModelRow) -> Iterator[str]:
    operator = view.moment.operator
    targets = operator.targets.get(model.model, (None, None)) if operator is not None else (None, None)
    yield f"model {model.model}: {model.ready} of {model.wanted} replicas are ready"
    asked = rate_text(view.history.rate("requests", model.model))
    yield f"  {asked} req/s now, {model.in_flight} open, {model.requests} in all, {model.failures} failed"
    promise = operator.forecasts.get(model.model) if operator is not None else None
    bands = (None, None) if promise is None else (promise.ttft_p95_s, promise.tpot_p95_s)
    late = beyond_forecast(model, promise)
    for name, median, p95, target, band, above in (
        ("TTFT", model.ttft_p50_s, model.ttft_p95_s, targets[0], bands[0], late[0]),
        ("TPOT", model.tpot_p50_s, model.tpot_p95_s, targets[1], bands[1], late[1]),
    ):
        wanted = f", target {seconds_text(target)}" if target is not None else ""
        yield f"  {name} p50 {seconds_text(median)}, p95 {seconds_text(p95)}{wanted} (of {model.samples} streams)"
        if band is not None:
            between = f"{seconds_text(band.low)} to {seconds_text(band.high)}"
            verdict = "  ▲ miss: it takes longer" if above else ""
            yield f"    the last plan forecasts {seconds_text(band.value)}, {between}{verdict}"
    if promise is not None and promise.slo:
        share = "" if promise.attainment is None else f", {promise.attainment:.1%} of requests within it"
        yield f"  the last plan forecasts of its SLO: {promise.slo}{share}"
    missed = missed_targets(model, targets)
    if missed:
        yield f"  ▲ {'; '.join(missed)}"
    for replica in model.missing:
        yield f"  ▲ {replica} is planned, and no node serves or loads it"
    if model.dormant:
        yield f"  {model.dormant} more start when somebody asks; {model.held} requests wait for that"


def _of_node(view: ScreenView, node: NodeRow) -> Iterator[str]:
    link = "linked" if node.connected else "lost"
    link += f" by hub {node.by[:8]}" if node.connected and node.by else ""
    yield f"node {node.node or node.session[:8]} of {node.cluster or '–'}, provider {node.provider}: {link}"
    if node.disconnected_at is not None and not node.connected:
        yield f"  lost {passed_text(view.there - node.disconnected_at)} ago"
    if node.device:
        free = f", free {', '.join(f'{octets / 2**30:.1f}' for octets in node.free)} GiB" if node.free else ""
        yield f"  {node.devices} × {node.device}, {node.memory / 2**30:.1f} GiB{free}"
    if node.ends_at is not None:
        yield f"  its allocation ends {until_text(node.ends_at, view.there)}"
    if node.certificate_ends_at is not None:
        yield f"  its certificate ends {until_text(node.certificate_ends_at, view.there)}"


def _of_service(service: ServiceRow) -> Iterator[str]:
    how = "" if service.accepting else ", draining"
    cut = f"tp {service.tp}" + (f", {service.dp} merging engines" if service.dp > 1 else "")
    yield f"  {service.replica}: {service.engine} {service.precision}, {cut}, {service.phase}{how}"
    yield (
        f"    {service.running} running, {service.waiting} waiting, cache {service.kv_use:.0%} full,"
        f" {service.requests} requests, {service.failures} failed"
    )
    yield f"    its last streams: TTFT {seconds_text(service.ttft_s)}, TPOT {seconds_text(service.tpot_s)}"
    if service.adapters:
        yield f"    serves {', '.join(service.adapters)}, too"
    if service.note:
        yield f"    {service.note}"


def _of_agent(agent: AgentStatus) -> Iterator[str]:
    engine = agent.engine
    yield f"agent of {agent.replica or agent.node}: engine {engine.engine} {engine.state}, {engine.restarts} restarts"
    if engine.elastic is not None:
        yield f"  {in_words(engine.elastic)}"
    for address, error in agent.dial_errors.items():
        yield f"  ▲ {address}: {error}"
    if engine.last_lines:
        yield "log"
        yield from (f"  {line}" for line in engine.last_lines)


def _of_unit(view: ScreenView, unit: UnitView) -> Iterator[str]:
    operator = view.moment.operator
    asked = "" if operator is None else f" {passed_text(view.now - operator.at)} ago"
    ready = "" if unit.ready or unit.state in OVER else ", not ready"
    yield f"unit {unit.address} on {unit.cluster}, asked{asked}: {unit.state}{ready}"
    if unit.job:
        yield f"  job {unit.job}"
    if unit.detail:
        yield f"  {unit.detail}"
    if unit.begins_at is not None and unit.state in WAITING_STATES:
        yield f"  the scheduler expects it to start {until_text(unit.begins_at, view.now)}"
    if unit.operation:
        yield f"  operation {unit.operation}"
