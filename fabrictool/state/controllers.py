"""Who speaks for a provider when its idle nodes are assigned models: a kept identity, or one that its key makes.

A kept one lies in ``controllers/PROVIDER/`` of the trust store: made where the provider's key is, and handed over.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

from fabrictool.agent.admission import private_folder
from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.files import file_error, write_atomic
from fabrictool.mesh.identity import Credential, IdentityVerifier, issue_session
from fabrictool.mesh.transport.tls import IdentityFiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fabrictool.state.truststore import TrustStore

ONCE_DAYS = 8
"""A day more than a session's certificate may last, which a controller must outlive."""


def write_controller(store: TrustStore, provider: str, folder: Path, *, days: int, now: float) -> IdentityFiles:
    """A new controller of `provider` in `folder`; it ends with the provider's certificate at the latest."""
    credential = issue_session(store.signer(provider), "controller", now=now, seconds=days * 86400.0)
    files = IdentityFiles(folder)
    files.write(credential, Credential(credential.key, (store.root_certificate(),)))
    return files


def accept_controller(store: TrustStore, folder: Path, *, now: float) -> str:
    """Keep the identity in `folder`, in place of a former one; returns its provider.

    Raises
    ------
    FabrictoolError
        FT6001, FT6002 no identity is there, FT6003 to FT6005 it is none of a controller of this federation that is
        valid now, FT6007 it was revoked.
    """
    files = IdentityFiles(folder)
    provider = _checked(store, files, now=now)
    kept = _kept(store, provider)
    try:
        kept.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(kept.chain, files.chain.read_bytes())
        write_atomic(kept.root, files.root.read_bytes())
        write_atomic(kept.key, files.key.read_bytes(), mode=0o600)
    except OSError as error:
        raise file_error(error, kept.folder) from error
    return provider


def check_controller(store: TrustStore, provider: str, *, now: float) -> None:
    """Raises FT6109 when nobody here may speak for `provider`, and what is wrong with who may."""
    kept = _kept(store, provider)
    if kept.folder.exists():
        _checked(store, kept, now=now)
    elif (store.folder / f"providers/{provider}.key").exists():
        store.signer(provider)
    else:
        hint = (
            f"`fabrictool trust controller {provider} -o FOLDER` where its key lies, `fabrictool trust accept FOLDER`"
        )
        message = f"nobody here may assign anything to the nodes of {provider}: its key is not here, nor a controller"
        raise FabrictoolError.of("FT6109", message, thing=f"provider/{provider}", hint=hint)


@contextlib.contextmanager
def controller_identity(store: TrustStore, provider: str, *, now: float) -> Iterator[IdentityFiles]:
    """The kept one, or a new one in memory for as long as the context lasts; raises as `check_controller`."""
    check_controller(store, provider, now=now)
    kept = _kept(store, provider)
    if kept.folder.exists():
        yield kept
        return
    with made_for_once(store, provider, now=now) as files:
        yield files


@contextlib.contextmanager
def made_for_once(store: TrustStore, provider: str, *, now: float) -> Iterator[IdentityFiles]:
    """A controller that the provider's key makes, gone afterwards."""
    folder = private_folder("", os.environ)
    try:
        yield write_controller(store, provider, folder, days=ONCE_DAYS, now=now)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _kept(store: TrustStore, provider: str) -> IdentityFiles:
    return IdentityFiles(store.folder / "controllers" / provider)


def _checked(store: TrustStore, files: IdentityFiles, *, now: float) -> str:
    credential, _ = files.read()
    session = IdentityVerifier(store.root_certificate()).verify(credential.chain, now=now)
    if session.claims.role != "controller":
        raise InvalidInputError.of("FT6003", f"{session.claims.uri()} is no controller", file=str(files.folder))
    if (store.folder / "revoked" / f"{session.claims.session}.txt").exists():
        raise FabrictoolError.of("FT6007", f"controller {session.claims.session[:8]} was revoked")
    return session.claims.provider
