"""Gateways that want a signed build send nothing to whoever shows none; the rule comes and goes while they serve."""

import json
import subprocess
import urllib.error

import pytest

from tests.conftest import BLUEPRINT
from tests.e2e.test_standstill import ask, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WITHIN_S = 60.0
"""Seconds at most; the machine may be busy with other tests."""


def providers(bed):
    found = set()
    for _ in range(8):
        try:
            found.add(ask(bed))
        except urllib.error.HTTPError as error:
            found.add(error.code)
            error.close()
    return found


def until_both_serve(bed):
    """Who is asked is drawn for each request: both are seen sooner or later."""
    seen = set()

    def both():
        seen.update(providers(bed))
        return seen >= {"alpha", "beta"}

    until(both, WITHIN_S)


def test_who_shows_no_signed_build_gets_no_requests(fabric_bed):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", fabric_bed.folder / "key"], check=True)
    signer = (fabric_bed.folder / "key.pub").read_text().strip()
    fabric_bed.up()
    until_both_serve(fabric_bed)
    before = {address: unit.pid for (address, _), unit in fabric_bed.units().items()}
    rule = f"trust: {{builds: {{signers: ['{signer}'], providers: [beta]}}, groups:"
    fabric_bed.write(blueprint=BLUEPRINT.replace("trust: {groups:", rule))
    plan = json.loads(fabric_bed.run("plan", "--json").stdout)
    assert [(a["kind"], a["address"]) for a in plan["actions"] if a["kind"] != "keep"] == [("update", "gateway/main")]
    fabric_bed.run("apply", "--yes")
    until(lambda: providers(fabric_bed) == {"alpha"}, WITHIN_S)
    assert "nothing is sent there: it shows no signed build" in fabric_bed.run("events").stdout
    fabric_bed.write(blueprint=BLUEPRINT.replace("trust: {groups:", rule.replace(", providers: [beta]", "")))
    fabric_bed.run("apply", "--yes")
    until(lambda: providers(fabric_bed) & {404, 503} == providers(fabric_bed), WITHIN_S)
    fabric_bed.write()
    fabric_bed.run("apply", "--yes")
    until_both_serve(fabric_bed)
    assert {address: unit.pid for (address, _), unit in fabric_bed.units().items()} == before


def test_a_key_that_is_none_is_shown_with_its_place(fabric_bed):
    wrong = "trust: {builds: {signers: [ssh-rsa AAAA], providers: [nobody]}, groups:"
    fabric_bed.write(blueprint=BLUEPRINT.replace("trust: {groups:", wrong))
    said = fabric_bed.run("validate", code=65).stderr
    assert "FT1116" in said
    assert "blueprint.yaml:" in said
    assert "ssh-keygen -t ed25519" in said


def test_an_installation_that_the_gateways_would_refuse_is_said_before_it_serves(fabric_bed):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", fabric_bed.folder / "key"], check=True)
    signer = (fabric_bed.folder / "key.pub").read_text().strip()
    fabric_bed.write(
        blueprint=BLUEPRINT.replace("trust: {groups:", f"trust: {{builds: {{signers: ['{signer}']}}, groups:")
    )
    said = fabric_bed.run("validate").stderr
    assert "warning[FT1235]: nobody signed this installation" in said
    assert "blueprint.yaml:" in said
    (fabric_bed.folder / "rubbish").write_text("no key")
    wrong = fabric_bed.run("trust", "sign-build", "--key", "rubbish", "-o", "out", code=None).stderr
    assert "rubbish: error[FT6009]" in wrong
