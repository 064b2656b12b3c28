"""A unit takes another spec over while it serves: it watches the one in its run folder.

`apply` writes the spec last. What does not load, or would need another process, is refused with an event, and the
former spec stays in force.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import msgspec

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.files import file_error
from fabrictool.domain.address import Address
from fabrictool.domain.specs import AgentSpec, GatewaySpec, decode_spec, in_place, mark_of, updatable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fabrictool.base.runfolder import RunFolder

S = TypeVar("S", AgentSpec, GatewaySpec)

LOOK_S = 1.0
"""Between two looks at the spec: one question to a file system, which may be a shared one."""


class SpecWatch(Generic[S]):
    """Looks at the spec now and then; `spec` is the one in force.

    `prepare` loads what belongs to a new spec, in a thread, and returns what puts it in force, in the loop. `renew`
    looks whether there is another certificate, too: with such a one the spec is written again.
    """

    # Wide: what it watches, what it does with it, and whom it tells.

    def __init__(
        self,
        spec: S,
        folder: RunFolder,
        prepare: Callable[[S], Callable[[], None]],
        note: Callable[[str, str], None],
        renew: Callable[[], Awaitable[bool]],
        look_s: float = LOOK_S,
    ) -> None:
        self.spec: S = spec
        self.mark = ""
        self.refusal = ""
        """Why what is written is not in force; "": it is."""
        self._folder = folder
        self._prepare: Callable[[S], Callable[[], None]] = prepare
        self._note = note
        self._renew = renew
        self._look_s = look_s
        self._seen: tuple[int, int, int] | None = None

    async def run(self, changed: Callable[[], None]) -> None:
        while True:
            if await self.look():
                changed()
            await asyncio.sleep(self._look_s)

    async def look(self) -> bool:
        """Returns whether something was taken over, or refused; in a thread, for a shared file system may wait."""
        try:
            seen = await asyncio.to_thread(self._signature)
            if seen == self._seen:
                return False
            spec, mark, take_over = await asyncio.to_thread(self._load)
            if await self._renew():
                self._note("renewed", "its certificate")
            self._seen = seen  # not before: a file system that failed for a moment is asked again
        except FabrictoolError as error:
            self._seen = None
            return self._refuse(str(error))
        changes = [name for name in in_place(spec) if getattr(spec, name) != getattr(self.spec, name)]
        self.spec, self.mark, self.refusal = spec, mark, ""
        if changes:
            take_over()
            self._note("reloaded", ", ".join(changes))
        return True

    def _refuse(self, why: str) -> bool:
        if why == self.refusal:
            return False
        self.refusal = why
        self._note("reload-refused", why)
        return True

    def _signature(self) -> tuple[int, int, int]:
        try:
            status = self._folder.spec.stat()
        except OSError as error:
            raise file_error(error, self._folder.spec) from error
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _load(self) -> tuple[S, str, Callable[[], None]]:
        try:
            written = self._folder.spec.read_bytes()
            spec = decode_spec(written)
        except OSError as error:
            raise file_error(error, self._folder.spec) from error
        except msgspec.DecodeError as error:
            message = f"spec.json is not a unit's spec: {error}"
            raise InvalidInputError.of("FT7102", message, file=str(self._folder.spec)) from error
        if not updatable(self.spec, spec):
            message = f"spec.json differs in something that only a new {Address.of(self.spec).kind} can take over"
            raise InvalidInputError.of("FT7102", message, file=str(self._folder.spec))
        wanted = cast("S", spec)  # `updatable` compared their types
        return wanted, mark_of(written), self._prepare(wanted)
