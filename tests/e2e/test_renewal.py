"""Certificates are renewed while units run: apply and reconcile replace nothing for them."""

import json
import time

import msgspec
import pytest

from fabrictool.base.runfolder import RunFolder
from fabrictool.mesh.identity import certify, chain_pem, describe_chain
from fabrictool.mesh.transport.tls import IdentityFiles
from fabrictool.state.truststore import TrustStore
from fabrictool.status.fleet import FleetStatus

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

UNITS = ["gateway/main", "replica/tiny/0", "replica/tiny/1"]


def pids(bed):
    return {address: unit.pid for (address, state), unit in bed.units().items() if state == "running"}


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def nearly_over(bed, address):
    """As if the unit had been started a day ago: its certificate ends in three minutes."""
    operation = next(unit.operation for (name, _), unit in bed.units().items() if name == address)
    (path,) = (bed.folder / "state").rglob(operation)
    folder = RunFolder(path)
    files = IdentityFiles(folder.identity)
    credential, _ = files.read()
    trust = TrustStore(bed.folder / "state" / "t" / "trust")
    claims = credential.claims
    chain = certify(
        trust.signer(claims.provider), credential.key.public_key(), claims.role, now=time.time(), seconds=180.0,
        began_at=time.time() - 86400.0,
    )  # fmt: skip
    files.chain.write_bytes(chain_pem(chain))
    folder.spec.write_bytes(folder.spec.read_bytes())
    return claims.session, folder


def ends_at(bed, session):
    printed = json.loads(bed.run("mesh", "members", "--json").stdout)
    view = msgspec.convert(printed["document"], FleetStatus)
    return next(member.certificate_ends_at for member in view.members if member.session == session)


@pytest.mark.parametrize("verb", [("apply", "--yes"), pytest.param(("reconcile",), marks=pytest.mark.long)])
def test_a_certificate_that_ends_is_renewed_and_nothing_restarts(fabric_bed, verb):
    fabric_bed.up()
    before = pids(fabric_bed)
    assert sorted(before) == UNITS
    old = [nearly_over(fabric_bed, address) for address in UNITS[:2]]
    for session, _ in old:
        until(lambda session=session: ends_at(fabric_bed, session) < time.time() + 200)
    plan = json.loads(fabric_bed.run("plan", "--json").stdout)
    changes = {a["address"]: a for a in plan["actions"] if a["kind"] != "keep"}
    assert {address: a["kind"] for address, a in changes.items()} == dict.fromkeys(UNITS[:2], "update")
    assert changes["replica/tiny/0"]["reason"] == "its certificate ends soon: it gets another one for its key"
    shown = fabric_bed.run(*verb).stdout
    assert "update" in shown
    assert pids(fabric_bed) == before
    for session, folder in old:
        until(lambda session=session: ends_at(fabric_bed, session) > time.time() + 25 * 3600)
        written = describe_chain((folder.identity / "session.crt").read_bytes())
        assert written.end > time.time() + 25 * 3600
        assert written.begin < time.time() - 86000, "its key is as old as it was"
    assert "No changes" in fabric_bed.run("plan").stdout
    assert fabric_bed.run("status").returncode == 0
