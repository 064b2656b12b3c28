"""A build that a maintainer signed: what nodes show, and what gateways make of it."""

import os
import shutil
import subprocess

import msgspec
import pytest

from fabrictool import __version__
from fabrictool.agent.measured import measured_build, package_folder, signed_build
from fabrictool.base.errors import FabrictoolError
from fabrictool.cli.main import main
from fabrictool.mesh.attestation import (
    BUILD_FILE,
    Build,
    SignedBuilds,
    digest_of,
    read_build,
    read_signer,
    read_signing_key,
    sign_build,
)  # fmt: skip
from fabrictool.mesh.evidence import NoAttestation
from tests.mesh.signed_records import SESSIONS, node


@pytest.fixture
def key(tmp_path):
    def made(name, *options):
        path = tmp_path / name
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", path, *(options or ("-t", "ed25519"))], check=True)
        return path

    return made


def public(path):
    return read_signer(path.with_suffix(".pub").read_text())


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "package"
    (folder / "inner/__pycache__").mkdir(parents=True)
    (folder / "inner/module.py").write_text("x = 1\n")
    (folder / "inner/__pycache__/module.pyc").write_bytes(b"1")
    (folder / ".cache").write_bytes(b"1")
    return folder


def code_of(action, *arguments):
    with pytest.raises(FabrictoolError) as error:
        action(*arguments)
    return error.value.problems[0].code


def test_what_is_measured_is_what_runs(package):
    before = measured_build(package)
    assert before == digest_of({"inner/module.py": b"x = 1\n"})
    (package / "inner/__pycache__/module.pyc").write_bytes(b"2")
    (package / ".cache").unlink()
    assert measured_build(package) == before
    (package / "inner/module.py").write_text("x = 2\n")
    changed = measured_build(package)
    shutil.move(package / "inner/module.py", package / "module.py")
    assert len({before, changed, measured_build(package)}) == 3


def test_a_node_shows_what_fits_its_files_and_nothing_else(package, key):
    assert signed_build(package) == b""
    evidence = sign_build("1.0", measured_build(package), read_signing_key(key("k").read_bytes()))
    (package / BUILD_FILE).write_bytes(evidence)
    assert signed_build(package) == evidence
    (package / "inner/module.py").write_text("x = 'changed'\n")
    assert code_of(signed_build, package) == "FT6008"
    (package / BUILD_FILE).write_bytes(b"rubbish")
    assert code_of(signed_build, package) == "FT6008"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""),
        ({"build": b""}, "no signed build"),
        ({"build": b"rubbish"}, "cannot be read"),
        ({"release": "2.0"}, "it says that it runs 2.0"),
        ({"provider": "beta", "build": b""}, ""),
    ],
)
def test_gateways_judge_the_nodes_of_whom_they_are_told(changes, word, key):
    path = key("k")
    evidence = sign_build("1.0", b"d" * 32, read_signing_key(path.read_bytes()))
    judge = SignedBuilds([public(path)], ["alpha"])
    shown = node(SESSIONS[0], **({"build": evidence, "release": "1.0"} | changes))
    refusal = judge.refusal(shown)
    assert (refusal == "") is (word == "")
    assert word in refusal
    assert NoAttestation().refusal(shown) == ""


def test_another_signer_and_a_changed_statement_are_refused(key):
    ours, theirs = key("ours"), key("theirs")
    evidence = sign_build("1.0", b"d" * 32, read_signing_key(theirs.read_bytes()))
    everybody = SignedBuilds([public(ours)], None)
    assert "somebody who is not named" in everybody.refusal(node(SESSIONS[1], build=evidence, release="1.0"))
    build = read_build(sign_build("1.0", b"d" * 32, read_signing_key(ours.read_bytes())))
    forged = msgspec.msgpack.encode(msgspec.structs.replace(build, release="2.0"))
    assert "signature" in everybody.refusal(node(SESSIONS[1], build=forged, release="2.0"))
    assert code_of(read_build, forged) == "FT6008"
    no_key = Build("1.0", b"d" * 32, b"\xff" * 32, bytes(64))
    assert "not named" in everybody.refusal(node(SESSIONS[1], build=msgspec.msgpack.encode(no_key), release="1.0"))


def test_only_ed25519_keys_without_a_passphrase_sign(key, tmp_path):
    assert code_of(read_signing_key, key("rsa", "-t", "rsa", "-b", "2048").read_bytes()) == "FT6009"
    assert code_of(read_signing_key, b"rubbish") == "FT6009"
    assert code_of(read_signer, (tmp_path / "rsa.pub").read_text()) == "FT6009"
    assert code_of(read_signer, "ssh-ed25519 AAAA") == "FT6009"
    path = key("locked")
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-P", "", "-f", path], check=True)
    assert code_of(read_signing_key, path.read_bytes()) == "FT6009"


def test_this_installation_is_signed_by_a_command(key, tmp_path, capsys):
    path, output = key("k"), tmp_path / "out"
    assert main(["trust", "sign-build", "--key", str(path), "-o", str(output)]) == 0
    build = read_build(output.read_bytes())
    assert (build.release, build.signer) == (__version__, public(path))
    assert build.digest == measured_build(package_folder())
    assert str(output) in capsys.readouterr().err
    assert main(["trust", "sign-build", "--key", str(tmp_path / "none"), "-o", str(output)]) != 0
    if os.getuid() != 0:
        assert main(["trust", "sign-build", "--key", str(path), "-o", "/x"]) != 0
