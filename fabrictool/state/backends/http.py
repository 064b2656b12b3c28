"""The state behind an HTTP server that speaks the verbs of Terraform's ``http`` backend, such as GitLab's.

``GET`` reads, ``POST`` writes, ``LOCK`` and ``UNLOCK`` with a JSON lock info hold the lease. A write names the lock's
id in the query, so the server itself refuses who has lost it; where the server gives an ETag, a write also says
``If-Match``.

Such servers know no expiry. Ours stands in the lock info, and only where the server lets the holder renew it by
locking again; a lock without it ends by ``fabrictool state unlock`` alone.
"""

from __future__ import annotations

import calendar
import contextlib
import time
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import msgspec

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import FabrictoolError
from fabrictool.domain.state import Lease
from fabrictool.state.backends import document
from fabrictool.state.backends.heartbeat import TTL_S, LeaseHeartbeat, expired
from fabrictool.state.backends.requests import Requests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabrictool.base.clock import Clock
    from fabrictool.base.http import HttpResponse
    from fabrictool.domain.state import State
    from fabrictool.domain.statebackend import HttpState

LOCKED = (409, 423)
"""Somebody has the lock; the body says who."""
CHANGED = 412
NOTHING = (204, 404)


class LockInfo(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """As Terraform writes it; ours is the JSON in `info`."""

    id: str = msgspec.field(name="ID", default="")
    operation: str = ""
    info: str = ""
    who: str = ""
    version: str = ""
    created: str = ""
    path: str = ""


class HttpStore:
    """The state at `server`; `secret` is asked for the token when it is needed first."""

    def __init__(
        self,
        server: HttpState,
        secret: Callable[[], str] | None = None,
        *,
        clock: Clock | None = None,
        ttl_s: float = TTL_S,
    ) -> None:
        lock_address = server.lock_address or server.address
        self._address = server.address
        self._lock = (server.lock_method, lock_address)
        self._unlock = (server.unlock_method, server.unlock_address or lock_address)
        self._requests = Requests(server.user or "", secret)
        self._clock = clock or SystemClock()
        self._ttl_s = ttl_s
        self._heart: LeaseHeartbeat | None = None

    @property
    def place(self) -> str:
        return self._address

    # -- state ------------------------------------------------------------------------------------------------

    def read(self) -> State:
        return document.state_of(self.raw(), self.place)

    def raw(self) -> bytes | None:
        return self._get()[0]

    def write(self, new: State, *, read: State) -> State:
        """Compare with what is there, then post it under the lock."""
        if self._heart is not None:
            self._heart.check()
        data, tag = self._get()
        document.check_unmoved(data, read, self.place)
        written = document.successor(new, read)
        self._post(written, tag, read)
        return written

    def replace(self, new: State) -> State:
        self._post(new, "", new)
        return new

    def history(self) -> list[document.Version]:
        """None: what versions the server keeps, it shows itself."""
        return []

    def _get(self) -> tuple[bytes | None, str]:
        """The body and its ETag."""
        answer = self._requests.ask("GET", self._address)
        if answer.status in NOTHING or (answer.status == 200 and not answer.body.strip()):
            return None, ""
        if answer.status != 200:
            raise self._odd("GET", answer)
        return answer.body, answer.tag

    def _post(self, state: State, tag: str, read: State) -> None:
        address = self._address if self._heart is None else _with_id(self._address, self._heart.id)
        data = document.encode_state(state)
        try:
            answer = self._requests.ask("POST", address, data, tag=tag)
        except FabrictoolError:
            with contextlib.suppress(FabrictoolError):
                if self._get()[0] == data:  # it arrived; only the answer was lost
                    return
            raise
        if answer.status == CHANGED:
            raise document.stale(read, self.read(), self.place)
        if answer.status in LOCKED:
            there = _lease(answer.body)
            if self._heart is not None:
                raise self._heart.gone(document.taken_by(there))
            raise document.held(there, self.place, now=self._clock.wall())
        if not 200 <= answer.status < 300:
            raise self._odd("POST", answer)

    # -- lease ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lease(self, purpose: str, *, now: float) -> Iterator[Lease]:
        lease = document.new_lease(purpose, now=now)
        other = self._try_lock(lease)
        if other is not None and expired(other, self._clock.wall()):
            self._ask_unlock(other)
            other = self._try_lock(lease)
        if other is not None:
            raise document.held(other, self.place, now=self._clock.wall())
        try:
            dated = msgspec.structs.replace(lease, expires=self._clock.wall() + self._ttl_s)
            lease = dated if self._try_lock(dated) is None else lease
            heart = self._heart = LeaseHeartbeat(
                lease, self._renew, clock=self._clock, place=self.place, ttl_s=self._ttl_s
            )
            with heart.beating():
                yield lease
        finally:
            taken = self._heart is not None and self._heart.lost
            self._heart = None
            with contextlib.suppress(FabrictoolError):  # no error of this may hide another
                if not taken:
                    self._ask_unlock(lease)

    def holder(self) -> Lease | None:
        """Found out by trying to lock: these servers have no other question for it."""
        probe = document.new_lease("a look at who holds it", now=self._clock.wall())
        other = self._try_lock(probe)
        if other is None:
            self._ask_unlock(probe)
            return None
        return None if expired(other, self._clock.wall()) else other

    def unlock(self, lease_id: str) -> Lease:
        """In its holder's name, for the server takes no other."""
        probe = document.new_lease("unlocking by hand", now=self._clock.wall())
        other = self._try_lock(probe)
        if other is None:
            self._ask_unlock(probe)
        if other is None or other.id != lease_id:
            raise document.no_such_lease(lease_id, other, self.place)
        self._ask_unlock(other)
        return other

    def _renew(self, lease: Lease) -> None:
        other = self._try_lock(lease)
        if other is not None and other.id != lease.id:
            raise document.lost(lease, document.taken_by(other), self.place)

    def _try_lock(self, lease: Lease) -> Lease | None:
        """None when it is ours now, else whose it is (perhaps ours too, where a server lets nobody lock twice)."""
        answer = self._requests.ask(*self._lock, _info(lease, self._address))
        if answer.status in LOCKED:
            return _lease(answer.body) or document.UNKNOWN_HOLDER
        if not 200 <= answer.status < 300:
            raise self._odd(self._lock[0], answer)
        return None

    def _ask_unlock(self, lease: Lease) -> None:
        answer = self._requests.ask(*self._unlock, _info(lease, self._address))
        if not 200 <= answer.status < 300 and answer.status not in LOCKED:
            raise self._odd(self._unlock[0], answer)

    def _odd(self, method: str, answer: HttpResponse) -> FabrictoolError:
        if answer.status in (404, 405, 501) and method not in ("GET", "POST"):
            message = f"the server knows no {method} (HTTP {answer.status}), and without a lock nothing is written"
            hint = "give lock_address, lock_method and unlock_method as its manual says"
        else:
            message, hint = f"{method} was answered with HTTP {answer.status}", "try the address by hand"
        return FabrictoolError.of("FT4206", message, file=self.place, hint=hint)


def _info(lease: Lease, address: str) -> bytes:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(lease.at))
    return msgspec.json.encode(
        LockInfo(
            id=lease.id,
            operation=f"fabrictool {lease.purpose}",
            info=msgspec.json.encode(lease).decode(),
            who=f"{lease.who}@{lease.host}",
            created=created,
            path=urlsplit(address).path,
        )
    )


def _lease(body: bytes) -> Lease | None:
    """What a lock info says; another tool's has no JSON of ours in it."""
    try:
        info = msgspec.json.decode(body, type=LockInfo)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    try:
        lease: Lease = msgspec.json.decode(info.info or "{}", type=Lease)
    except msgspec.DecodeError:
        who, _, host = info.who.partition("@")
        return Lease(id=info.id, who=who, host=host, pid=0, purpose=info.operation, at=_second(info.created))
    return msgspec.structs.replace(lease, id=info.id)


def _second(created: str) -> float:
    try:
        return float(calendar.timegm(time.strptime(created[:19], "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return 0.0


def _with_id(address: str, lock_id: str) -> str:
    parts = urlsplit(address)
    query = [*parse_qsl(parts.query, keep_blank_values=True), ("ID", lock_id)]
    return urlunsplit(parts._replace(query=urlencode(query)))
