"""Who assigns what, as far as the command line, the trust folder and the blueprint say."""

import time
from pathlib import Path

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.cli.assigning import ModelWords, Speaker, _wanted, new_controller
from fabrictool.cli.main import main
from fabrictool.cli.source import Source
from fabrictool.mesh.identity import IdentityVerifier
from fabrictool.mesh.issuing import MAX_SESSION_S
from fabrictool.mesh.transport.tls import IdentityFiles
from fabrictool.state.truststore import TrustStore

LOCAL = Path(__file__).parents[2] / "blueprints/local.yaml"


@pytest.fixture
def store(tmp_path):
    store = TrustStore(tmp_path / "trust")
    store.init("t", now=time.time())
    store.issue("beta", now=time.time())
    return store


def test_a_controllers_identity_is_the_owners_alone_and_nothing_but_a_controllers(store, tmp_path):
    folder = tmp_path / "controller"
    new_controller(store, "beta", folder, 30)
    credential, root = IdentityFiles(folder).read()
    session = IdentityVerifier(root).verify(credential.chain, now=time.time())
    assert (session.claims.role, session.claims.provider) == ("controller", "beta")
    assert session.not_after == pytest.approx(time.time() + 30 * 86400, abs=5)
    assert [path.stat().st_mode & 0o077 for path in (folder, folder / "session.key")] == [0, 0]
    before = (folder / "session.key").read_bytes()
    with pytest.raises(FabrictoolError, match="FT4302"):
        new_controller(store, "beta", folder, 30)
    assert (folder / "session.key").read_bytes() == before
    with pytest.raises(FabrictoolError, match="FT6302"):
        new_controller(store, "gamma", tmp_path / "none", 30)
    assert not (tmp_path / "none").exists()


def test_an_identity_for_once_outlives_every_session_and_is_gone_afterwards(store, tmp_path):
    speaker = Speaker(Source(), None, "", tmp_path / "trust", ())
    with speaker.files() as files:
        credential, root = files.read()
        session = IdentityVerifier(root).verify(credential.chain, now=time.time())
        assert MAX_SESSION_S < session.not_after - time.time() < MAX_SESSION_S + 2 * 86400, "and not for much longer"
    assert not files.folder.exists()
    store.issue("alpha", now=time.time())
    with pytest.raises(FabrictoolError, match="alpha, beta are here"), speaker.files():
        pass


def test_a_model_is_the_blueprints_but_for_what_the_command_line_says():
    name, model = next(iter(Source(LOCAL).blueprint.models.items()))
    wanted = _wanted(Source(LOCAL), ModelWords(name, engine="vllm", context=64, tp=2))
    assert (wanted.model, wanted.source, wanted.precision) == (name, model.source, model.variant.precision)
    assert (wanted.engine, wanted.context, wanted.tp) == ("vllm", 64, 2)
    alone = _wanted(Source(Path("/nowhere")), ModelWords("x", source="hf://a/b", engine="vllm"))
    assert (alone.source, alone.precision, alone.context) == ("hf://a/b", "", 0), "no blueprint is needed for that"
    with pytest.raises(FabrictoolError, match="FT9010"):
        _wanted(Source(LOCAL), ModelWords("x", source="hf://a/b"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["agent", "assign", "abc", "--model", "x", "--free", "lots"], 64, "FT9001"),
        (["agent", "assign", "abc"], 64, "--model"),
        (["agent", "keep", "--model", "x", "--count", "0"], 64, "FT9001"),
        (["agent", "unassign", "abc", "--identity", "nowhere", "--gateway", "127.0.0.1:1"], 1, "FT6001"),
        (["agent", "unassign", "abc", "--gateway", "nonsense"], 64, "FT9002"),
    ],
)
def test_a_mistake_has_a_code(capsys, arguments, code, said):
    assert main(arguments) == code
    assert said in capsys.readouterr().err
