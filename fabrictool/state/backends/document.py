"""The files of a state: how it and the lease of the one writer are written, and why a write is refused."""

from __future__ import annotations

import os
import socket

import msgspec

from fabrictool.base.errors import FabrictoolError, InvalidInputError, StaleError
from fabrictool.base.ids import random_id
from fabrictool.domain.state import SCHEMA, Lease, State

RESTORE = "`fabrictool state rebuild` makes it anew from what the clusters say; the damaged one is kept aside"


UNKNOWN_HOLDER = Lease(id="unknown", who="", host="", pid=0, purpose="", at=0.0)
"""Stands for a lease that somebody holds, and that says nothing of itself."""


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One state that once was the current one."""

    at: float
    """Wall seconds at which it was written."""
    state: State


def new_lease(purpose: str, *, now: float, expires: float | None = None) -> Lease:
    """A lease for this process; `now` and `expires` in wall seconds."""
    who = os.environ.get("USER") or str(os.getuid())
    return Lease(
        id=random_id(4),
        who=who,
        host=socket.gethostname(),
        pid=os.getpid(),
        purpose=purpose,
        at=now,
        expires=expires,
    )


def encode_state(state: State) -> bytes:
    """JSON with sorted keys, readable in a review."""
    return msgspec.json.format(msgspec.json.encode(state, order="sorted"), indent=1) + b"\n"


def decode_state(data: bytes, place: str) -> State:
    """The inverse; raises FT4001 for what is damaged or from a later release."""
    try:
        state = msgspec.json.decode(data, type=State)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError.of("FT4001", f"the state is damaged: {error}", file=place, hint=RESTORE) from error
    if state.schema != SCHEMA:
        message = f"the state has schema {state.schema}, this release reads {SCHEMA}"
        raise InvalidInputError.of("FT4001", message, file=place, hint="use the release that wrote it")
    return state


def state_of(data: bytes | None, place: str) -> State:
    """Of a place that may have none yet; raises as `decode_state`."""
    return State() if data is None else decode_state(data, place)


def check_unmoved(data: bytes | None, read: State, place: str) -> None:
    """Raises FT4002 when the state that lies at `place` is no longer the one that was `read`."""
    if data is not None:
        current = decode_state(data, place)
        if (current.lineage, current.serial) != (read.lineage, read.serial):
            raise stale(read, current, place)


def successor(new: State, read: State) -> State:
    """What is written after `read`: one serial later, with a lineage."""
    return msgspec.structs.replace(new, serial=read.serial + 1, lineage=new.lineage or random_id())


def stale(read: State, current: State, place: str) -> FabrictoolError:
    """FT4002: somebody wrote since `read`."""
    if read.lineage != current.lineage and read.lineage:
        message = f"the state is now of lineage {current.lineage}, no longer {read.lineage}"
    else:
        message = f"the state moved from serial {read.serial} to {current.serial} meanwhile"
    return StaleError.of("FT4002", message, file=place, hint="run the command again")


def held(lease: Lease | None, place: str, *, now: float) -> FabrictoolError:
    """FT4003: another writer has the lease."""
    if lease is None:
        message, hint = "the fabric's lease is held by another process", "wait for it to end; nothing was changed"
    else:
        age = max(0.0, now - lease.at)
        message = f"the fabric's lease is held by {lease}, since {age:.0f} s"
        hint = f"wait for it to end; if it is gone for good: fabrictool state unlock {lease.id}"
        if lease.expires is not None:
            hint = f"wait for it to end; without a sign of life it runs out in {max(0.0, lease.expires - now):.0f} s"
    return StaleError.of("FT4003", message, file=place, hint=hint, transient=True)


def no_such_lease(lease_id: str, lease: Lease | None, place: str) -> FabrictoolError:
    """FT4205: the id that was given is not the one that counts."""
    there = f"the one that counts is held by {lease}" if lease is not None else "nobody holds a lease"
    hint = f"fabrictool state unlock {lease.id}" if lease is not None else "nothing has to be unlocked"
    return FabrictoolError.of("FT4205", f"there is no lease {lease_id}: {there}", file=place, hint=hint)


def taken_by(other: Lease | None) -> str:
    """Why a lease of ours is gone."""
    return "it was taken away" if other is None else f"it is held by {other} now"


def lost(lease: Lease, why: str, place: str) -> FabrictoolError:
    """FT4201: we had the lease, and have it no longer."""
    hint = "nothing was overwritten; what was started is found again: run the same command again to go on"
    message = f"the lease {lease.id} for {lease.purpose} is lost: {why}"
    return StaleError.of("FT4201", message, file=place, hint=hint, transient=True)
