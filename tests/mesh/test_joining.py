"""Join tokens and what an issuer signs: pure, on a clock of the tests' own."""

import base64

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fabrictool.domain.specs import HostPort
from fabrictool.mesh.identity import (
    CLOCK_SKEW_S,
    IdentityError,
    IdentityVerifier,
    create_root,
    issue_provider,
    issue_session,
    raw_key,
)
from fabrictool.mesh.issuing import AFTER_END_S, MAX_SESSION_S, SESSION_S, ask_for, judge
from fabrictool.mesh.jointoken import MAX_TOKEN_OCTETS, JoinToken, JoinTokenError, binding, read_token, write_token
from fabrictool.mesh.records import Lifecycle, NodeBody, ServiceBody, seal
from fabrictool.mesh.registry import Registry, Verdict

NOW = 1_800_000_000.0
HOUR = 3600.0
ROOT = create_root("t", now=NOW)
ALPHA, BETA = (issue_provider(ROOT, name, now=NOW) for name in ("alpha", "beta"))
KEY = Ed25519PrivateKey.generate()


def token_of(provider=BETA, root=ROOT, **changes):
    fields = {
        "id": "ab" * 16,
        "fabric": "t",
        "root": root.chain[0],
        "signer": provider.chain[0],
        "issuer": HostPort("login.beta.example.org", 8444),
        "gateways": (HostPort("gateway.example.org", 8443),),
        "uses": 1,
        "created": NOW,
        "expires": NOW + HOUR,
    }
    return JoinToken(**fields | changes)


def asked(text, now=NOW, provider=BETA, key=KEY, ends_at=None, shown=""):
    return judge(ask_for(text, key, ends_at=ends_at, shown=shown), provider, now=now)


def refusal(text, **how):
    with pytest.raises(JoinTokenError) as refused:
        asked(text, **how)
    return refused.value.problems[0].code


def test_a_token_survives_its_text_and_its_session_is_one_of_its_provider():
    token = token_of(models=("org/name", "b"))
    assert read_token(f"  {write_token(token, BETA)}\n").token == token
    chain = asked(write_token(token, BETA)).sign(BETA, now=NOW)
    session = IdentityVerifier(ROOT.chain[0]).verify(chain, now=NOW)
    assert (session.claims.provider, session.claims.role, session.models) == ("beta", "agent", ("org/name", "b"))
    assert raw_key(session.public_key) == raw_key(KEY.public_key())


def test_no_changed_octet_of_a_token_passes():
    text = write_token(token_of(), BETA)
    prefix, payload, signature = text.split(".")
    for index in range(0, len(payload), 7):
        other = "A" if payload[index] != "A" else "B"
        assert refusal_of_reading(f"{prefix}.{payload[:index]}{other}{payload[index + 1 :]}.{signature}") == "FT6401"
    assert refusal_of_reading(f"{prefix}.{payload}.{'A' * len(signature)}") == "FT6401"


@pytest.mark.parametrize("text", ["", "ftjoin1", "ftjoin1.é.a", "ftjoin1.####.####", "x" * (MAX_TOKEN_OCTETS + 1)])
def test_what_is_no_token_is_said_to_be_none(text):
    assert refusal_of_reading(text) == "FT6401"


def refusal_of_reading(text):
    with pytest.raises(JoinTokenError) as refused:
        read_token(text)
    return refused.value.problems[0].code


def test_a_token_that_an_agent_or_another_provider_signed_is_refused():
    agent = issue_session(BETA, "agent", now=NOW)
    for forger in (agent, ALPHA):
        assert refusal_of_reading(write_token(token_of(), forger)) == "FT6401"
    assert refusal_of_reading(write_token(token_of(agent), agent)) == "FT6401", "an agent is no provider"


def test_each_reason_not_to_sign_has_its_code():
    stranger = create_root("t", now=NOW)
    theirs = issue_provider(stranger, "beta", now=NOW)
    renewed = issue_provider(ROOT, "beta", now=NOW)
    assert refusal(write_token(token_of(theirs, stranger), theirs)) == "FT6402"
    assert refusal(write_token(token_of(ALPHA), ALPHA)) == "FT6403"
    assert refusal(write_token(token_of(), BETA), provider=renewed) == "FT6413"
    bound = write_token(token_of(bound=binding("ab" * 16, "4711")), BETA)
    assert refusal(bound) == refusal(bound, shown="4712") == "FT6406"
    assert asked(bound, shown="4711")


@pytest.mark.parametrize(
    ("now", "good"),
    [
        (NOW + HOUR, True),
        (NOW + HOUR + CLOCK_SKEW_S, True),
        (NOW + HOUR + CLOCK_SKEW_S + 1, False),
        (NOW - CLOCK_SKEW_S, True),
        (NOW - CLOCK_SKEW_S - 1, False),
    ],
)
def test_clocks_may_differ_by_the_same_as_for_certificates(now, good):
    text = write_token(token_of(), BETA)
    assert asked(text, now=now) if good else refusal(text, now=now) == "FT6404"


def test_only_the_holder_of_the_key_gets_it_signed_and_only_with_this_token():
    text, other = write_token(token_of(), BETA), write_token(token_of(id="cd" * 16), BETA)
    request = ask_for(text, KEY, ends_at=None, shown="")
    stolen = raw_key(Ed25519PrivateKey.generate().public_key())
    for change in ({"key": stolen}, {"token": other}, {"proof": b"\0" * 64}):
        with pytest.raises(JoinTokenError) as refused:
            judge(msgspec.structs.replace(request, **change), BETA, now=NOW)
        assert refused.value.problems[0].code == "FT6408"


def test_a_session_lasts_as_long_as_its_job_and_no_longer_than_a_week():
    text = write_token(token_of(), BETA)
    assert asked(text).seconds == SESSION_S
    assert asked(text, ends_at=NOW + HOUR).seconds == HOUR + AFTER_END_S
    assert asked(text, ends_at=NOW + 10**9).seconds == MAX_SESSION_S
    assert asked(text, ends_at=NOW - 10**9).seconds > 0


@pytest.mark.parametrize("models", [("a,b",), ("a\nb",), ("x" * 200, "y" * 200)])
def test_models_that_a_certificate_cannot_name_are_refused_when_the_token_is_made(models):
    with pytest.raises(JoinTokenError) as refused:
        write_token(token_of(models=models), BETA)
    assert refused.value.problems[0].code == "FT6407"


def test_the_registry_refuses_a_model_that_the_certificate_does_not_name():
    session = issue_session(BETA, "agent", now=NOW, models=("allowed",))
    registry = Registry(IdentityVerifier(ROOT.chain[0]))
    federation, name = session.claims.federation, bytes.fromhex(session.claims.session)
    node = NodeBody(federation, name, Lifecycle.SERVING, 1, "agent", "t", "beta", "s", "c", "n")
    assert registry.merge(seal(node, session.sign, session.chain).envelope, wall=NOW).verdict is Verdict.NEW
    for number, (model, verdict) in enumerate([("allowed", Verdict.NEW), ("other", Verdict.REJECTED)]):
        body = ServiceBody(federation, name, bytes([number] * 16), Lifecycle.SERVING, 1, "r", model, "external")
        assert registry.merge(seal(body, session.sign).envelope, wall=NOW).verdict is verdict


def test_an_issuer_is_no_member_and_a_member_is_no_issuer():
    issuer, agent = (issue_session(BETA, role, now=NOW).chain for role in ("issuer", "agent"))
    members = IdentityVerifier(ROOT.chain[0])
    issuers = IdentityVerifier(ROOT.chain[0], ("issuer",))
    assert members.verify(agent, now=NOW)
    assert issuers.verify(issuer, now=NOW)
    for verifier, chain in ((members, issuer), (issuers, agent)):
        with pytest.raises(IdentityError) as refused:
            verifier.verify(chain, now=NOW)
        assert refused.value.problems[0].code == "FT6003"


def test_the_token_holds_no_private_key():
    octets = base64.urlsafe_b64decode(write_token(token_of(), BETA).split(".")[1] + "===")
    for credential in (ROOT, BETA):
        assert credential.key.private_bytes_raw() not in octets
