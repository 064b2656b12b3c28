"""Models that a blueprint describes itself: read like the catalogue's, refused where the catalogue knows better."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from fabrictool.base.canonical import digest
from fabrictool.base.errors import InvalidInputError
from fabrictool.blueprint import load
from fabrictool.blueprint.described import part_text, written_fields
from fabrictool.blueprint.resolved import resolved
from fabrictool.catalog import ModelArchitecture, model, models
from fabrictool.catalog.architecture import ABOUT
from fabrictool.catalog.huggingface import architecture
from fabrictool.domain.architectures import Architecture
from fabrictool.domain.blueprint import Blueprint
from fabrictool.domain.plan import inputs_digest

CONFIGS = [json.loads(path.read_text()) for path in sorted(Path(__file__).parents[1].glob("cases/configs/*"))]
BIG = """
  acme/Big-9B:
    layers: 40
    hidden: 4096
    heads: 32
    kv_heads: 8
    head_dim: 128
    ffn: 14336
    vocab: 128256
    max_context: 32768
"""
HEAD = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: test
inventory: inventory.yaml
"""
INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}}
sites: {a: {provider: alpha}}
clusters:
  one:
    site: a
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 2}}
    software: {engines: {vllm: {}}}
"""
MODELS = "models:\n  big: {source: hf://acme/Big-9B}\n"


@pytest.fixture
def fabric(tmp_path):
    """Writes files beside an inventory and loads ``blueprint.yaml`` of them."""
    (tmp_path / "inventory.yaml").write_text(INVENTORY)

    def run(blueprint, overlay=None, scenario=None, **files):
        for name, text in {"blueprint": blueprint, **files}.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return load(tmp_path / "blueprint.yaml", overlay=overlay, scenario=scenario, environment={})

    return run


def part(text):
    return f"apiVersion: fabrictool/v1\nkind: Part\narchitectures:{text}"


def test_a_model_finds_the_blueprints_own_architecture(fabric):
    loaded = fabric(f"{HEAD}architectures:{BIG}{MODELS}  tuned: {{source: file:///w, architecture: acme/Big-9B}}\n")
    blueprint = loaded.blueprint
    entry = blueprint.architecture(blueprint.models["big"])
    assert entry == blueprint.architecture(blueprint.models["tuned"])
    assert (entry.id, entry.layers, entry.kv_heads, entry.gated_ffn) == ("acme/Big-9B", 40, 8, True)
    assert entry.published_parameters == entry.parameters == 9_775_157_248
    assert entry.source == "the blueprint"


def test_the_catalogue_is_known_as_before(fabric):
    blueprint = fabric(f"{HEAD}models: {{a: {{source: hf://Qwen/Qwen3-32B}}}}\n").blueprint
    assert blueprint.architecture(blueprint.models["a"]) is model("Qwen/Qwen3-32B")


def test_the_published_number_stays_and_may_be_rounded(fabric):
    blueprint = fabric(f"{HEAD}architectures:{BIG}    published_parameters: 9500000000\n{MODELS}").blueprint
    assert blueprint.architecture(blueprint.models["big"]).published_parameters == 9_500_000_000


def test_a_part_may_hold_them_and_an_overlay_may_change_one(fabric):
    files = {"big": part(BIG), "overlays__deep": part("\n  acme/Big-9B: {layers: 80}\n")}
    blueprint = fabric(f"{HEAD}include: [big.yaml]\n{MODELS}", overlay="deep", **files).blueprint
    entry = blueprint.architecture(blueprint.models["big"])
    assert (entry.layers, entry.hidden) == (80, 4096)


def test_a_scenario_may_change_one(fabric):
    text = f"{HEAD}architectures:{BIG}{MODELS}scenarios: {{wide: {{architectures: {{acme/Big-9B: {{ffn: 28672}}}}}}}}\n"
    blueprint = fabric(text, scenario="wide").blueprint
    assert blueprint.architecture(blueprint.models["big"]).ffn == 28672


def test_the_same_id_in_two_parts_names_both(fabric):
    with pytest.raises(InvalidInputError) as caught:
        fabric(f"{HEAD}include: [a.yaml, b.yaml]\n{MODELS}", a=part(BIG), b=part(BIG))
    (problem,) = caught.value.problems
    assert problem.code == "FT1303"
    assert [Path(place.file).name for place in (problem.place, *problem.also)] == ["b.yaml", "a.yaml"]
    assert problem.place.line == 4


def test_one_that_says_what_the_catalogue_says_is_none_the_worse(fabric):
    known = model("Qwen/Qwen3-32B")
    lines = "\n".join(f"    {name}: {json.dumps(value)}" for name, value in written_fields(known).items())
    text = f"{HEAD}architectures:\n  Qwen/Qwen3-32B-FP8:\n{lines}\nmodels: {{a: {{source: hf://Qwen/Qwen3-32B-FP8}}}}\n"
    blueprint = fabric(text).blueprint
    assert blueprint.architecture(blueprint.models["a"]) is known
    with pytest.raises(InvalidInputError) as caught:
        fabric(text.replace("layers: 64", "layers: 65"))
    (problem,) = caught.value.problems
    assert problem.code == "FT1281"
    assert "layers 64, not 65" in problem.message
    assert problem.place.line == 6


def test_a_context_beyond_it_is_refused_as_the_catalogues_is(fabric):
    text = f"{HEAD}architectures:{BIG}models: {{big: {{source: hf://acme/Big-9B, variant: {{context: 32769 tok}}}}}}\n"
    with pytest.raises(InvalidInputError, match="exceeds the context length of acme/Big-9B") as caught:
        fabric(text)
    assert caught.value.problems[0].code == "FT1224"


def test_the_digest_depends_on_what_it_says_and_is_the_old_one_without(fabric):
    with_it = fabric(f"{HEAD}architectures:{BIG}{MODELS}")
    changed = fabric(f"{HEAD}architectures:{BIG.replace('40', '41')}{MODELS}")
    spelled = fabric(f"{HEAD}architectures:{BIG}    qkv_bias: false\n{MODELS}")
    assert with_it.digest != changed.digest
    assert with_it.digest == spelled.digest
    without = fabric(f"{HEAD}models: {{a: {{source: hf://Qwen/Qwen3-32B}}}}\n")
    old = without.blueprint.model_dump(mode="json")
    inventory = without.inventory.model_dump(mode="json")
    assert old.pop("architectures") == {}
    for cut in (old["defaults"]["parallelism"], old["models"]["a"]["parallelism"]):
        assert cut.pop("dp") is None
    assert old["models"]["a"].pop("variants") == []
    assert inventory.pop("calibrations") == []
    assert old.pop("limits") == inventory.pop("limits") == {}
    assert old.pop("timezone") == "UTC"
    assert old.pop("together") is None
    for cluster in inventory["clusters"].values():
        for partition in cluster["partitions"].values():
            assert (partition.pop("price_hours"), partition.pop("queue_wait")) == (None, None)
    for site in inventory["sites"].values():
        assert (site.pop("carbon"), site.pop("carbon_hours")) == (None, None)
    assert without.digest == digest([old, inventory])
    assert inputs_digest(without.blueprint, without.inventory) == without.digest


def test_show_knows_where_each_number_comes_from(fabric):
    rows = {row.path: row for row in resolved(fabric(f"{HEAD}include: [big.yaml]\n{MODELS}", big=part(BIG)))}
    layers = rows["architectures.acme/Big-9B.layers"]
    assert (layers.value, Path(layers.origin.file).name, layers.origin.line) == ("40", "big.yaml", 5)
    assert rows["architectures.acme/Big-9B.experts"].origin.file is None


def test_the_document_has_every_number_of_the_catalogue_and_says_what_it_means():
    numbers = {name for name in ModelArchitecture.__struct_fields__ if name not in ABOUT}
    assert set(Architecture.model_fields) == numbers | {"published_parameters", "source"}
    assert all(field.description for field in Architecture.model_fields.values())


@pytest.mark.parametrize("entry", models().values(), ids=lambda entry: entry.id)
def test_what_the_catalogue_has_could_be_written_in_a_blueprint(entry):
    document = {
        "apiVersion": "fabrictool/v1",
        "kind": "Blueprint",
        "fabric": "x",
        "models": {"a": {"source": "hf://a/b"}},
    }
    described = written_fields(entry) | {"published_parameters": entry.published_parameters}
    read = Blueprint.model_validate({**document, "architectures": {"a/b": described}})
    again = read.architecture(read.models["a"])
    assert again.numbers == entry.numbers
    assert again.published_parameters == entry.published_parameters


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: f"{case['model']} {case['config']['model_type']}")
def test_what_is_read_from_a_config_comes_back_from_the_file_that_is_written(case, fabric):
    entry = architecture(case["config"], "x")
    entry = msgspec.structs.replace(
        entry, id="acme/Same", source='a "config.json": # of § 1', published_parameters=entry.parameters
    )
    text = f"{HEAD}include: [part.yaml]\nmodels: {{a: {{source: hf://acme/Same}}}}\n"
    loaded = fabric(text, part=part_text(entry, "config.json"))
    assert loaded.warnings == ()
    assert loaded.blueprint.architecture(loaded.blueprint.models["a"]) == entry
