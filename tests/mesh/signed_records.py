"""A federation with three owners, and records that they sign."""

from fabrictool.mesh.identity import Credential, IdentityVerifier, create_root, issue_provider, issue_session
from fabrictool.mesh.records import Lifecycle, NodeBody, ServiceBody, seal
from fabrictool.mesh.registry import Registry

NOW = 1_800_000_000.0
ROOT = create_root("test", now=NOW)
PROVIDERS = {name: issue_provider(ROOT, name, now=NOW) for name in ("alpha", "beta", "gamma")}
SESSIONS = [issue_session(PROVIDERS[p], "agent", now=NOW) for p in ("alpha", "beta", "alpha")]
VERIFIER = IdentityVerifier(ROOT.chain[0])


def node(owner: Credential, version=1, lifecycle=Lifecycle.SERVING, **changes):
    fields = {
        "federation": VERIFIER.federation,
        "session": bytes.fromhex(owner.claims.session),
        "lifecycle": lifecycle,
        "version": version,
        "role": "agent",
        "fabric": "test",
        "provider": owner.claims.provider,
        "site": "s",
        "cluster": "c",
        "node": "n",
    }
    return NodeBody(**(fields | changes))


def service(owner: Credential, number=0, version=1, lifecycle=Lifecycle.SERVING, **changes):
    fields = {
        "federation": VERIFIER.federation,
        "session": bytes.fromhex(owner.claims.session),
        "service": bytes([number]) * 16,
        "lifecycle": lifecycle,
        "version": version,
        "replica": f"m/{number}",
        "model": "m",
        "engine": "reference",
    }
    return ServiceBody(**(fields | changes))


def sealed(owner, body):
    return seal(body, owner.sign, owner.chain)


def fresh():
    return Registry(VERIFIER)
