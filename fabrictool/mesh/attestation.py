"""What a node says of the software that it runs, and who judges it. Pure.

A node's record has room for one piece of evidence (`NodeBody.build`), which the node's own signature binds to its
session. `Attestation` is the hook: whoever can tell good evidence from bad, such as the quote of a TPM or of a trusted
execution environment. `SignedBuilds` is the one that needs no hardware: a maintainer signs the digest of a build, the
node measures the files that it runs from and shows the signature that fits.

What that proves is little, and is said in ``docs/explanation/trust.md``: a node that lies can show any signature. It
keeps out old builds and changed ones of whoever does not lie.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fabrictool.mesh.identity import IdentityError, raw_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fabrictool.mesh.records import NodeBody

BUILD_FILE = "build.signed"
"""Beside the package's modules: a signed build, as `sign_build` makes it."""
_DOMAIN = b"fabrictool build v1\0"


class Build(msgspec.Struct, frozen=True, array_like=True):
    """One release's files, and who vouches for them."""

    release: Annotated[str, msgspec.Meta(max_length=40)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """Of the files: `digest_of`."""
    signer: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """Public key."""
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


class SignedBuilds:
    """Nodes must run a build that one of the maintainers signed."""

    def __init__(self, signers: Iterable[bytes], providers: Iterable[str] | None) -> None:
        """`signers` are public keys, `providers` those whose nodes are judged; None: all."""
        self._signers = frozenset(signers)
        self._providers = None if providers is None else frozenset(providers)

    def refusal(self, node: NodeBody) -> str:
        if self._providers is not None and node.provider not in self._providers:
            return ""
        if not node.build:
            return "it shows no signed build"
        try:
            build = _decoder.decode(node.build)
        except (msgspec.DecodeError, ValueError):
            return "its build cannot be read"
        if build.signer not in self._signers:
            return "its build is signed by somebody who is not named"
        if build.release != node.release:
            return f"its build is of release {build.release}, and it says that it runs {node.release}"
        return "" if _holds(build) else "the signature of its build is wrong"


_decoder = msgspec.msgpack.Decoder(Build)


def digest_of(files: Mapping[str, bytes]) -> bytes:
    """32 octets of SHA-256 over relative paths and contents, in the order of the paths."""
    whole = hashlib.sha256()
    for path in sorted(files):
        whole.update(hashlib.sha256(path.encode()).digest() + hashlib.sha256(files[path]).digest())
    return whole.digest()


def sign_build(release: str, digest: bytes, key: Ed25519PrivateKey) -> bytes:
    """As it goes into a record, and into the file beside the package."""
    signature = key.sign(_message(release, digest))
    return msgspec.msgpack.encode(Build(release, digest, raw_key(key.public_key()), signature))


def read_build(data: bytes) -> Build:
    """Raises FT6008 for what is no signed build, or whose signature is wrong."""
    try:
        build = _decoder.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise IdentityError.of("FT6008", f"not a signed build: {error}") from error
    if not _holds(build):
        raise IdentityError.of("FT6008", "the signature of this build is wrong")
    return build


def read_signer(text: str) -> bytes:
    """The 32 octets of a public key in OpenSSH's form; raises FT6009."""
    try:
        key = load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise IdentityError.of("FT6009", f"not a public key in OpenSSH's form: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        hint = "ssh-keygen -t ed25519 -f build-key"
        raise IdentityError.of("FT6009", "builds are signed with Ed25519 keys", hint=hint)
    return raw_key(key)


def read_signing_key(data: bytes, file: str | None = None) -> Ed25519PrivateKey:
    """From OpenSSH's form, without a passphrase, as it lay in `file`; raises FT6009."""
    try:
        key = load_ssh_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        message = f"not a private key in OpenSSH's form, or one with a passphrase: {error}"
        hint = "give the private half of the pair; `ssh-keygen -p -f FILE` takes a passphrase off"
        raise IdentityError.of("FT6009", message, file=file, hint=hint) from error
    if not isinstance(key, Ed25519PrivateKey):
        hint = "ssh-keygen -t ed25519 -f build-key"
        raise IdentityError.of("FT6009", "builds are signed with Ed25519 keys", file=file, hint=hint)
    return key


def _message(release: str, digest: bytes) -> bytes:
    return _DOMAIN + msgspec.msgpack.encode((release, digest))


def _holds(build: Build) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(build.signer).verify(build.signature, _message(build.release, build.digest))
    except (InvalidSignature, ValueError):
        return False
    return True
