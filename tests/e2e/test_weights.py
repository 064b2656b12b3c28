"""Weights from the list in Git to a model that answers, by the command line; and what is caught before a start."""

import json
import re

import pytest

from tests.clusters.fake_hub import COMMIT, REPOSITORY, FakeHost, FakeHub, wrong_octet
from tests.conftest import BLUEPRINT, INVENTORY


def with_folders(bed):
    inventory = INVENTORY
    for name in ("one", "two"):
        inventory = inventory.replace(f"  {name}:\n", f"  {name}:\n    weights: {bed.folder / name}\n")
    return inventory


@pytest.fixture
def pinned(fabric_bed):
    """A blueprint whose model is pinned, and what stages it."""
    bed = fabric_bed
    folder = bed.folder / "files"
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes((bed.folder / bed.values["model"]).read_bytes())
    for name in ("one", "two"):
        (bed.folder / name).mkdir()
    inventory = with_folders(bed)
    locked = bed.run("weights", "lock", "tiny", str(folder), "--json")
    bed.digest = json.loads(locked.stdout)["sha256"]
    weights = f"weights: {{tiny: {{source: files, sha256: {bed.digest}}}}}\nmodels:"
    blueprint = BLUEPRINT.replace("models:", weights).replace("file://%(model)s", "weights://tiny/tiny.gguf")
    bed.write(inventory=inventory, blueprint=blueprint)
    return bed


def staged_file(bed, cluster):
    return bed.folder / cluster / f"sha256-{bed.digest}" / "tiny.gguf"


def test_from_the_list_to_an_answer_and_no_start_from_what_is_not_listed(pinned):
    bed = pinned
    bed.run("trust", "init")
    assert "FT5605 replica/tiny/0: its weights are not staged" in bed.run("plan").stdout
    refused = bed.run("apply", "--yes", code=None)
    assert refused.returncode == 4, "the gateway was started"
    assert refused.stderr.count("error[FT5605]") == 2
    assert "fabrictool weights stage" in refused.stderr
    assert not [address for address, _ in bed.units() if address.startswith("replica/")]

    shown = bed.run("weights", "plan").stdout
    assert re.search(r"one +tiny +absent", shown)
    assert "tiny: staged on one" in bed.run("weights", "stage", "one").stderr
    bed.run("weights", "stage")
    assert bed.run("weights", "verify").stdout.count(": whole") == 2

    data = bytearray(staged_file(bed, "two").read_bytes())
    data[len(data) // 2] ^= 1
    staged_file(bed, "two").write_bytes(data)
    refused = bed.run("apply", "--yes", code=4)
    assert "are not what is listed" in refused.stderr
    assert "tiny.gguf" in refused.stderr
    assert {address for address, state in bed.units() if state == "running"} == {"gateway/main", "replica/tiny/0"}
    verified = bed.run("weights", "verify", code=1)
    assert "tiny on two: damaged: tiny.gguf" in verified.stdout

    assert "staged on two" in bed.run("weights", "stage", "two").stderr
    bed.run("apply", "--yes")
    listed = json.loads(bed.run("weights", "list", "--json").stdout)["sets"]
    assert [(row["cluster"], row["weights"], row["complete"], row["units"] > 0) for row in listed] == [
        ("one", "tiny", True, True),
        ("two", "tiny", True, True),
    ]
    assert "nothing to remove" in bed.run("weights", "prune", "--yes").stderr
    bed.run("destroy", "--yes")
    (bed.folder / "blueprint.yaml").write_text(BLUEPRINT % bed.values)
    assert "freed" in bed.run("weights", "prune", "one", "--yes").stderr
    assert json.loads(bed.run("weights", "list", "one", "--json").stdout)["sets"] == []


def test_what_is_wrong_is_said_with_what_to_type(pinned):
    bed = pinned
    (bed.folder / "weights" / "tiny.sha256").write_text("0" * 64 + "  tiny.gguf\n")
    wrong = bed.run("weights", "stage", code=65).stderr
    assert "FT5606" in wrong
    assert "fabrictool weights lock tiny" in wrong
    assert "FT5341" in bed.run("weights", "stage", "nowhere", code=64).stderr
    assert "FT9001" in bed.run("weights", "lock", "other", code=64).stderr
    assert "FT5602" in bed.run("weights", "lock", "tiny", "nothing-here", code=None).stderr
    text = (bed.folder / "blueprint.yaml").read_text().replace("weights://tiny/", "weights://tinny/")
    (bed.folder / "blueprint.yaml").write_text(text)
    assert "FT1270" in bed.run("validate", code=65).stderr


@pytest.fixture
def hub(fabric_bed):
    """A repository with the model, and a large file that the model does not need."""
    model = (fabric_bed.folder / fabric_bed.values["model"]).read_bytes()
    cdn = FakeHost()
    hub = FakeHub(cdn, {"tiny.gguf": model, "large.safetensors": bytes(50_000)})
    yield hub
    hub.stop()
    cdn.stop()


def test_from_a_hub_to_an_answer_with_one_command(fabric_bed, hub):
    bed = fabric_bed
    bed.environment["HF_ENDPOINT"] = hub.url
    locked = json.loads(bed.run("weights", "lock", "tiny", f"hf://{REPOSITORY}@main", "--json").stdout)
    assert locked["source"] == f"hf://{REPOSITORY}@{COMMIT}"
    weights = f"weights: {{tiny: {{source: {locked['source']}, sha256: {locked['sha256']}}}}}\nmodels:"
    blueprint = BLUEPRINT.replace("models:", weights).replace("file://%(model)s", "weights://tiny/tiny.gguf")
    bed.write(inventory=with_folders(bed), blueprint=blueprint)
    before = len(hub.asked)
    row = json.loads(bed.run("weights", "plan", "one", "--json").stdout)["sets"][0]
    assert (row["condition"], row["from"], row["source"]) == ("absent", "login", locked["source"])
    assert row["missing"] == row["octets"] > 50_000
    assert len(hub.asked) == before, "a plan needs no network"
    assert "FT5610" in bed.run("weights", "stage", "--from", "job", code=64).stderr

    bed.run("trust", "init")
    assert "`fabrictool apply --stage`" in bed.run("apply", "--yes", code=4).stderr
    hub.cdn.once(wrong_octet)
    said = bed.run("apply", "--yes", "--stage").stderr
    assert said.index("replicas on one wait for weights tiny") < said.index("tiny: staged on one")
    assert "tiny: staged on two" in said
    assert bed.running() == ["gateway/main", "replica/tiny/0", "replica/tiny/1"]
    assert bed.run("weights", "verify").stdout.count(": whole") == 2


def test_a_hub_that_does_not_give_it_is_said(fabric_bed, hub):
    bed = fabric_bed
    bed.environment["HF_ENDPOINT"] = hub.url
    assert "FT5608" in bed.run("weights", "lock", "tiny", "hf://org/other", code=65).stderr
    assert "FT5602" in bed.run("weights", "lock", "tiny", "hf://other", code=65).stderr
    locked = bed.run("weights", "lock", "tiny", f"hf://{REPOSITORY}", "--exclude", "*.safetensors", "--json").stdout
    assert json.loads(locked)["files"] == 1
