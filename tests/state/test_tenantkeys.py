"""Keys by which tenants are told apart."""

import msgspec
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.domain.blueprint import Blueprint
from fabrictool.gateway.keyfile import KeyRow, encode_keys
from fabrictool.gateway.keys import hash_key, read_keys
from fabrictool.state.tenantkeys import SHORTEST, keys_seen, tenant_keys

LONG = "k" * SHORTEST


def blueprint(**more):
    tenants = {name: {"group": "all", "key": f"secret://env/{name.upper()}"} for name in ("me", "you")}
    return Blueprint.model_validate({
        "apiVersion": "fabrictool/v1", "kind": "Blueprint", "fabric": "f", "tenants": tenants,
        "models": {"m": {"source": "hf://a/b"}}, "trust": {"groups": {"all": {"allow": ("p",)}}},
    } | more, strict=False)  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "codes"),
    [
        ({"ME": LONG, "YOU": LONG}, ["FT1410"]),
        ({"ME": LONG, "YOU": "k" * (SHORTEST - 1)}, ["FT1409"]),
        ({"ME": "k", "YOU": "k"}, ["FT1409", "FT1409", "FT1410"]),
    ],
)
def test_equal_and_short_keys_are_refused_by_plan_and_by_apply(keys, codes):
    for call in (tenant_keys, keys_seen):
        with pytest.raises(InvalidInputError) as error:
            call(blueprint(), keys)
        assert [problem.code for problem in error.value.problems] == codes
        assert all(key not in str(error.value).split() for key in keys.values())


def test_good_keys_pass_and_missing_ones_are_only_unknown_to_a_plan():
    assert tenant_keys(blueprint(), {"ME": LONG, "YOU": LONG + "!"}) is not None
    assert keys_seen(blueprint(), {"ME": LONG}) is None


def test_the_key_of_the_key_api_goes_with_the_tenants_and_a_change_of_it_is_seen():
    gateway = {"cluster": "c", "listen": "1.2.3.4:5", "mesh": "1.2.3.4:6"}
    api = {"gateway": gateway | {"key_api": {"key": "secret://env/ADMIN", "group": "all"}}}
    keys = {"ME": LONG + "1", "YOU": LONG + "2", "ADMIN": LONG + "3"}
    sent = tenant_keys(blueprint(**api), keys)
    assert msgspec.json.decode(sent.file)["admin"] == hash_key(LONG + "3")
    assert LONG not in sent.file.decode()
    assert b"admin" not in tenant_keys(blueprint(), keys).file, "earlier releases could not read it"
    digests = {tenant_keys(its, seen).digest for its, seen in (
        (blueprint(), keys), (blueprint(**api), keys), (blueprint(**api), keys | {"ADMIN": LONG + "4"}),
    )}  # fmt: skip
    assert len(digests) == 3
    alone = blueprint(**api, tenants={})
    assert tenant_keys(alone, keys).digest
    assert keys_seen(alone, keys).tenants == {"gateway/key_api": "secret://env/ADMIN"}
    for wrong, code in (("short", "FT1409"), (LONG + "1", "FT1410")):
        with pytest.raises(InvalidInputError) as error:
            tenant_keys(blueprint(**api), keys | {"ADMIN": wrong})
        assert [problem.code for problem in error.value.problems] == [code]


def test_a_key_file_with_one_key_for_two_is_refused(tmp_path):
    file = tmp_path / "keys.json"
    file.write_bytes(encode_keys([KeyRow("me", hash_key(LONG), "all"), KeyRow("you", hash_key(LONG), "few")]))
    file.chmod(0o600)
    with pytest.raises(InvalidInputError, match="the same key is listed twice"):
        read_keys(file)
