"""A provider is revoked while all serve: its replica is cut off and ends, and the others go on."""

import json

import pytest

from tests.e2e.test_apply import ask
from tests.e2e.test_engine_death import gateway, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]


def routable(bed):
    return {n["provider"] for n in gateway(bed)["nodes"] if n["role"] == "agent" and n["connected"]}


def test_a_revoked_provider_serves_nobody_and_may_come_back_with_a_new_certificate(fabric_bed):
    bed = fabric_bed
    bed.up()
    assert routable(bed) == {"alpha", "beta"}
    assert "FT4007" in bed.run("trust", "revoke", "beta", code=64).stderr
    assert "FT6303" in bed.run("trust", "revoke", "nobody", "--yes", code=65).stderr
    assert routable(bed) == {"alpha", "beta"}
    assert "fabrictool apply" in bed.run("trust", "revoke", "beta", "--yes").stderr
    assert "beta" in bed.run("trust", "show").stdout.split("REVOKED")[1]
    before = bed.units()["gateway/main", "running"].pid
    plan = json.loads(bed.run("plan", "--json").stdout)
    assert [(a["kind"], a["address"]) for a in plan["actions"] if a["kind"] != "keep"] == [("update", "gateway/main")]
    bed.run("apply", "--yes", code=None)  # the replica that is cut off does not become ready
    until(lambda: routable(bed) == {"alpha"})
    until(lambda: len(bed.running()) == 2)
    assert bed.units()["gateway/main", "running"].pid == before, "it took it over while it served"
    assert ask(bed)["model"] == "tiny"
    (ended,) = (u for u in bed.units().values() if u.state == "ended")
    assert ended.reason == "it was revoked"
    assert "FT6007" in bed.run("apply", "--yes", code=None).stderr, "it gets no new session"
    bed.run("trust", "issue", "beta")
    bed.run("apply", "--yes")
    assert routable(bed) == {"alpha", "beta"}
