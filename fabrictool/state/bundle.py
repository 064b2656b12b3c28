"""Evidence in a file, signed by the federation's root: plans can be made from it without reaching a cluster.

It holds what planning reads: the clusters' facts, what the living units were told, the state's memory of places and
counts, and the digest of the tenants' keys. No secret is in it; names of
hosts, the operator's included, of jobs and of units are.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fabrictool.base.canonical import canonical_json
from fabrictool.base.errors import FabrictoolError, InvalidInputError, StaleError
from fabrictool.domain.evidence import Evidence
from fabrictool.mesh.identity import CLOCK_SKEW_S, describe_chain

if TYPE_CHECKING:
    from fabrictool.mesh.identity import Credential

BUNDLE_API = "fabrictool/observation/v1"
_PREFIX = b"fabrictool observation v1\n"
"""What is signed begins with it: the root signs certificates, too, and none of them does."""


def sign_bundle(evidence: Evidence, root: Credential) -> bytes:
    """The file; what was applied is left out, for planning does not read it."""
    memory = msgspec.structs.replace(
        evidence.state,
        lineage=evidence.lineage,
        applied_units={},
        applied_plan="",
        applied_blueprint="",
        forecast=msgspec.UNSET,
    )
    return signed({"api": BUNDLE_API, **msgspec.to_builtins(msgspec.structs.replace(evidence, state=memory))}, root)


def signed(body: dict[str, Any], root: Credential) -> bytes:
    """A document with its signature, readable in a review."""
    signature = base64.b64encode(root.sign(_PREFIX + canonical_json(body))).decode()
    return json.dumps({**body, "signature": signature}, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def open_bundle(data: bytes, root: bytes, *, fabric: str, now: float, max_age_s: float, file: str) -> Evidence:
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
    if body.get("api") != BUNDLE_API:
        raise _no_bundle(f"it has version {body.get('api')}, not {BUNDLE_API}", file)
    try:
        evidence = msgspec.convert(body, Evidence)
        evidence.running_specs()
    except msgspec.ValidationError as error:
        raise _no_bundle(str(error), file) from error
    except KeyError as error:
        raise _no_bundle(f"what {error} was told is not in it", file) from error
    if evidence.fabric != fabric:
        _distrust(f"it is of fabric {evidence.fabric}, not of {fabric}", file)
    age = now - evidence.at
    if not -CLOCK_SKEW_S <= age <= max_age_s:
        when = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(evidence.at))
        why = f"more than {max_age_s / 3600:.3g} h ago" if age > 0 else "in the future: clocks differ"
        raise StaleError.of("FT4403", f"the bundle was made at {when}, {why}", file=file, hint="observe anew")
    return evidence


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
    raise InvalidInputError.of("FT4402", f"the bundle is refused: {why}", file=file)


def _no_bundle(why: str, file: str) -> FabrictoolError:
    hint = "make one with `fabrictool observe -o FILE`"
    return InvalidInputError.of("FT4401", f"not a bundle: {why}", file=file, hint=hint)
