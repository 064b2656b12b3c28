"""Who may speak for a provider whose key is not here, and what is not kept."""

import time

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.mesh.identity import Credential, issue_session
from fabrictool.mesh.transport.tls import IdentityFiles
from fabrictool.state.controllers import accept_controller, check_controller, controller_identity, write_controller
from fabrictool.state.truststore import TrustStore

NOW = time.time()


def store_at(folder):
    store = TrustStore(folder)
    store.init("t", now=NOW)
    store.issue("beta", now=NOW)
    return store


@pytest.fixture
def theirs(tmp_path):
    return store_at(tmp_path / "theirs")


@pytest.fixture
def ours(tmp_path, theirs):
    """With the federation's root certificate, and no key of beta's."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "root.crt").write_bytes((theirs.folder / "root.crt").read_bytes())
    return TrustStore(tmp_path / "ours")


def identity(tmp_path, store, role="controller", name="handed"):
    folder = tmp_path / name
    folder.mkdir()
    if role == "controller":
        write_controller(store, "beta", folder, days=30, now=NOW)
    else:
        credential = issue_session(store.signer("beta"), role, now=NOW)
        IdentityFiles(folder).write(credential, Credential(credential.key, (store.root_certificate(),)))
    return folder


def test_a_controller_that_was_handed_over_is_kept_and_speaks(tmp_path, theirs, ours):
    with pytest.raises(FabrictoolError, match="FT6109"):
        check_controller(ours, "beta", now=NOW)
    handed = identity(tmp_path, theirs)
    assert accept_controller(ours, handed, now=NOW) == "beta"
    check_controller(ours, "beta", now=NOW)
    with controller_identity(ours, "beta", now=NOW) as files:
        assert files.read()[0].claims.session == IdentityFiles(handed).read()[0].claims.session
    assert files.key.stat().st_mode & 0o077 == 0
    assert files.folder.stat().st_mode & 0o077 == 0
    with pytest.raises(FabrictoolError, match="FT6005"):
        check_controller(ours, "beta", now=NOW + 31 * 86400)
    newer = identity(tmp_path, theirs, name="newer")
    accept_controller(ours, newer, now=NOW)
    with controller_identity(ours, "beta", now=NOW) as files:
        assert files.read()[0].claims.session == IdentityFiles(newer).read()[0].claims.session


def test_where_the_providers_key_is_one_is_made_for_once(theirs):
    with controller_identity(theirs, "beta", now=NOW) as files:
        assert files.read()[0].claims.role == "controller"
    assert not files.folder.exists()
    assert not (theirs.folder / "controllers").exists()


def test_what_is_no_controller_of_this_federation_is_not_kept(tmp_path, theirs, ours):
    with pytest.raises(FabrictoolError, match="FT6003"):
        accept_controller(ours, identity(tmp_path, theirs, "agent"), now=NOW)
    stranger = identity(tmp_path, store_at(tmp_path / "other"), name="strange")
    with pytest.raises(FabrictoolError, match="FT600"):
        accept_controller(ours, stranger, now=NOW)
    with pytest.raises(FabrictoolError, match="FT6001"):
        accept_controller(ours, tmp_path, now=NOW)
    assert not (ours.folder / "controllers").exists()


def test_a_revoked_controller_speaks_no_more(tmp_path, theirs):
    handed = identity(tmp_path, theirs)
    accept_controller(theirs, handed, now=NOW)
    theirs.revoke(IdentityFiles(handed).read()[0].claims.session, now=NOW)
    with pytest.raises(FabrictoolError, match="FT6007"), controller_identity(theirs, "beta", now=NOW):
        pass
