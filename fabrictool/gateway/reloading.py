"""A gateway takes over new keys and rules while it serves: it watches the spec in its run folder.

`apply` writes the keys first and the spec last. What does not load, or would need another process, is refused with an
event, and the former spec stays in force.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.files import file_error
from fabrictool.domain.specs import IN_PLACE, GatewaySpec, decode_spec, mark_of, updatable
from fabrictool.gateway.keys import Keyring, keys_digest, read_rows
from fabrictool.mesh.revocation import read_revocation

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.base.runfolder import RunFolder

LOOK_S = 1.0
"""Between two looks at the spec: one question to a file system, which may be a shared one."""
KEYS_FILE = "keys.json"


def keyring_of(spec: GatewaySpec, folder: RunFolder) -> Keyring | None:
    """The keys beside a spec; None when anybody may ask.

    Raises
    ------
    FabrictoolError
        FT8005 when the fabric has tenants and their keys are not here, or are not those that the spec means: a gateway
        never opens itself. FT8002 when the key file is wrong.
    """
    path = folder.path / KEYS_FILE
    if path.exists() and not spec.tenants:
        return Keyring([])  # the last tenant was removed: its key is no key any more
    if not path.exists():
        if not spec.tenants:
            return None
        message = f"the fabric has tenants ({len(spec.tenants)}), but there is no key file"
        raise InvalidInputError.of("FT8005", message, file=str(path), hint="`fabrictool apply` places it again")
    rows = read_rows(path)
    if spec.tenants and spec.keys and keys_digest(spec.fabric, rows) != spec.keys:
        message = "the key file does not hold the keys that the spec names"
        raise InvalidInputError.of("FT8005", message, file=str(path), hint="`fabrictool apply` places it again")
    return Keyring(rows)


class Reloading:
    """Looks at the spec now and then; `spec` is the one in force."""

    def __init__(
        self,
        spec: GatewaySpec,
        folder: RunFolder,
        take_over: Callable[[GatewaySpec, Keyring | None], None],
        note: Callable[[str, str, str], None],
    ) -> None:
        self.spec = spec
        self.mark = ""
        self.refusal = ""
        """Why what is written is not in force; "": it is."""
        self._folder = folder
        self._take_over = take_over
        self._note = note
        self._seen: tuple[int, int, int] | None = None

    async def run(self, changed: Callable[[], None]) -> None:
        while True:
            if await self.look():
                changed()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> bool:
        """Returns whether something was taken over, or refused; in a thread, for a shared file system may wait."""
        try:
            seen = await asyncio.to_thread(self._signature)
            if seen == self._seen:
                return False
            spec, mark, keyring = await asyncio.to_thread(self._load)
            self._seen = seen  # not before: a file system that failed for a moment is asked again
        except FabrictoolError as error:
            return self._refuse(str(error))
        changes = [name for name in IN_PLACE if getattr(spec, name) != getattr(self.spec, name)]
        self.spec, self.mark, self.refusal = spec, mark, ""
        if changes:
            self._take_over(spec, keyring)
            self._note("reloaded", spec.name, ", ".join(changes))
        return True

    def _refuse(self, why: str) -> bool:
        if why == self.refusal:
            return False
        self.refusal = why
        self._note("reload-refused", self.spec.name, why)
        return True

    def _signature(self) -> tuple[int, int, int]:
        try:
            status = self._folder.spec.stat()
        except OSError as error:
            raise file_error(error, self._folder.spec) from error
        return status.st_mtime_ns, status.st_ino, status.st_size

    def _load(self) -> tuple[GatewaySpec, str, Keyring | None]:
        try:
            written = self._folder.spec.read_bytes()
            spec = decode_spec(written)
        except OSError as error:
            raise file_error(error, self._folder.spec) from error
        except msgspec.DecodeError as error:
            message = f"spec.json is not a unit's spec: {error}"
            raise InvalidInputError.of("FT7102", message, file=str(self._folder.spec)) from error
        if not isinstance(spec, GatewaySpec) or not updatable(self.spec, spec):
            message = "spec.json differs in something that only a new gateway can take over"
            raise InvalidInputError.of("FT7102", message, file=str(self._folder.spec))
        for text in spec.revoked:
            read_revocation(text)  # one that cannot be read is refused with the rest
        return spec, mark_of(written), keyring_of(spec, self._folder)
