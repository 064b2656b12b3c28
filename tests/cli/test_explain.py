"""`explain` knows codes, keys of files, and why a model stands where it stands."""

import json

import pytest

from fabrictool.blueprint.schema import json_schema
from fabrictool.cli.fields import FILES, explain_field, paths


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("models", "blueprint.models"),
        ("models.slo", "blueprint.models.NAME.slo"),
        ("models.llama.slo", "blueprint.models.NAME.slo"),
        ("models.llama.slo.ttft_p95", "blueprint.models.NAME.slo.ttft_p95"),
        ("blueprint.models.replicas.min", "blueprint.models.NAME.replicas.min"),
        ("inventory.clusters.partitions.device", "inventory.clusters.NAME.partitions.NAME.device"),
        ("clusters.alpha.kind", "inventory.clusters.NAME.kind"),
        ("policy.rules.deny", "policy.rules.deny"),
        ("inventory", "inventory"),
    ],
)
def test_a_key_is_found_with_and_without_names(path, shown):
    assert explain_field(path).path == shown


@pytest.mark.parametrize("path", ["", "modles", "models.llama.slo.ttft", "clusters.a.b.c.d.e", "models..slo.x"])
def test_what_no_file_has_is_not_explained(path):
    assert explain_field(path) is None


def test_every_path_that_is_offered_leads_somewhere():
    every = list(paths())
    assert {"models", "models.slo", "clusters.kind"} <= set(every)
    assert all(explain_field(path) is not None for path in every)


@pytest.mark.parametrize("kind", FILES)
def test_every_key_of_the_top_says_what_it_means(kind):
    assert {row.key for row in explain_field(kind).keys} == set(json_schema(kind)["properties"])


def test_a_key_in_words(command):
    code, out, _ = command("explain", "models.slo")
    assert code == 0
    assert out.startswith("blueprint.models.NAME.slo  (keys)\n")
    assert "ttft_p95" in out
    assert "](" not in out, "no page's link"
    assert json.loads(command("explain", "models.slo", "--json")[1])["type"] == "field"


def test_a_model_and_a_place(command):
    code, out, err = command("explain", "model/tiny", "--assume-empty")
    assert (code, "error" in err) == (0, False)
    assert "tiny: 1 on one/cpu" in out
    assert "tiny on one/cpu: the plan has it there" in out
    code, out, _ = command("explain", "tiny@two/cpu", "--assume-empty")
    assert code == 0
    assert out.startswith("· tiny on two/cpu: ")
    assert command("explain", "tiny on two/cpu", "--assume-empty")[1] == out
    document = json.loads(command("explain", "tiny@two/cpu", "--assume-empty", "--json")[1])
    assert (document["type"], len(document["sentences"])) == ("decision", 1)


@pytest.mark.parametrize(
    ("thing", "code", "said"),
    [
        ("FT0000", 64, "FT9003"),
        ("models.slo.ttf", 64, "FT9003"),
        ("modelz", 64, "nearest: models"),
        ("model/nobody", 64, "FT2015"),
        ("tiny@nowhere", 64, "FT2015"),
        ("nobody on cpu", 64, "FT2015"),
    ],
)
def test_what_is_not_there(command, thing, code, said):
    ended, out, err = command("explain", thing, "--assume-empty")
    assert (ended, out) == (code, "")
    assert said in err
