"""``mesh replay``: a trace, played again and told in words."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.files import file_error
from fabrictool.cli.fabric_answers import MeshReplay, ReplayedRow
from fabrictool.cli.output import data, json_data, say
from fabrictool.mesh.gossip import Changed, Refused, Vain
from fabrictool.mesh.identity import IdentityVerifier
from fabrictool.mesh.member import SessionEnded
from fabrictool.mesh.records import AssignmentBody, NodeBody, RevocationBody, ServiceBody, WitnessBody
from fabrictool.mesh.trace import read_head, replay

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fabrictool.mesh.member import Effect
    from fabrictool.mesh.records import Body
    from fabrictool.mesh.trace import TraceInput


def show_replay(path: Path, *, as_json: bool) -> int:
    """Print what happened; returns 0 when every decision was the same again.

    Raises
    ------
    InvalidInputError
        FT6501 for a file that is no trace.
    """
    events: list[dict[str, Any]] = []
    wall = 0.0

    def seen(told: TraceInput, effects: Sequence[Effect]) -> None:
        nonlocal wall
        wall = told.wall or wall
        here = [{"kind": told.kind, "subject": told.peer.hex()[:8], "text": told.how}] if told.kind in LINKS else []
        here += [event for effect in effects if (event := _event(effect))]
        events.extend({"at": wall} | event for event in here)

    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line]
        verifier = IdentityVerifier(read_head(lines[0] if lines else b"").root)
        outcome = replay(lines, verifier, seen)
    except OSError as error:
        raise file_error(error, path) from error
    except (msgspec.DecodeError, ValueError) as error:
        hint = "copy the whole mesh.trace of a gateway's run folder; the last line may be cut off: remove it"
        raise InvalidInputError.of("FT6501", f"not a trace: {error}", file=str(path), hint=hint) from error
    same = outcome.differs_at is None
    if as_json:
        rows = [ReplayedRow(**event) for event in events]
        json_data(MeshReplay(inputs=outcome.inputs, same=same, differs_at=outcome.differs_at, events=rows))
        return 0 if same else 1
    for event in events:
        stamp = time.strftime("%H:%M:%S", time.gmtime(event["at"])) + f".{int(event['at'] % 1 * 1000):03d}Z"
        data(f"{stamp}  {event['kind']:<12} {event['subject']:<8}  {event['text']}".rstrip())
    records = len(outcome.member.registry)
    if same:
        say(f"played {outcome.inputs} inputs; every decision was the same, and {records} records are left")
    else:
        say(f"input {outcome.differs_at} has another outcome than then: this release decides otherwise")
    return 0 if same else 1


LINKS = ("link-up", "link-down")


def _event(effect: Effect) -> dict[str, str] | None:
    match effect:
        case Changed(record):
            kind, text = _words(record.body)
            return {"kind": kind, "subject": record.body.session.hex()[:8], "text": text}
        case Refused(peer, reason):
            return {"kind": "refused", "subject": peer.hex()[:8], "text": reason}
        case Vain(peer, repairs):
            return {"kind": "in-vain", "subject": peer.hex()[:8], "text": f"{repairs} repairs brought nothing"}
        case SessionEnded(reason):
            return {"kind": "ended", "subject": "", "text": reason}
    return None


def _words(body: Body) -> tuple[str, str]:
    match body:
        case NodeBody():
            where = f"{body.provider} {body.cluster}/{body.node}"
            return f"node {body.lifecycle.name}", f"{body.role} {where} v{body.version}"
        case ServiceBody():
            return f"service {body.lifecycle.name}", f"{body.replica} {body.model} v{body.version}"
        case WitnessBody():
            verb = "votes against" if body.votes else "suspects" if body.suspects else "believes again"
            return "witness", f"{verb} {body.suspect.hex()[:8]}: {', '.join(body.evidence)}".rstrip(": ")
        case AssignmentBody():
            return "assignment", f"{body.session.hex()[:8]}: {body.model or 'nothing'} v{body.version}"
        case RevocationBody():
            return "revocation", f"by {body.provider or 'the federation'}"
