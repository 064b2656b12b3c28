"""What a gateway takes over with another spec: rules, and the keys that lie beside it; `apply` writes these first."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

import msgspec

from fabrictool.agent.specwatch import SpecWatch
from fabrictool.base.errors import InvalidInputError
from fabrictool.domain.specs import GatewaySpec
from fabrictool.gateway.keyfile import read_key_file
from fabrictool.gateway.keys import Keyring, keys_digest
from fabrictool.mesh.revocation import read_revocation
from fabrictool.routing.policies import routing_policy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from fabrictool.base.runfolder import RunFolder

KEYS_FILE = "keys.json"


def keyring_of(spec: GatewaySpec, folder: RunFolder) -> Keyring | None:
    """The keys beside a spec; None when anybody may ask.

    Raises
    ------
    FabrictoolError
        FT8005 when the fabric has tenants, or a key API, and their keys are not here, or are not those that the spec
        means: a gateway never opens itself. FT8002 when the key file is wrong.
    """
    path = folder.path / KEYS_FILE
    closed = bool(spec.tenants) or spec.issues_keys
    if path.exists() and not closed:
        return Keyring([])  # the last tenant was removed: its key is no key any more
    if not path.exists():
        if not closed:
            return None
        message = f"the fabric has tenants ({len(spec.tenants)}), but there is no key file"
        raise InvalidInputError.of("FT8005", message, file=str(path), hint="`fabrictool apply` places it again")
    file = read_key_file(path)
    if closed and spec.keys and keys_digest(spec.fabric, file.keys, file.admin) != spec.keys:
        message = "the key file does not hold the keys that the spec names"
        raise InvalidInputError.of("FT8005", message, file=str(path), hint="`fabrictool apply` places it again")
    keyring = Keyring(file.keys, spec.fabric, {} if isinstance(spec.terms, msgspec.UnsetType) else spec.terms)
    keyring.admin = file.admin if spec.issues_keys else ""
    return keyring


class Reloading(SpecWatch[GatewaySpec]):
    """A gateway's: with the keys that belong to the spec."""

    def __init__(
        self,
        spec: GatewaySpec,
        folder: RunFolder,
        take_over: Callable[[GatewaySpec, Keyring | None], None],
        note: Callable[[str, str, str], None],
        renew: Callable[[], Awaitable[bool]],
    ) -> None:
        self.former = spec
        """In force until now, while another one is taken over."""

        def prepare(new: GatewaySpec) -> Callable[[], None]:
            self.former = self.spec
            routing_policy(new.policy, random.Random())  # one that is not there is refused
            for text in new.revoked:
                read_revocation(text)  # one that cannot be read is refused with the rest
            return functools.partial(take_over, new, keyring_of(new, folder))

        super().__init__(spec, folder, prepare, lambda kind, text: note(kind, spec.name, text), renew)
