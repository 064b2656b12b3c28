from __future__ import annotations

import os
import sys
import types

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.units import UnitError
from fabrictool.blueprint.secrets import resolve
from fabrictool.domain.secrets import SecretRef

PLANTED = "sk-planted-0123456789"


def failing(ref, environment):
    with pytest.raises(FabrictoolError) as error:
        resolve(SecretRef.parse(ref), environment)
    (problem,) = error.value.problems
    assert PLANTED not in problem.render()
    assert problem.hint
    return problem.code


@pytest.mark.parametrize(
    "text",
    [
        "secret://env/KEY",
        "secret://file/~/key",
        "secret://file//etc/key",
        "secret://keyring/a/b",
        "secret://sops/f#a.b",
    ],
)
def test_references_round_trip(text):
    assert str(SecretRef.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "secret://env/A-B",
        "secret://env/",
        "secret://file/",
        "secret://keyring/a",
        "secret://sops/f",
        "secret://x/y",
        "secret://",
    ],
)
def test_malformed_references(text):
    with pytest.raises(UnitError) as error:
        SecretRef.parse(text)
    assert error.value.code == "FT1119"


def test_a_literal_is_never_repeated():
    with pytest.raises(UnitError) as error:
        SecretRef.parse(PLANTED)
    assert error.value.code == "FT1118"
    assert PLANTED not in f"{error.value!r} {error.value} {error.value.hint}"


def test_environment():
    assert resolve(SecretRef.parse("secret://env/KEY"), {"KEY": PLANTED}) == PLANTED
    assert failing("secret://env/KEY", {}) == "FT1401"
    assert failing("secret://env/KEY", {"KEY": "\n"}) == "FT1408"


def test_file(tmp_path):
    path = tmp_path / "key"
    ref = f"secret://file/{path}"
    assert failing(ref, {}) == "FT1402"
    path.write_text(PLANTED + "\n")
    path.chmod(0o640)
    assert failing(ref, {}) == "FT1403"
    path.chmod(0o600)
    assert resolve(SecretRef.parse(ref), {}) == PLANTED
    path.write_bytes(b"\xff\xfe")
    assert failing(ref, {}) == "FT1402"


def test_keyring(monkeypatch):
    monkeypatch.setitem(sys.modules, "keyring", None)
    assert failing("secret://keyring/fabric/me", {}) == "FT1404"
    stored = {("fabric", "me"): PLANTED}
    module = types.SimpleNamespace(get_password=lambda service, name: stored.get((service, name)))
    monkeypatch.setitem(sys.modules, "keyring", module)
    assert resolve(SecretRef.parse("secret://keyring/fabric/me"), {}) == PLANTED
    assert failing("secret://keyring/fabric/you", {}) == "FT1405"

    def locked(*_):
        raise RuntimeError(f"locked; was {PLANTED}")

    module.get_password = locked
    assert failing("secret://keyring/fabric/me", {}) == "FT1404"


def test_sops(tmp_path):
    assert failing("secret://sops/keys.yaml#me", {"PATH": str(tmp_path)}) == "FT1406"
    program = tmp_path / "sops"
    expected = 'decrypt --extract ["a"]["me"] keys.yaml'
    program.write_text(f"#!/bin/sh\n[ \"$*\" = '{expected}' ] || {{ echo no such key >&2; exit 3; }}\necho {PLANTED}\n")
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin"}
    assert resolve(SecretRef.parse("secret://sops/keys.yaml#a.me"), environment) == PLANTED
    assert failing("secret://sops/keys.yaml#you", environment) == "FT1407"
