"""What loading does beyond complaining: merging, defaults, variables, origins."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.units import Duration, Rate, Share, Tokens
from fabrictool.blueprint import load
from fabrictool.blueprint.resolved import resolved
from fabrictool.blueprint.starter import starter_files
from fabrictool.blueprint.tree import dotted

ENVIRONMENT = {"LISTEN": "0.0.0.0:443"}


@pytest.fixture
def fabric(cases):
    return cases / "good" / "fabric.yaml"


def load_fabric(path, **options):
    return load(path, environment=ENVIRONMENT, **options)


def codes(error):
    return [problem.code for problem in error.value.problems]


def test_values_are_plain_numbers_in_base_units(fabric):
    model = load_fabric(fabric).blueprint.models["llama-70b"]
    assert model.slo.ttft_p95 == 0.8
    assert model.slo.attain == 0.99
    assert model.demand.rate * 2 == 44.0
    assert (model.demand.input.mean, model.demand.input.sd, model.demand.input.max) == (1100, 400, 8000)
    assert (model.demand.output.mean, model.demand.output.sd) == (400, 0)
    assert model.variant.context == 32768


def test_included_parts_add_models_groups_and_tenants(fabric):
    blueprint = load_fabric(fabric).blueprint
    assert list(blueprint.models) == ["llama-70b", "traced", "qwen"]
    assert set(blueprint.trust.groups) == {"everyone", "alpha-only"}
    assert str(blueprint.tenants["clinic"].key) == "secret://sops/keys.enc.yaml#clinic"


def test_defaults_lie_below_each_model(fabric):
    models = load_fabric(fabric).blueprint.models
    assert models["qwen"].slo.ttft_p95 == Duration.parse("800ms")
    assert models["llama-70b"].slo.tpot_p95 == Duration.parse("40ms")
    assert models["traced"].engine == "llama.cpp"
    assert models["qwen"].trust == ("alpha", "beta")


def test_a_trace_replaces_the_default_demand_as_a_whole(fabric):
    demand = load_fabric(fabric).blueprint.models["traced"].demand
    assert demand.trace == "october.csv"
    assert demand.rate is None


def test_variables_are_filled_in_and_listed(fabric):
    loaded = load_fabric(fabric)
    assert str(loaded.blueprint.gateway.listen) == "0.0.0.0:443"
    assert loaded.variables == ("LISTEN",)


def test_dollar_dollar_stands_for_a_dollar(fabric):
    text = fabric.read_text().replace("${LISTEN:?the address for clients}", "$${LISTEN}:1")
    copy = fabric.with_name("copy.yaml")
    with pytest.raises(InvalidInputError) as error:
        parse_copy(copy, text)
    assert codes(error) == ["FT1114"]


def parse_copy(path, text):
    path.write_text(text)
    try:
        return load_fabric(path)
    finally:
        path.unlink()


def test_overlay_changes_and_deletes(fabric):
    blueprint = load_fabric(fabric, overlay="test").blueprint
    assert set(blueprint.models) == {"llama-70b", "traced"}
    assert blueprint.models["llama-70b"].demand.rate == Rate(2.0)
    assert blueprint.models["llama-70b"].demand.input.mean == Tokens(1100)
    assert blueprint.models["llama-70b"].slo.attain == Share(0.9)
    assert blueprint.objective == ("cost",)


def test_unknown_overlay_names_the_nearest(fabric):
    with pytest.raises(InvalidInputError) as error:
        load_fabric(fabric, overlay="tets")
    assert codes(error) == ["FT1304"]
    assert error.value.problems[0].hint == "did you mean `test`?"


@pytest.mark.parametrize("name", ["../good/fabric", "a\0b", "", "x" * 300])
def test_strange_overlay_names_are_refused(fabric, name):
    with pytest.raises(InvalidInputError) as error:
        load_fabric(fabric, overlay=name)
    assert codes(error) == ["FT1304"]


def test_an_overlay_that_deletes_nothing_is_wrong(fabric):
    with pytest.raises(InvalidInputError) as error:
        load_fabric(fabric, overlay="broken")
    assert codes(error) == ["FT1306"]
    assert error.value.problems[0].place.file.endswith("overlays/broken.yaml")


def test_scenario_changes_blueprint_and_inventory(fabric):
    loaded = load_fabric(fabric, scenario="alpha-down")
    assert not loaded.inventory.clusters["alpha-gpu"].enabled
    assert loaded.blueprint.models["llama-70b"].replicas.max == 2
    assert loaded.blueprint.models["llama-70b"].place.pin == ()
    assert loaded.blueprint.gateway.cluster == "beta-gpu"


def test_without_its_scenario_nothing_of_it_applies(fabric):
    loaded = load_fabric(fabric)
    assert loaded.inventory.clusters["alpha-gpu"].enabled
    assert loaded.blueprint.models["llama-70b"].replicas.max == 4


def test_unknown_scenario(fabric):
    with pytest.raises(InvalidInputError) as error:
        load_fabric(fabric, scenario="alpha-dwn")
    assert codes(error) == ["FT1305"]
    assert error.value.problems[0].hint == "did you mean `alpha-down`?"


def test_files_are_the_read_set(fabric):
    loaded = load_fabric(fabric, overlay="test")
    names = [Path(file.path).name for file in loaded.files]
    assert names == ["fabric.yaml", "qwen.yaml", "tenants.yaml", "test.yaml", "inventory.yaml"]
    assert loaded.files[0].sha256 == hashlib.sha256(fabric.read_bytes()).hexdigest()


def test_digest_ignores_comments_and_follows_values(fabric):
    first = load_fabric(fabric).digest
    copy = fabric.with_name("copy.yaml")
    assert parse_copy(copy, "# remark\n" + fabric.read_text()).digest == first
    assert parse_copy(copy, fabric.read_text().replace("22 req/s", "23 req/s")).digest != first


def test_origins_name_file_line_and_column(fabric):
    origins = {row.path: row.origin for row in resolved(load_fabric(fabric))}
    assert str(origins["fabric"]).endswith("good/fabric.yaml:3:9")
    assert str(origins["models.qwen.source"]).endswith("good/parts/qwen.yaml:4:18")
    assert str(origins["models.qwen.slo.ttft_p95"]).endswith("good/fabric.yaml:9:19")
    assert str(origins["inventory.clusters.alpha-gpu.site"]).endswith("inventory.yaml:10:11")


def test_resolved_shows_every_value_as_written_with_its_origin(fabric):
    rows = {row.path: row for row in resolved(load_fabric(fabric))}
    assert rows["models.llama-70b.demand.rate"].value == "22 req/s"
    assert rows["models.llama-70b.demand.input.sd"].value == "400 tok"
    assert rows["models.llama-70b.demand.output"].value == "400 tok"
    assert rows["models.qwen.slo.ttft_p95"].origin.line == 9
    assert rows["gateway.listen"].value == "0.0.0.0:443"
    assert rows["models.qwen.protect"].value == "false"
    assert rows["models.qwen.protect"].origin.file is None
    assert rows["inventory.clusters.alpha-gpu.partitions.normal.price"].value == "8 CHF/h"
    assert not any(path.startswith(("defaults", "scenarios", "include")) for path in rows)


def test_resolved_covers_all_that_is_written(fabric):
    loaded = load_fabric(fabric)
    shown = {row.path for row in resolved(loaded)}
    leaves = [*loaded.blueprint_tree.leaves(), *loaded.inventory_tree.leaves(("inventory",))]
    hidden = ("defaults.", "scenarios.", "include[")
    assert {name for path, _ in leaves if not (name := dotted(path)).startswith(hidden)} <= shown


def test_warnings_do_not_fail(cases, tmp_path):
    text = (
        (cases / "small.yaml")
        .read_text()
        .replace("[alpha]", "[]")
        .replace("me: {group: all, key: secret://env/KEY}", "")
    )
    (tmp_path / "b.yaml").write_text(text.replace("tenants: {}", ""))
    inventory = cases / "bad" / "schema-unit-missing-memory.inventory.yaml"
    (tmp_path / "i.yaml").write_text(inventory.read_text().replace("memory_per_node: 8}", "memory_per_node: 8GiB}"))
    loaded = load(tmp_path / "b.yaml", inventory_path=tmp_path / "i.yaml", environment={})
    assert [problem.code for problem in loaded.warnings] == ["FT1232", "FT1229"]
    without = text.replace("gateway: {cluster: box, listen: 127.0.0.1:8011, mesh: 10.0.0.12:8012}\n", "")
    (tmp_path / "b.yaml").write_text(without.replace("tenants: {}", "tenants: {me: {group: all, key: secret://env/K}}"))
    loaded = load(tmp_path / "b.yaml", inventory_path=tmp_path / "i.yaml", environment={})
    assert [problem.code for problem in loaded.warnings] == ["FT1229", "FT1230"]


def test_a_missing_file_names_the_nearest(cases):
    with pytest.raises(InvalidInputError) as error:
        load(cases / "good" / "fabrik.yaml", environment={})
    assert codes(error) == ["FT1001"]
    assert "fabric.yaml" in error.value.problems[0].hint


@pytest.mark.parametrize("path", [Path(), Path("a\0b"), Path("no/such/folder/x.yaml")])
def test_unreadable_paths_are_problems(path):
    with pytest.raises(InvalidInputError) as error:
        load(path, environment={})
    assert codes(error) == ["FT1001"]


def test_the_shipped_blueprint_and_the_starter_are_valid(root, tmp_path):
    loaded = load(root / "blueprints" / "local.yaml", environment={})
    assert loaded.warnings == ()
    assert loaded.blueprint.models["smollm2-135m"].slo.ttft_p95 == 5.0
    for name, text in starter_files().items():
        (tmp_path / name).write_text(text)
        assert text.startswith("# yaml-language-server: $schema=")
    assert load(tmp_path / "blueprint.yaml", environment={}).warnings == ()


def test_same_problems_in_the_same_order(cases):
    def problems():
        with pytest.raises(InvalidInputError) as error:
            load(cases / "bad" / "schema-all-at-once.yaml", environment={})
        return error.value.problems

    assert problems() == problems()
