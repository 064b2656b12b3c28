"""``mesh observe``: what differs between two looks at the mesh, as events."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.cli.answers import StreamVersion
from fabrictool.cli.fabric_answers import MeshEventLine
from fabrictool.cli.mesh_asking import LiveFleet
from fabrictool.cli.mesh_text import short, where
from fabrictool.cli.output import data, json_line, say
from fabrictool.status.documents import Event

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fabrictool.cli.source import Source
    from fabrictool.status.fleet import Accusation, FleetMember, FleetService, FleetStatus


def follow_mesh(source: Source, url: str, interval_s: float, *, as_json: bool) -> None:
    """Until Ctrl-C; raises only when there is no answer at first."""
    with LiveFleet(source, url) as ask:
        view = ask()
        if as_json:
            json_line(StreamVersion())
        say(f"the {view.role} {short(view.session)} sees {len(view.members)} sessions; Ctrl-C ends")
        silent = False
        elsewhere: dict[str, FleetMember] = {}
        """Known from a node that does not answer any more, and not to the one that does."""
        while True:
            time.sleep(interval_s)
            try:
                fresh = ask()
            except FabrictoolError as error:
                if not silent:
                    say(f"! no answer: {error.problems[0].message}; asking again")
                silent = True
                continue
            if silent or fresh.session != view.session:
                say(f"the {fresh.role} {short(fresh.session)} answers")
            silent = False
            for event in changes(view, fresh, elsewhere):
                _show(event, as_json=as_json)
            if fresh.session != view.session:
                elsewhere |= unheard(view, fresh)
            for member in fresh.members:
                elsewhere.pop(member.session, None)
            view = fresh


def _show(event: Event, *, as_json: bool) -> None:
    if as_json:
        json_line(MeshEventLine.of(event))
        return
    stamp = time.strftime("%H:%M:%SZ", time.gmtime(event.at))
    data(f"{stamp}  {event.kind:<16} {event.subject}  {event.text}".rstrip())


def changes(
    before: FleetStatus, after: FleetStatus, elsewhere: Mapping[str, FleetMember] = MappingProxyType({})
) -> Iterator[Event]:
    """What happened between two looks; of two nodes, what of the map is different. Sessions that are known from
    `elsewhere` have not joined when this node hears of them.
    """
    former = {member.session: member for member in before.members}
    same_node = before.session == after.session
    for member in after.members:
        old = former.pop(member.session, None) or elsewhere.get(member.session)
        name = f"{short(member.session)} ({where(member)})"
        if old is None:
            yield Event(at=after.at, kind="joined", subject=name, text=f"{member.role} of {member.provider}")
        elif old.state != member.state:
            yield Event(at=after.at, kind=member.state, subject=name, text=_why(member))
        if same_node and old is not None and old.linked != member.linked:
            yield Event(at=after.at, kind="link-up" if member.linked else "link-down", subject=name, text="")
        accusations = {a.hub: a for a in old.accusations} if old is not None else {}
        for accusation in member.accusations:
            if _claim(accusations.pop(accusation.hub, None)) != _claim(accusation):
                kind = "refuted" if not accusation.stands else "voted" if accusation.votes else "accused"
                evidence = ", ".join(accusation.evidence)
                text = f"by {short(accusation.hub)} ({accusation.provider}): {evidence}"
                yield Event(at=after.at, kind=kind, subject=name, text=text)
        for hub in accusations:
            yield Event(at=after.at, kind="withdrawn", subject=name, text=f"by {short(hub)}")
        yield from _service_changes(old.services if old is not None else [], member, after.at)
    for member in former.values():
        name = f"{short(member.session)} ({where(member)})"
        if same_node or _over(member, after.at):
            yield Event(at=after.at, kind="forgotten", subject=name, text="its certificate ended long ago")


def unheard(before: FleetStatus, after: FleetStatus) -> dict[str, FleetMember]:
    """Sessions that the node of `after` has not heard of, and that may live: it was not there, or is just back."""
    there = {member.session for member in after.members}
    return {m.session: m for m in before.members if m.session not in there and not _over(m, after.at)}


def _over(member: FleetMember, now: float) -> bool:
    return member.certificate_ends_at is not None and member.certificate_ends_at < now


def _service_changes(before: list[FleetService], member: FleetMember, at: float) -> Iterator[Event]:
    former = {service.service: (service.lifecycle, service.accepting) for service in before}
    for service in member.services:
        state = service.lifecycle, service.accepting
        if former.get(service.service) != state:
            kind = f"service-{service.lifecycle.lower()}"
            if service.lifecycle == "SERVING" and not service.accepting:
                kind = "service-draining"
            text = f"{service.replica} on {where(member)}" + (f": {service.note}" if service.note else "")
            yield Event(at=at, kind=kind, subject=short(service.service), text=text)


def _why(member: FleetMember) -> str:
    return f"its tunnel is gone: {member.lost_how}" if member.state == "lost" else ""


def _claim(accusation: Accusation | None) -> tuple[bool, bool] | None:
    return (accusation.votes, accusation.stands) if accusation is not None else None
