"""Keys that the key API made, as a gateway holds them: in memory, from the store of records, with a copy in a file.

No request waits for the store. Every `LOOK_S` a gateway reads what changed there; while the store is away it goes by
what it read last, also after a restart, and changes nothing. Whoever lists or changes keys reads the store first, so
that it does not matter which of several gateways is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from typing import TYPE_CHECKING, Protocol

import msgspec

from fabrictool.base.errors import FabrictoolError, Problem
from fabrictool.base.files import write_atomic
from fabrictool.domain.terms import Terms
from fabrictool.gateway.keyrecords import KeyState
from fabrictool.gateway.keys import KEY_DIGITS, Consumer, hash_key, presented_key
from fabrictool.gateway.records import StoreAwayError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from fabrictool.gateway.keyrecords import KeyChanges

LOOK_S = 2.0
TURN_S = 10.0
"""So long a change waits for those before it."""
ATTEMPTS = 5
"""Of a change that other gateways' changes cross."""
COPY_FILE = "issued.json"
UNLIMITED = Terms()
_PRESENTED_KEPT = 10_000

_log = logging.getLogger("fabrictool.gateway")


class KeyStore(Protocol):
    """Of all gateways' issued keys; its methods block and raise FabrictoolError. See `RecordStore`."""

    def read_keys(self, fabric: str, since: int) -> KeyChanges: ...

    def write_keys(self, fabric: str, states: Sequence[KeyState]) -> int: ...


class KeyCopy(msgspec.Struct, frozen=True):
    """The content of the file."""

    keys: list[KeyState]


class IssuedKeys:
    """`consumer` for requests, on the event loop; `run` beside them; `change` for the key API."""

    # Wide: whose keys they are, and where they lie.
    def __init__(self, store: KeyStore, copy: Path, *, fabric: str, group: str, look_s: float = LOOK_S) -> None:
        """`group`: the consumer group of all of them."""
        self._store = store
        self._copy = copy
        self._fabric, self._group = fabric, group
        self._look_s = look_s
        self._live: dict[str, KeyState] = {}
        """By hash."""
        self._consumers: dict[str, Consumer] = {}
        """By hash, those that are not blocked."""
        self._presented: dict[str, Consumer] = {}
        self._pseudonyms: dict[str, str] = {}
        """By tenant; empty until somebody asks."""
        self._revision = 0
        self._turn = asyncio.Lock()
        self._copied = True
        self._trouble = ""
        self.ready = False
        self.looked = asyncio.Event()
        """`run` has asked the store, with or without success."""
        self.on_change: Callable[[], object] = lambda: None
        """Called when keys came, went or changed."""

    # -- for requests -----------------------------------------------------------------------------------------

    def consumer(self, authorization: str) -> Consumer | None:
        """Whose key this header presents; None also where it is blocked."""
        known = self._presented.get(authorization)
        if known is not None:
            return known
        consumer = self._consumers.get(hash_key(presented_key(authorization)))
        if consumer is not None:
            if len(self._presented) > _PRESENTED_KEPT:
                self._presented.clear()
            self._presented[authorization] = consumer
        return consumer

    def doubt(self, authorization: str) -> str:
        state = self._live.get(hash_key(presented_key(authorization)))
        return "the API key is blocked" if state is not None and state.key.blocked else ""

    @property
    def accounts(self) -> dict[str, Consumer]:
        """Those that have terms."""
        return {there.account: there for there in self._consumers.values() if there.terms is not None}

    def pseudonym(self, tenant: str) -> str:
        """As `keys.pseudonym_of`, of the tenant's oldest key; what it is keyed by is random, so that it need not be
        slow.
        """
        if not self._pseudonyms:
            oldest_last = sorted(
                self._live.values(), key=lambda state: (state.key.created_at, state.key.id), reverse=True
            )
            self._pseudonyms = {state.key.tenant: state.key.id for state in oldest_last}
        identity = self._pseudonyms.get(tenant)
        if identity is None:
            return ""
        return hmac.digest(identity.encode(), f"{self._fabric} {tenant}".encode(), "sha256")[:16].hex()

    # -- for the key API --------------------------------------------------------------------------------------

    @property
    def live(self) -> Mapping[str, KeyState]:
        """By hash, those that did not end, as they were read last."""
        return self._live

    async def refresh(self) -> None:
        """Read what changed; raises FabrictoolError where the store does not answer."""
        async with self._in_turn():
            await self._read()

    async def change(self, make: Callable[[Mapping[str, KeyState]], Sequence[KeyState]]) -> Sequence[KeyState]:
        """Write what `make` makes of the keys as they are in the store now; all of it, or nothing.

        `make` may be called again, where another gateway was faster, and what it raises ends the change. Returns what
        was written. Raises FabrictoolError where the store does not answer.
        """
        async with self._in_turn():
            for _ in range(ATTEMPTS):
                await self._read()
                states = make(self._live)
                written = await self._write(states)
                if written:
                    await self._take(written)
                    return written
        message = "others change these keys at the same time"
        raise StoreAwayError(Problem("FT8143", message, hint="ask again", transient=True))

    # -- beside the requests ----------------------------------------------------------------------------------

    def load(self) -> None:
        """The copy of a process before this one, if it can be had."""
        try:
            states = msgspec.json.decode(self._copy.read_bytes(), type=KeyCopy).keys
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            _log.warning("the copy of the issued keys cannot be read: %s: %s", self._copy, error)
            return
        self._replace(states)

    async def run(self) -> None:
        """Until cancelled: look at the store."""
        while True:
            await self.look()
            self.looked.set()
            await asyncio.sleep(self._look_s)

    async def look(self) -> None:
        """Read what changed, if that can be had."""
        try:
            async with self._turn:
                await self._read()
        except FabrictoolError as error:
            if self._trouble != str(error):
                _log.warning("issued keys cannot be looked up, and stay as they were: %s", error)
            self._trouble = str(error)

    # -- internals --------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Alone with the store; it is waited for only so long."""
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError as error:
            message = "the store of keys does not answer"
            raise StoreAwayError(Problem("FT8143", message, hint="ask again", transient=True)) from error
        try:
            yield
        finally:
            self._turn.release()

    async def _read(self) -> None:
        changes = await asyncio.to_thread(self._store.read_keys, self._fabric, self._revision)
        self._trouble = ""
        if changes.whole and (changes.states or self._live or not self.ready):
            self._replace(changes.states)
            await self._save()
        elif changes.states:
            await self._take(changes.states)
        elif not self._copied:
            await self._save()
        self._revision = changes.revision

    async def _write(self, states: Sequence[KeyState]) -> Sequence[KeyState]:
        """Those that were written, with their revision; none where another gateway was faster."""
        try:
            revision = await asyncio.to_thread(self._store.write_keys, self._fabric, states)
        except StoreAwayError:
            # It may have been carried out before the answer was lost.
            await self._read()
            if not all(self._holds(state) for state in states):
                raise
            return [self._live.get(state.sha256, state) for state in states]
        return [msgspec.structs.replace(state, revision=revision) for state in states] if revision else []

    def _holds(self, state: KeyState) -> bool:
        held = self._live.get(state.sha256)
        return held is None if state.ended else held is not None and held.key == state.key

    async def _take(self, states: Iterable[KeyState]) -> None:
        for state in states:
            self._live.pop(state.sha256, None)
            self._consumers.pop(state.sha256, None)
            if not state.ended:
                self._put(state)
        self._know()
        await self._save()

    def _replace(self, states: Iterable[KeyState]) -> None:
        self._live, self._consumers = {}, {}
        for state in states:
            self._put(state)
        self._know()

    def _put(self, state: KeyState) -> None:
        self._live[state.sha256] = state
        if not state.key.blocked:
            self._consumers[state.sha256] = self._consumer(state)

    def _know(self) -> None:
        """From now on requests are judged by these keys."""
        self.ready = True
        self._presented.clear()
        self._pseudonyms.clear()
        self.on_change()

    def _consumer(self, state: KeyState) -> Consumer:
        key = state.key
        terms = None if key.terms == UNLIMITED else key.terms
        # What a person may ask for counts for all of that person's keys: another key is no other budget.
        account = f"login/{key.person}" if key.person else f"issued/{key.id}"
        return Consumer(key.tenant, key.group or self._group, state.sha256[:KEY_DIGITS], account, terms)

    async def _save(self) -> None:
        """For a start while the store is away."""
        try:
            await asyncio.to_thread(self._copy_out, KeyCopy(list(self._live.values())))
            self._copied = True
        except FabrictoolError as error:
            if self._copied:
                _log.warning("issued keys cannot be copied: %s", error)
            self._copied = False

    def _copy_out(self, copy: KeyCopy) -> None:
        write_atomic(self._copy, msgspec.json.encode(copy), mode=0o600)
