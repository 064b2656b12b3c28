"""Keys by which tenants are told apart."""

import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.domain.blueprint import Blueprint
from fabrictool.gateway.keys import KeyRow, encode_keys, hash_key, read_keys
from fabrictool.state.tenantkeys import SHORTEST, keys_seen, tenant_keys

LONG = "k" * SHORTEST


def blueprint():
    tenants = {name: {"group": "all", "key": f"secret://env/{name.upper()}"} for name in ("me", "you")}
    return Blueprint.model_validate({
        "apiVersion": "fabrictool/v1", "kind": "Blueprint", "fabric": "f", "tenants": tenants,
        "models": {"m": {"source": "hf://a/b"}}, "trust": {"groups": {"all": {"allow": ("p",)}}},
    }, strict=False)  # fmt: skip


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


def test_a_key_file_with_one_key_for_two_is_refused(tmp_path):
    file = tmp_path / "keys.json"
    file.write_bytes(encode_keys([KeyRow("me", hash_key(LONG), "all"), KeyRow("you", hash_key(LONG), "few")]))
    file.chmod(0o600)
    with pytest.raises(InvalidInputError, match="the same key is listed twice"):
        read_keys(file)
