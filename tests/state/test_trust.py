"""Certificates end with their issuer's, and a running unit is renewed while there is something to gain by it."""

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.domain.observed import ObservedUnit
from fabrictool.mesh.identity import create_root, describe_chain, issue_provider, issue_session
from fabrictool.planner.succession import expires_soon
from fabrictool.state.truststore import TrustStore

NOW = 1_800_000_000.0
HOUR, DAY = 3600.0, 86400.0


def unit(begin, end, ends_at=None):
    return ObservedUnit(
        address="replica/m/0", operation="o", state="running", spec_digest="",
        certificate_begins_at=begin, certificate_ends_at=end, ends_at=ends_at,
    )  # fmt: skip


def test_a_session_ends_with_its_provider():
    provider = issue_provider(create_root("f", now=NOW), "p", now=NOW, days=1)
    late = issue_session(provider, "agent", now=NOW + 23 * HOUR, seconds=26 * HOUR)
    assert describe_chain(late.chain_pem()).end == NOW + DAY
    with pytest.raises(FabrictoolError, match="FT6006"):
        issue_session(provider, "agent", now=NOW + DAY)


def test_a_chain_ends_with_its_first_certificate_to_end():
    root = create_root("f", now=NOW, days=2)
    provider = issue_provider(root, "p", now=NOW, days=90)
    assert describe_chain(provider.chain_pem()).end == NOW + 2 * DAY
    with pytest.raises(FabrictoolError, match="FT6006"):
        issue_provider(root, "p", now=NOW + 2 * DAY)


@pytest.mark.parametrize(
    ("observed", "renewed"),
    [
        (unit(NOW, NOW + 26 * HOUR), False),
        (unit(NOW - 22.5 * HOUR, NOW + 3.5 * HOUR), True),
        (unit(NOW, NOW + 2.5 * HOUR, NOW + 0.5 * HOUR), False),  # walltime 30 m: the certificate outlives it
        (unit(NOW - 2 * HOUR, NOW + 1, NOW), False),
        (unit(NOW, NOW + HOUR, NOW + 24 * HOUR), False),  # cut by its issuer: a new one would last no longer
        (unit(NOW - 0.9 * HOUR, NOW + 0.1 * HOUR, NOW + 24 * HOUR), True),
        (unit(0.0, 0.0), True),
        (unit(0.0, None), False),
    ],
)
def test_what_is_renewed(observed, renewed):
    assert expires_soon(observed, NOW) is renewed


@pytest.mark.parametrize("name", ["../root", "a/b", "", "p\n"])
def test_a_providers_name_never_leaves_the_folder(tmp_path, name):
    with pytest.raises(FabrictoolError, match="FT6303"):
        TrustStore(tmp_path).provider(name)


def test_only_a_session_of_the_provider_is_renewed_and_only_for_a_week(tmp_path):
    store = TrustStore(tmp_path / "trust")
    store.init("f", now=NOW)
    for provider in ("alpha", "beta"):
        store.issue(provider, now=NOW)
    files = store.session_files("alpha", "agent", now=NOW, seconds=3600.0)
    pem = files["identity/session.crt"]

    def renewed(text=pem, provider="alpha", role="agent", now=NOW + 60.0, **more):
        return store.renewed_files(provider, role, text, now=now, **({"seconds": 7200.0} | more))

    def code(*arguments, **more):
        with pytest.raises(FabrictoolError) as error:
            renewed(*arguments, **more)
        return error.value.problems[0].code

    assert store.signs() == {name: pytest.approx(NOW + 90 * 86400.0, abs=61.0) for name in ("alpha", "beta")}
    beta = store.folder / "providers/beta.crt"
    kept = beta.read_bytes()
    beta.write_bytes(b"rubbish")
    assert [*store.signs()] == ["alpha"], "who only looks is not stopped by it"
    beta.write_bytes(kept)
    first, second = describe_chain(pem), describe_chain(renewed()["identity/session.crt"])
    assert (second.claims, second.begin) == (first.claims, first.begin)
    assert second.end > first.end + 3600
    assert code(b"rubbish") == "FT6002"
    assert code(role="gateway") == "FT6003"
    assert code(provider="beta") == "FT6003"
    stranger = TrustStore(tmp_path / "other")
    stranger.init("f", now=NOW)
    stranger.issue("alpha", now=NOW)
    foreign = stranger.session_files("alpha", "agent", now=NOW, seconds=3600.0)["identity/session.crt"]
    assert code(foreign) in ("FT6003", "FT6004")
    assert code(now=NOW + 5000.0) == "FT6005"
    week = 7 * 86400.0
    old = renewed(seconds=week + 3 * 86400.0)["identity/session.crt"]
    assert code(old, now=NOW + week + 2 * 86400.0) == "FT6010"
    store.revoke(first.claims.session, now=NOW)
    assert code() == "FT6007"
