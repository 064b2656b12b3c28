"""Observations in a file: signed, checked, and as good as looking."""

import json
import os
import time

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence, KeysSeen
from fabrictool.domain.observed import ClusterFacts, ObservedUnit
from fabrictool.domain.specs import AgentSpec
from fabrictool.domain.state import State
from fabrictool.mesh.identity import create_root, issue_provider
from fabrictool.state.bundle import open_bundle, sign_bundle, signed
from tests.conftest import BLUEPRINT, INVENTORY

NOW = 1_700_000_000.0
HOUR = 3600.0
ROOT = create_root("f", now=NOW)
UNIT = ObservedUnit(
    address="replica/m/0", operation="replica-m-0-g1-abcd", state="running", spec_digest="d", ends_at=NOW + 0.1
)


SPEC = AgentSpec(
    fabric="f", provider="p", site="s", cluster="c", partition="n", replica="m/0", model="m", source="x", engine="vllm"
)


def bundle(**changes):
    values = {
        "fabric": "f", "lineage": "0123456789abcdef", "at": NOW, "specs": {UNIT.operation: SPEC},
        "state": State(lineage="0123456789abcdef"),
        "clusters": {"c": ClusterFacts(cluster="c", known=True, units=(UNIT,))},
    }  # fmt: skip
    return Evidence(**values | changes)


def opened(data, *, root=ROOT, fabric="f", now=NOW + HOUR, max_age_s=24 * HOUR):
    return open_bundle(data, root.chain_pem(), fabric=fabric, now=now, max_age_s=max_age_s, file="bundle.json")


def refused(data, **options):
    with pytest.raises(FabrictoolError) as error:
        opened(data, **options)
    (problem,) = error.value.problems
    return problem.code


def test_what_is_signed_is_read_again():
    assert opened(sign_bundle(bundle(), ROOT)) == bundle()


def test_any_change_is_refused():
    document = json.loads(sign_bundle(bundle(), ROOT))
    changes = [
        ("at", NOW + 1),
        ("lineage", "f" * 16),
        ("clusters", {}),
        ("specs", {"o": {}}),
        ("extra", 1),
        ("signature", document["signature"][::-1]),
        ("signature", "AAAA"),
        ("at", float("nan")),
    ]
    for name, value in changes:
        assert refused(json.dumps(document | {name: value}).encode()) in ("FT4401", "FT4402"), name
    unit = document["clusters"]["c"]["units"][0]
    unit["state"] = "ended"
    assert refused(json.dumps(document).encode()) == "FT4402"


def test_formatting_and_the_order_of_keys_are_free():
    document = json.loads(sign_bundle(bundle(), ROOT))
    assert opened(json.dumps(dict(reversed(document.items()))).encode()) == bundle()


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"\xff", b'{"signature": 1}', b'{"signature": "!"}', b"[" * 10_000]
)
def test_what_is_no_bundle(data):
    assert refused(data) == "FT4401"


def test_another_federations_or_fabrics_bundle_is_refused():
    data = sign_bundle(bundle(), ROOT)
    assert refused(data, root=create_root("f", now=NOW)) == "FT4402"
    assert refused(data, fabric="g") == "FT4402"
    assert refused(sign_bundle(bundle(), issue_provider(ROOT, "alpha", now=NOW))) == "FT4402"
    assert refused(data, root=issue_provider(ROOT, "alpha", now=NOW)) == "FT4402", "a provider is no root"
    document = json.loads(data)
    del document["signature"]
    assert opened(signed(document, ROOT)) == bundle()
    assert refused(signed(document | {"api": "fabrictool/observation/v9"}, ROOT)) == "FT4401"
    assert refused(signed(document | {"specs": {}}, ROOT)) == "FT4401", "what a unit was told is missing"


def test_a_signature_of_something_else_by_the_root_is_none():
    document = json.loads(sign_bundle(bundle(), ROOT))
    body = {name: value for name, value in document.items() if name != "signature"}
    import base64

    from fabrictool.base.canonical import canonical_json

    document["signature"] = base64.b64encode(ROOT.sign(canonical_json(body))).decode()
    assert refused(json.dumps(document).encode()) == "FT4402"


def test_age():
    data = sign_bundle(bundle(), ROOT)
    assert opened(data, now=NOW + 24 * HOUR) == bundle()
    assert refused(data, now=NOW + 24 * HOUR + 1) == "FT4403"
    assert refused(data, max_age_s=HOUR - 1) == "FT4403"
    assert opened(data, now=NOW - 200) == bundle()
    assert refused(sign_bundle(bundle(at=NOW + 1000), ROOT), now=NOW) == "FT4403"
    assert refused(data, now=NOW + 20 * 365 * 24 * HOUR, max_age_s=1e12) == "FT4402", "the root has expired"


@pytest.fixture
def loaded(tmp_path):
    (tmp_path / "inventory.yaml").write_text(INVENTORY)
    values = {"model": "/m.gguf", "precision": "bf16", "context": 256, "replicas": 1, "listen": 1, "mesh": 2}
    (tmp_path / "blueprint.yaml").write_text(BLUEPRINT % values)
    return load(tmp_path / "blueprint.yaml", environment={})


def test_a_cluster_that_was_not_looked_at_is_unknown_and_one_that_is_not_enabled_is_left_out(loaded):
    looked_at = bundle(clusters={"one": ClusterFacts(cluster="one", known=True), "gone": bundle().clusters["c"]})
    clusters = looked_at.within(loaded.inventory).clusters
    assert {name: facts.known for name, facts in clusters.items()} == {"one": True, "two": False}


def test_what_this_inventory_states_of_queues_counts_and_not_that_of_the_time_of_the_bundle(loaded):
    (name,) = loaded.inventory.clusters["one"].partitions
    partition = loaded.inventory.clusters["one"].partitions[name].model_copy(update={"queue_wait": 60.0})
    one = loaded.inventory.clusters["one"].model_copy(update={"partitions": {name: partition}})
    inventory = loaded.inventory.model_copy(update={"clusters": {**loaded.inventory.clusters, "one": one}})
    looked_at = bundle(clusters={"one": ClusterFacts(cluster="one", known=True, stated_waits={name: 1.0, "old": 2.0})})
    for told, waits in ((inventory, {name: 60.0}), (loaded.inventory, {})):
        assert looked_at.within(told).clusters["one"].stated_waits == waits


def test_the_digest_of_the_keys_counts_for_the_same_tenants_only(loaded):
    tenants = {"tester": "secret://env/FT_TEST_KEY", "alphie": "secret://env/FT_ALPHA_KEY"}
    assert bundle(keys=KeysSeen(digest="d", tenants=tenants)).keys_of(loaded.blueprint) == "d"
    assert bundle(keys=KeysSeen(digest="d", tenants={})).keys_of(loaded.blueprint) is None
    assert bundle().keys_of(loaded.blueprint) is None


# -- with real processes ------------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_the_offline_plan_is_the_online_plan(fabric_bed, tmp_path):
    bed = fabric_bed
    bed.up()
    bed.run("observe", "-o", "bundle.json")
    root = (bed.folder / "state/t/trust/root.crt").rename(bed.folder / "root.crt")
    (bed.folder / "state/t/trust/root.crt").write_bytes(root.read_bytes())
    text = (bed.folder / "bundle.json").read_text()
    assert "ftk_" not in text
    assert "PRIVATE" not in text
    bare = {"FABRICTOOL_STATE_DIR": str(tmp_path / "nothing"), "FT_TEST_KEY": "", "FT_ALPHA_KEY": ""}
    offline = ["plan", "--offline", "--observed", "bundle.json", "--root", "root.crt"]
    for change in ({}, {"context": 128}, {"replicas": 1}, {"replicas": 2, "context": 200}):
        bed.write(**change)
        bed.run("plan", "-o", "online.json")
        bed.run(*offline, "-o", "offline.json", **bare)
        assert (bed.folder / "online.json").read_bytes() == (bed.folder / "offline.json").read_bytes(), change
    assert not (tmp_path / "nothing").exists(), "an offline plan leaves nothing behind"
    bed.run("apply", "offline.json", "--yes")
    bed.write(replicas=1)
    bed.run("plan", "--offline", "--observed", "bundle.json", "-o", "stale.json")
    assert "FT4004" in bed.run("apply", "stale.json", "--yes", code=5).stderr, "facts have moved on since"
    assert len(bed.running()) == 3


@pytest.mark.e2e
def test_refusals_of_the_command_line(fabric_bed):
    bed = fabric_bed
    assert "FT6302" in bed.run("observe", "-o", "bundle.json", code=1).stderr
    bed.run("trust", "init")
    bed.run("observe", "-o", "bundle.json")
    offline = ["plan", "--offline", "--observed", "bundle.json"]
    assert "3 create" in bed.run(*offline).stdout
    assert "FT9008" in bed.run("plan", "--offline", code=64).stderr
    assert "FT9001" in bed.run("plan", "--observed", "bundle.json", code=64).stderr
    assert "FT9001" in bed.run(*offline, "--max-age", "soon", code=64).stderr
    file = bed.folder / "bundle.json"
    os.utime(file, (0, 0))
    assert bed.run(*offline).returncode == 0, "the signed time counts, not the file's"
    began = time.monotonic()
    while "FT4403" not in bed.run(*offline, "--max-age", "1s", code=None).stderr:
        assert time.monotonic() - began < 60
    document = json.loads(file.read_text())
    document["lineage"] = "0" * 16
    file.write_text(json.dumps(document))
    assert "FT4402" in bed.run(*offline, code=65).stderr
    assert "FT4302" in bed.run(*offline[:-1], "missing.json", code=1).stderr


@pytest.mark.e2e
def test_policies_of_the_command_line(fabric_bed):
    bed = fabric_bed
    bed.run("trust", "init")
    (bed.folder / "policy.yaml").write_text(
        "apiVersion: fabrictool/v1\nkind: Policy\nrules:\n"
        "  - {name: few, deny: {max_changes: 2}}\n  - {name: calm, warn: {max_changes: 1}}\n"
    )
    done = bed.run("plan", "--policy", "policy.yaml", "-o", "plan.json", code=6)
    assert "policy.yaml:4:24: error[FT3002]: few: the plan changes 3 units, 2 are allowed" in done.stderr
    assert "FT3003" in done.stderr
    assert "3 create" in done.stdout, "what is denied is shown"
    rows = json.loads(bed.run("plan", "--policy", "policy.yaml", "--json", code=6).stdout)["policy"]
    assert [(row["effect"], row["rule"]) for row in rows] == [("deny", "few"), ("warn", "calm")]
    assert bed.run("apply", "--policy", "policy.yaml", "--yes", code=6).stdout
    assert bed.run("apply", "plan.json", "--policy", "policy.yaml", "--yes", code=6).stdout
    assert bed.units() == {}
    shown = bed.run("show", "plan.json", "--markdown", "--policy", "policy.yaml", code=6).stdout
    assert "⛔ denied" in shown
    document = json.loads(bed.run("show", "plan.json", "--json").stdout)
    assert (document["type"], document["no_op"], document["counts"]["create"]) == ("saved-plan", False, 3)
    assert document["id"] in bed.run("show", "plan.json").stdout
    assert "FT4006" in bed.run("show", "policy.yaml", code=65).stderr
    (bed.folder / "policy.yaml").write_text(
        "apiVersion: fabrictool/v1\nkind: Policy\nrules: [{name: calm, warn: {max_changes: 1}}]\n"
    )
    done = bed.run("apply", "--policy", "policy.yaml", "--yes", "--json")
    assert [json.loads(line)["type"] for line in done.stdout.splitlines()[:2]] == ["version", "policy"]
    assert len(bed.running()) == 3
    bed.write(replicas=1)
    bed.run("plan", "-o", "reviewed.json")
    bed.write(replicas=1, context=128)
    refused = bed.run("apply", "--reviewed", "reviewed.json", "--yes", code=5)
    assert "FT4405" in refused.stderr
    assert len(bed.running()) == 3
    bed.write(replicas=1, context=256)
    bed.run("apply", "--reviewed", "reviewed.json", "--yes")
    assert len(bed.running()) == 2
