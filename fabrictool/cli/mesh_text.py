"""The mesh as lines for people: documents in, text out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.base.clock import duration_text, minute_text
from fabrictool.base.units import Memory
from fabrictool.cli.output import octets_text, paint, table, terminal_columns, text_width
from fabrictool.status.fleet import (
    NEEDS_SOMEBODY,
    OVER,
    FleetStatus,
    dead_engines,
    engine_text,
    engines_shown,
    link_text,
    role_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.status.fleet import (
        Accusation,
        FleetLink,
        FleetMember,
        FleetService,
        MemberState,
        RecordRow,
        RecordsStatus,
    )

MEMBER_COLUMNS = ("SESSION", "ROLE", "PROVIDER", "WHERE", "STATE", "LINK", "REPLICA", "ENGINE", "DEVICES", "ENDS")
LINK_COLUMNS = ("PEER", "ROLE", "PROVIDER", "WHERE", "LINK", "ADDRESS", "PATH", "SENT", "HEARD")
RECORD_COLUMNS = ("KEY", "RECORD", "OWNER", "PROVIDER", "ABOUT", "LIFECYCLE", "VERSION", "COUNTS UNTIL", "OCTETS")
SPARED = ("ENDS", "DEVICES", "SENT", "OCTETS", "ENGINE", "PROVIDER", "ADDRESS", "OWNER", "VERSION", "LINK")
"""What a narrow terminal does without, first to last; who it is and how it is stay."""
KEY_SHOWN = 8
"""Hexadecimal digits of a session, as events show it; two of 10,000 are alike once in 85 meshes."""


def short(session: str) -> str:
    return session[:KEY_SHOWN]


def member_lines(view: FleetStatus, members: Sequence[FleetMember], hidden: int, now: float) -> list[str]:
    """`members` of them; `hidden` more are over, and not among these."""
    lines = [headline(view, now)]
    if members:
        rows = [row for member in members for row in _member_rows(view, member)]
        lines += ["", fitting_table(MEMBER_COLUMNS, rows, terminal_columns())]
    lines += [f"! {text}" for member in members for text in troubles(view, member)]
    if view.silent_because:
        lines.append(f"~ this hub accuses nobody now: {view.silent_because}")
    if any(member.state in ("suspected", "lost") for member in members):
        lines.append(
            "~ those that live come back by themselves within seconds; `fabrictool reconcile` replaces the others"
        )
    if hidden:
        verb = "is" if hidden == 1 else "are"
        lines.append(f"{hidden} whose session is over {verb} not shown; see `fabrictool mesh members --all`")
    return lines


def fleet_lines(view: FleetStatus, now: float) -> list[str]:
    """The members of whom something is still expected."""
    members = [member for member in view.members if member.state not in OVER]
    return member_lines(view, members, len(view.members) - len(members), now)


def headline(view: FleetStatus | RecordsStatus, now: float) -> str:
    """Whose view, how old, of how much."""
    records = view.records if isinstance(view, FleetStatus) else len(view.rows)
    age = duration_text(max(0.0, now - view.at))
    return (
        f"Mesh of {view.fabric or 'a fabric not known yet'}, as the {view.role} {short(view.session)} sees it,"
        f" {age} old: {records} records, root {short(view.root)}"
    )


def troubles(view: FleetStatus, member: FleetMember) -> list[str]:
    """What is known against a member, and who says it."""
    name = f"{short(member.session)} ({where(member)})"
    lines = []
    if member.lost_at is not None and member.lost_how != "never-came":
        age = duration_text(max(0.0, view.at - member.lost_at))
        lines.append(f"{name}: lost {age} ago, {_WAYS.get(member.lost_how, member.lost_how)}")
    lines += [f"{name}: {_accusation_text(member, accusation)}" for accusation in member.accusations]
    if member.state == "evicted":
        lines.append(f"{name}: evicted, no request goes there; its owner comes back by speaking again")
    down = [service for service in dead_engines(member) if service.note]
    if member.state not in OVER:
        lines += [f"{name}: {service.replica} is DOWN: {service.note}" for service in down[-1:]]
    return lines


_WAYS = {
    "closed": "its end closed the tunnel",
    "silent": "nothing was heard for three beats",
    "never-came": "it never connected to that hub",
    "other-hub": "another hub lost it as well",
}


def fitting_table(headings: Sequence[str], rows: Sequence[Sequence[str]], columns: int | None) -> str:
    """Without those of `SPARED` that a terminal so wide has no room for; None: a file, which has room for all."""
    left = list(range(len(headings)))
    for spared in ("", *SPARED):
        left = [index for index in left if headings[index] != spared]
        picked = [[row[index] for index in left] for row in rows]
        text = table([headings[index] for index in left], picked, columns=columns)
        if columns is None or max(map(text_width, text.splitlines())) <= columns:
            break
    return text


def _accusation_text(member: FleetMember, accusation: Accusation) -> str:
    verb = "voted to evict it" if accusation.votes else "suspects it"
    evidence = ", ".join(_WAYS.get(kind, kind) for kind in accusation.evidence) or "without evidence"
    text = f"{short(accusation.hub)} ({accusation.provider or 'provider not known'}) {verb}: {evidence}"
    if accusation.stands:
        return text
    return f"{text}; refuted: that was about version {accusation.seen}, it spoke again with {member.version}"


def where(member: FleetMember) -> str:
    return "/".join(filter(None, (member.cluster, member.node))) or member.site or member.provider


def state_text(state: MemberState) -> str:
    return paint(state, "error") if state in NEEDS_SOMEBODY else state


def _member_rows(view: FleetStatus, member: FleetMember) -> list[list[str]]:
    """A line for each engine that is not DOWN; those of one member share its other cells."""
    ends = "–" if member.ends_at is None else minute_text(member.ends_at)
    services: list[FleetService | None] = [*engines_shown(member)]
    return [
        [
            short(member.session),
            role_text(member),
            member.provider,
            where(member),
            "idle" if member.idle else state_text(member.state),
            link_text(view, member),
            service.replica if service is not None else "–",
            engine_text(service) if service is not None else "–",
            devices_text(member),
            ends,
        ]
        for service in services or [None]
    ]


def devices_text(member: FleetMember) -> str:
    """With their memory together, and what is free of it where the node says that."""
    if not member.device:
        return "–"
    memory = f" {mib_text(member.memory)}" if member.memory else ""
    free = f", {mib_text(sum(member.free))} free" if member.free else ""
    return f"{member.devices}×{member.device}{memory}{free}"


def mib_text(octets: int) -> str:
    """Rounded down, to what a person can read: a machine has 515,891,404 KiB."""
    return str(Memory(octets // 2**30 * 2**30 if octets >= 2**34 else octets // 2**20 * 2**20))


def path_lines(view: FleetStatus, now: float) -> list[str]:
    """The links of the node whose view it is."""
    members = {member.session: member for member in view.members}
    lines = [headline(view, now)]
    if view.links:
        rows = [_link_row(link, members.get(link.peer)) for link in view.links]
        lines += ["", fitting_table(LINK_COLUMNS, rows, terminal_columns())]
    else:
        lines.append("! it has no link and dials nobody")
    for link in view.links:
        if link.error and not link.up:
            lines.append(f"! {link.address}: {link.error}")
        elif link.path:
            lines += [f"~ {link.address}: {path} does not lead there: {why}" for path, why in link.failures.items()]
    if view.refused_records or view.vain_repairs:
        lines.append(
            f"~ since its start it refused records ({view.refused_records}) and gave up useless repairs"
            f" ({view.vain_repairs}); its log says whose and why"
        )
    return lines


def _link_row(link: FleetLink, member: FleetMember | None) -> list[str]:
    path = link.path or ("another connection" if link.up and link.address else "–")
    return [
        short(link.peer) or "?",
        role_text(member) if member is not None else "?",
        member.provider if member is not None else "?",
        where(member) if member is not None else "?",
        "up" if link.up else paint("none", "error"),
        link.address or (f"by hub {short(link.by)}" if link.by else "dialled us"),
        path,
        "–" if link.sent_octets is None else octets_text(link.sent_octets),
        "–" if link.silent_s is None else f"{link.silent_s:.1f} s ago",
    ]


def record_lines(view: RecordsStatus, rows: Sequence[RecordRow], now: float) -> list[str]:
    """The table of `rows`, which are some of the view's or all."""
    lines = [headline(view, now)]
    if rows:
        lines += ["", fitting_table(RECORD_COLUMNS, [_record_row(row) for row in rows], terminal_columns())]
    shown = "all of them" if len(rows) == len(view.rows) else f"{len(rows)} of them"
    return [*lines, f"{shown}: {octets_text(sum(row.octets for row in rows))}"]


def _record_row(row: RecordRow) -> list[str]:
    whole = row.record == "node"
    return [
        short(row.key) if whole else f"{short(row.key)}…{row.key[-KEY_SHOWN:]}",
        row.record,
        short(row.owner),
        row.provider,
        short(row.about) if row.record == "witness" else row.about,
        "–" if row.record in ("witness", "assignment") else row.lifecycle,  # these have no life: they are taken back
        str(row.version),
        "–" if row.not_after is None else minute_text(row.not_after),
        str(row.octets),
    ]
