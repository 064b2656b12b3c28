"""``catalogue``: an unknown model's config.json becomes a file that a blueprint includes, and the model is planned."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from fabrictool.catalog import accelerators, model, models
from fabrictool.state.planfile import read_plan
from tests.simulator.fabrics import ACCELERATED

CASES = Path(__file__).parents[1] / "cases" / "configs"
MADE_UP = {
    "_name_or_path": "acme/Mix-42B", "model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288,
    "moe_intermediate_size": 1024, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 150000, "max_position_embeddings": 65536, "num_experts": 64,
    "num_experts_per_tok": 4, "tie_word_embeddings": False, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: lab
inventory: inventory.yaml
include: [mix.yaml]
models:
  mix:
    source: hf://acme/Mix-42B
    variant: {precision: fp8}
    demand: {rate: 2 req/s, input: 500 tok, output: 200 tok}
    slo: {ttft_p95: 2s, tpot_p95: 100ms}
scenarios:
  rush: {models: {mix: {demand: {rate: 40 req/s}}}}
  small: {architectures: {acme/Mix-42B: {layers: 24}}}
"""


@pytest.fixture
def written(folder):
    """Writes a config.json into the folder: its name."""

    def write(config=MADE_UP, name="config.json"):
        data = config if isinstance(config, bytes) else json.dumps(config).encode()
        (folder / name).write_bytes(data)
        return name

    return write


def released(name):
    return json.loads((CASES / f"{name}.json").read_text())["config"]


def test_an_unknown_model_is_described_included_and_planned(command, folder, written):
    (folder / "inventory.yaml").write_text(ACCELERATED)
    (folder / "fabric.yaml").write_text(BLUEPRINT)
    assert "FT1301" in command("validate", "-b", "fabric.yaml")[2]
    code, out, err = command("catalogue", "add", written(), "-o", "mix.yaml")
    assert (code, out) == (0, "")
    assert "acme/Mix-42B: 48 layers; 41.71 billion parameters, 4.86 billion of them at work on a token" in err
    assert "98.3 KB of KV cache a token; a context of 65,536 tokens" in err
    assert "quantised (fp8)" in err
    assert "`include: [mix.yaml]`" in err
    assert "`source: hf://acme/Mix-42B`" in err

    code, _, err = command("validate", "-b", "fabric.yaml")
    assert (code, err) == (0, "fabric.yaml is valid: 1 model, 2 clusters\n")
    code, out, err = command("plan", "-b", "fabric.yaml", "-o", "plan.json", "--seed", 1)
    assert code == 0, err
    assert "1 create" in out
    assert "replica/mix/0" in out
    code, out, err = command("simulate", "-b", "fabric.yaml", "--requests", 200, "--json")
    assert code == 0, err
    (played,) = json.loads(out)["models"]
    assert played["finished"] == 200
    assert 0.004 < played["latency"]["tpot"]["p50"] < 0.1, "5 GB of weights a token on an H100, with others"

    # Half as deep, half the time: what is planned depends on the numbers, not on the name.
    code, out, err = command("simulate", "-b", "fabric.yaml", "--requests", 200, "--scenario", "small", "--json")
    assert code == 0, err
    assert json.loads(out)["models"][0]["latency"]["tpot"]["p50"] < 0.75 * played["latency"]["tpot"]["p50"]
    code, out, err = command(
        "plan", "-b", "fabric.yaml", "--what-if", "rate.mix*=30", "--executor", "processes", "--workers", 1
    )
    assert code == 0, err
    assert "rate.mix*=30" in out
    code, out, err = command("show", "-b", "fabric.yaml", "--origin")
    assert "architectures.acme/Mix-42B.layers" in out
    code, out, err = command("show", "plan.json")
    assert (code, "replica/mix/0" in out) == (0, True)


def test_a_reviewed_plan_is_stale_when_the_models_numbers_change(command, folder, written):
    """As it is when anything else of the blueprint does."""
    (folder / "inventory.yaml").write_text(ACCELERATED)
    (folder / "fabric.yaml").write_text(BLUEPRINT)
    command("catalogue", "add", written(), "-o", "mix.yaml")
    assert command("plan", "-b", "fabric.yaml", "-o", "a.json")[0] == 0
    assert command("plan", "-b", "fabric.yaml", "-o", "b.json")[0] == 0
    text = (folder / "mix.yaml").read_text()
    (folder / "mix.yaml").write_text("# A comment more.\n" + text)
    assert command("plan", "-b", "fabric.yaml", "-o", "c.json")[0] == 0
    (folder / "mix.yaml").write_text(text.replace("layers: 48", "layers: 47"))
    assert command("plan", "-b", "fabric.yaml", "-o", "d.json")[0] == 0
    plans = [read_plan(folder / f"{name}.json").read_set["blueprint"] for name in "abcd"]
    assert plans[0] == plans[1] == plans[2] != plans[3]
    code, _, err = command("apply", "a.json", "-b", "fabric.yaml", "--yes")
    assert (code, "blueprint" in err) == (5, True)


def test_the_file_goes_to_stdout_and_the_talk_does_not(command, written):
    code, out, err = command("catalogue", "add", written(), "--id", "acme/Other")
    assert code == 0
    document = yaml.safe_load(out)
    assert document["kind"] == "Part"
    fields = document["architectures"]["acme/Other"]
    assert list(fields)[:3] == ["layers", "hidden", "heads"]
    assert (fields["experts"], fields["active_experts"], fields["qk_norm"]) == (64, 4, True)
    assert "tied_embeddings" not in fields, "it is the default"
    assert out.startswith("# Written by `fabrictool catalogue add` from config.json\n")
    assert "save it as FILE" in err


def test_a_config_may_come_by_a_pipe(command, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(MADE_UP).encode())))
    code, out, _ = command("catalogue", "add", "-")
    assert code == 0
    assert "acme/Mix-42B:" in out
    assert "standard input" in out


def test_json_is_one_document(command, written):
    code, out, _ = command("catalogue", "add", written(), "--json", "-o", "mix.yaml")
    document = json.loads(out)
    assert (code, document["id"], document["known"], document["written"]) == (0, "acme/Mix-42B", False, "mix.yaml")
    assert document["parameters"] == 41_708_437_504
    assert document["kv_octets_per_token"] == 48 * 2 * 4 * 128 * 2
    assert document["architecture"]["expert_ffn"] == 1024


def test_what_the_catalogue_knows_is_not_written(command, folder, written):
    name = written(released("moonshotai--Kimi-K2.5"))
    code, out, err = command("catalogue", "add", name, "--id", "moonshotai/Kimi-K2.5", "-o", "kimi.yaml")
    assert (code, out) == (0, "")
    assert "1026 billion parameters, 31.7 billion of them" in err
    assert "parts for images or sound are not counted" in err
    assert "the catalogue has this model with these numbers" in err
    assert not (folder / "kimi.yaml").exists()


def test_other_numbers_than_the_catalogues_are_refused_by_name(command, folder, written):
    name = written(released("moonshotai--Kimi-K2.5"))
    code, out, err = command("catalogue", "add", name, "--id", "moonshotai/Kimi-K2-Instruct", "-o", "kimi.yaml")
    assert (code, out) == (65, "")
    assert "FT1281" in err
    assert "max_context 131072, not 262144" in err
    assert not (folder / "kimi.yaml").exists()


def test_another_content_is_replaced_by_force_alone(command, folder, written):
    name = written()
    assert command("catalogue", "add", name, "-o", "mix.yaml")[0] == 0
    before = (folder / "mix.yaml").read_text()
    code, _, err = command("catalogue", "add", name, "-o", "mix.yaml")
    assert (code, "as it should be" in err) == (0, True)
    code, _, err = command("catalogue", "add", name, "--id", "acme/Other", "-o", "mix.yaml")
    assert (code, "FT9007" in err, (folder / "mix.yaml").read_text()) == (65, True, before)
    code, _, err = command("catalogue", "add", name, "--id", "acme/Other", "-o", "mix.yaml", "--force")
    assert (code, "acme/Other:" in (folder / "mix.yaml").read_text()) == (0, True)


LLAMA = {key: value for key, value in MADE_UP.items() if "expert" not in key} | {"model_type": "llama"}


@pytest.mark.parametrize(
    ("config", "exit_code", "code", "words"),
    [
        (b"", 65, "FT1423", "is empty"),
        (b'{"model_type": ', 65, "FT1423", "not JSON"),
        (b"\x80\x00\xffweights", 65, "FT1423", "not text in UTF-8"),
        (b"[" * 100_000, 65, "FT1423", "nested too deep"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", 65, "FT1423", "too many digits"),
        (b" " * ((16 << 20) + 1), 65, "FT1423", "larger than 16 MiB"),
        ([1, 2], 65, "FT1422", "holds a list"),
        ({"model_type": "bert", "hidden_size": 768}, 65, "FT1420", "'bert'"),
        ({"hidden_size": 768}, 65, "FT1420", "no `model_type`"),
        (MADE_UP | {"model_type": ["llama"]}, 65, "FT1420", "unknown model family"),
        (MADE_UP | {"new_attention": 2}, 65, "FT1421", "new_attention"),
        (MADE_UP | {"text_config": [1]}, 65, "FT1421", "text_config"),
        (MADE_UP | {"vocab_size": None}, 65, "FT1422", "vocab_size is missing"),
        (MADE_UP | {"hidden_size": 10**30}, 65, "FT1422", "hidden_size is more than"),
        (MADE_UP | {"num_experts_per_tok": 65}, 65, "FT1422", "65 of 64 experts"),
        (LLAMA | {"num_key_value_heads": 5}, 65, "FT1422", "does not divide"),
        (LLAMA | {"_name_or_path": "../checkpoint"}, 64, "FT9001", "--id ORGANISATION/NAME"),
    ],
)
def test_what_is_no_config_is_told_and_nothing_is_written(command, folder, written, config, exit_code, code, words):
    actual, out, err = command("catalogue", "add", written(config), "-o", "x.yaml")
    assert (actual, out) == (exit_code, "")
    assert code in err
    assert words in err
    assert not (folder / "x.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (["nowhere.json"], 1, "FT4302"),
        (["."], 1, "FT4302"),
        (["config.json", "--id", "Mix"], 64, "FT9001"),
        (["config.json", "--id", "a/b/c"], 64, "FT9001"),
        (["config.json", "--id", "a/b: {"], 64, "FT9001"),
        (["config.json", "-o", "."], 1, "FT4302"),
        (["config.json", "-o", "no/such/x.yaml"], 1, "FT4302"),
    ],
)
def test_a_mistake_on_the_command_line_has_a_code(command, written, arguments, exit_code, code):
    written()
    actual, out, err = command("catalogue", "add", *arguments)
    assert (actual, out) == (exit_code, "")
    assert code in err


def test_a_file_name_cannot_end_the_comment_that_holds_it(command, written):
    name = written(name="config\nmodels: {}\x1b[2J.json")
    code, out, _ = command("catalogue", "add", name)
    assert code == 0
    assert set(yaml.safe_load(out)) == {"apiVersion", "kind", "architectures"}


def test_models_and_devices_are_listed(command):
    code, out, _ = command("catalogue", "models")
    assert code == 0
    assert len(out.splitlines()) == 1 + len(models())
    row = next(line for line in out.splitlines() if line.startswith("moonshotai/Kimi-K2.5 ")).split()
    assert row[1:] == ["1026", "31.69", "61", "70.27", "262144"]
    listed = json.loads(command("catalogue", "models", "--json")[1])["models"]
    assert [entry["id"] for entry in listed] == list(models())
    assert all(model(alias).id == entry["id"] for entry in listed for alias in entry["aliases"])
    code, out, _ = command("catalogue", "devices")
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(accelerators())
    listed = json.loads(command("catalogue", "devices", "--json")[1])["devices"]
    assert {entry["id"]: entry["memory"] for entry in listed}["h100-sxm"] == 80e9
