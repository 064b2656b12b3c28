"""An observation in a file, signed by the federation's root: plans can be made from it without reaching a cluster.

It holds what planning reads: the clusters' facts, what the living units were told, the state's memory of places and
counts, and the digest of the tenants' keys. No secret is in it; names of hosts, jobs and units are.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fabrictool.applier.fabric import Fabric
from fabrictool.applier.readset import running_specs
from fabrictool.applier.state import FabricFolder, State
from fabrictool.applier.truststore import TrustStore
from fabrictool.base.canonical import canonical_json
from fabrictool.base.errors import FabrictoolError, InvalidInputError, StaleError
from fabrictool.domain.observed import ClusterFacts
from fabrictool.domain.specs import UnitSpec
from fabrictool.mesh.identity import CLOCK_SKEW_S, describe_chain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    from fabrictool.applier.stores.document import Lease, Version
    from fabrictool.blueprint import Loaded
    from fabrictool.clusters.protocol import NewUnit
    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.observed import Observed
    from fabrictool.domain.plan import Outlook
    from fabrictool.mesh.identity import Credential
    from fabrictool.status.documents import StatusDocument

BUNDLE_API = "fabrictool/observation/v1"
_PREFIX = b"fabrictool observation v1\n"
"""What is signed begins with it: the root signs certificates, too, and none of them does."""


class KeysSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The tenants' keys as they were: the digest that plans hold, and whose they are."""

    digest: str
    tenants: dict[str, str]
    """Tenant → reference to its key."""


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """One observation."""

    api: str = BUNDLE_API
    fabric: str
    lineage: str
    at: float
    """Wall seconds."""
    clusters: dict[str, ClusterFacts]
    specs: dict[str, UnitSpec]
    """Operation → what the living unit was told."""
    state: State
    """Without what was applied, which planning does not read."""
    keys: KeysSeen | None = None
    """None where the keys could not be had."""


def take_bundle(fabric: Fabric, blueprint: Blueprint, keys: str | None, *, now: float) -> tuple[Bundle, Observed]:
    """Observe; `keys` is the digest of the tenants' keys."""
    observed, state, lineage = fabric.observe(), fabric.folder.read_state(), fabric.lineage
    memory = msgspec.structs.replace(state, lineage=lineage, applied_units={}, applied_plan="", applied_blueprint="")
    bundle = Bundle(
        fabric=fabric.name,
        lineage=lineage,
        at=round(now, 3),
        clusters=observed.clusters,
        specs=running_specs(fabric, observed),
        state=memory,
        keys=None if keys is None else KeysSeen(digest=keys, tenants=_tenants(blueprint)),
    )
    return bundle, observed


def sign_bundle(bundle: Bundle, root: Credential) -> bytes:
    """The file."""
    body = msgspec.to_builtins(bundle)
    signature = base64.b64encode(root.sign(_PREFIX + canonical_json(body))).decode()
    return json.dumps({**body, "signature": signature}, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def open_bundle(data: bytes, root: bytes, *, fabric: str, now: float, max_age_s: float, file: str) -> Bundle:
    """The inverse, against the root certificate in `root` (PEM).

    Raises
    ------
    FabrictoolError
        FT4401 no bundle, FT4402 changed, of another federation or of another fabric, FT4403 too old.
    """
    body, signature = _parts(data, file)
    key = _root_key(root, now=now)
    try:
        key.verify(signature, _PREFIX + canonical_json(body))
    except (InvalidSignature, ValueError):
        _distrust("its signature is not that of this federation's root", file)
    try:
        bundle = msgspec.convert(body, Bundle)
    except msgspec.ValidationError as error:
        raise _no_bundle(str(error), file) from error
    if bundle.api != BUNDLE_API:
        raise _no_bundle(f"it has version {bundle.api}, not {BUNDLE_API}", file)
    if bundle.fabric != fabric:
        _distrust(f"it is of fabric {bundle.fabric}, not of {fabric}", file)
    age = now - bundle.at
    if not -CLOCK_SKEW_S <= age <= max_age_s:
        when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(bundle.at))
        why = f"more than {max_age_s / 3600:.3g} h ago" if age > 0 else "in the future: clocks differ"
        raise StaleError.of("FT4403", f"the observation was made at {when}, {why}", file=file, hint="observe anew")
    return bundle


def fabric_seen(bundle: Bundle, inventory: Inventory) -> Fabric:
    """A fabric that can be planned for and not be changed; clusters that were not observed are unknown."""
    clusters = {
        name: SeenCluster(bundle.clusters.get(name) or _unseen(name), bundle)
        for name in inventory.clusters
        if inventory.clusters[name].enabled
    }
    folder = FabricFolder(Path(bundle.fabric), SeenState(bundle.state))
    return Fabric(bundle.fabric, folder, TrustStore(folder.trust), clusters)


def keys_seen(bundle: Bundle, loaded: Loaded) -> str | None:
    """The digest of the tenants' keys, if the blueprint has the same tenants with the same references still."""
    tenants = _tenants(loaded.blueprint)
    if not tenants:
        return ""
    return bundle.keys.digest if bundle.keys is not None and bundle.keys.tenants == tenants else None


class SeenCluster:
    """A cluster as it was."""

    poll_s = 1.0

    def __init__(self, facts: ClusterFacts, bundle: Bundle) -> None:
        self._facts = facts
        self._bundle = bundle

    @property
    def name(self) -> str:
        """As the inventory names it."""
        return self._facts.cluster

    def observe(self, *, brief: bool = False) -> ClusterFacts:
        """What was there."""
        return self._facts

    def spec(self, operation: str) -> UnitSpec:
        """What a living unit had been told."""
        spec = self._bundle.specs.get(operation)
        if spec is None:
            message = f"the spec of {operation} is not in the observation"
            raise FabrictoolError.of("FT5104", message, thing=f"cluster/{self.name}")
        return spec

    def outlook(self, units: Sequence[NewUnit]) -> tuple[list[Outlook], list[str]]:
        """Nothing: no scheduler is asked."""
        return [], []

    def start(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        """FT4404."""
        self._refuse()

    def stop(self, operations: Iterable[str]) -> None:
        """FT4404."""
        self._refuse()

    def kill(self, operations: Iterable[str]) -> None:
        """FT4404."""
        self._refuse()

    def forget(self, operations: Iterable[str]) -> None:
        """FT4404."""
        self._refuse()

    def document(self, operation: str) -> StatusDocument | None:
        """None: no unit is asked."""
        return None

    def page(self, operation: str) -> AbstractContextManager[str]:
        """None can be reached."""
        return contextlib.nullcontext("")

    def log_tail(self, operation: str, lines: int) -> list[str]:
        """FT4404."""
        self._refuse()

    def close(self) -> None:
        """Nothing is open."""

    def _refuse(self) -> NoReturn:
        raise FabrictoolError.of("FT4404", "only an observation of the cluster is here", thing=f"cluster/{self.name}")


class SeenState:
    """A state as it was."""

    place = "an observation"

    def __init__(self, state: State) -> None:
        self._state = state

    def read(self) -> State:
        """As it was."""
        return self._state

    def write(self, new: State, *, read: State) -> State:
        """FT4404."""
        self._refuse()

    def lease(self, purpose: str, *, now: float) -> AbstractContextManager[Lease]:
        """FT4404."""
        self._refuse()

    def holder(self) -> Lease | None:
        """Not known."""
        return None

    def unlock(self, lease_id: str) -> Lease:
        """FT4404."""
        self._refuse()

    def history(self) -> Sequence[Version]:
        """None."""
        return []

    def raw(self) -> bytes | None:
        """None."""
        return None

    def replace(self, new: State) -> State:
        """FT4404."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise FabrictoolError.of("FT4404", "the state is only an observation here", thing="state")


def _tenants(blueprint: Blueprint) -> dict[str, str]:
    return {name: str(tenant.key) for name, tenant in sorted(blueprint.tenants.items())}


def _unseen(name: str) -> ClusterFacts:
    hint = "observe anew with this inventory"
    return ClusterFacts(cluster=name, known=False, reason="it is not in the observation", hint=hint)


def _parts(data: bytes, file: str) -> tuple[dict[str, Any], bytes]:
    try:
        body = json.loads(data)
        signature = base64.b64decode(body.pop("signature"), validate=True)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise _no_bundle(type(error).__name__, file) from error
    return body, signature


def _root_key(pem: bytes, *, now: float) -> Ed25519PublicKey:
    described = describe_chain(pem)
    key = x509.load_pem_x509_certificates(pem)[0].public_key()
    if described.claims.role != "root" or not isinstance(key, Ed25519PublicKey):
        raise InvalidInputError.of("FT4402", "the certificate is not that of a federation's root", hint="give root.crt")
    if not described.begin - CLOCK_SKEW_S <= now <= described.end + CLOCK_SKEW_S:
        raise InvalidInputError.of("FT4402", "the root's certificate is not valid now")
    return key


def _distrust(why: str, file: str) -> NoReturn:
    raise InvalidInputError.of("FT4402", f"the observation is refused: {why}", file=file)


def _no_bundle(why: str, file: str) -> FabrictoolError:
    hint = "make one with `fabrictool observe -o FILE`"
    return InvalidInputError.of("FT4401", f"not an observation: {why}", file=file, hint=hint)
