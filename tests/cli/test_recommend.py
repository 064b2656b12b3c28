"""``recommend`` from the command line."""

import json

import pytest

ASK = ("recommend", "meta-llama/Llama-3.1-8B-Instruct", "--device", "h100-sxm", "--devices", 2)
LOAD = ("--input", 600, "--output", 60, "--slo", "ttft_p95=1s, tpot_p95=25ms")


def test_the_recommendation_is_one_that_can_be_copied_into_a_blueprint(command):
    code, out, err = command(*ASK, *LOAD)
    assert code == 0
    lines = out.splitlines()
    assert {"TTFT p95", "TPOT p95"} <= {*lines[0].replace("  ", "\n").split("\n"), "TTFT p95", "TPOT p95"}
    (starred,) = [line for line in lines if line.startswith("*")]
    assert starred.endswith("yes")
    assert "* recommended for meta-llama/Llama-3.1-8B-Instruct, 600 tokens in, 60 out: vllm on" in err
    assert "in a blueprint: engine: vllm, variant: {precision:" in err
    assert "+ by the forecast as it is, without room for its error" in err


def test_the_document_says_the_same(command, tmp_path):
    code, out, _ = command(*ASK, *LOAD, "--json", "--plot", tmp_path / "front.png")
    document = json.loads(out)
    assert code == 0
    assert (document["type"], document["confidence"]) == ("recommendation", 0.9)
    assert document["targets"] == {"ttft_p95": 1.0, "tpot_p95": 0.025}
    pick, even = document["pick"], document["by_forecast"]
    assert pick["worst_over_target_with_confidence"] <= 1 < even["worst_over_target_with_confidence"]
    assert even["worst_over_target"] <= 1
    rate = pick.pop("requests_per_s_within_targets")
    assert 0 < rate <= pick["requests_per_s"]
    assert pick in document["points"]
    assert pick["requests_per_s"] == pytest.approx(pick["tokens_per_s"] / 60)
    assert max(p["tokens_per_s_per_device"] for p in document["front"]) >= even["tokens_per_s_per_device"]
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_that_keeps_the_targets_is_exit_code_3(command):
    code, out, err = command(*ASK, "--slo", "tpot_p99=100us")
    assert code == 3
    assert "nothing keeps the targets with 90% confidence; nearest, ×" in err
    assert not [line for line in out.splitlines() if line.startswith("*")]


def test_with_confidence_of_one_half_there_is_one_pick(command):
    code, out, err = command(*ASK, *LOAD, "--confidence", "50%")
    assert code == 0
    assert "+ by the forecast" not in err
    assert not [line for line in out.splitlines() if line.startswith("+")]


def test_an_engine_that_plans_do_not_start_is_said(command):
    code, _, err = command(*ASK[:4], "--devices", 1, "--engine", "tensorrt-llm", "--precision", "fp8", *LOAD)
    assert code == 0
    assert "plans do not start tensorrt-llm: start it with the engine's own flags, and `adopt` it" in err
    assert "in a blueprint:" not in err


def test_what_one_must_know_to_believe_it_is_said(command):
    _, _, err = command(*ASK, *LOAD, "--kv-precision", "fp8")
    assert "90% is for each target by itself" in err
    assert "of requests that come at random: up to" in err
    (line,) = [line for line in err.splitlines() if line.startswith("* lies outside of what was measured (")]
    assert "prompts of 1,024 to 8,192 tokens, answers of" in line
    assert "the cache is kept in fp8" in err


def test_cuts_that_the_engine_refuses_are_said(command):
    ask = ("recommend", "Qwen/Qwen3-235B-A22B", "--device", "b200", "--precision", "fp8", "--json")
    refused = json.loads(command(*ask)[1])["refused"]
    _, _, err = command(*ask[:-1])
    assert "for each of dp 4)" in err
    (why,) = {r["why"] for r in refused if (r["tp"], r["ep"]) == (8, 1)}
    assert "tp 8 does not divide the experts' width 1536 of Qwen/Qwen3-235B-A22B into whole blocks of 128" in why


def test_a_replica_over_several_nodes_says_what_lies_between_them(command):
    ask = ("recommend", "deepseek-ai/DeepSeek-R1", "--device", "h100-sxm", "--devices", 16, "--slo", "tpot_p50=1s")
    code, _, err = command(*ask)
    assert code == 0
    assert "vllm on 16 × h100-sxm" in err
    assert "* spans nodes of 8; between them 50 GB/s for each device" in err


def test_a_price_is_what_tokens_cost(command):
    code, out, _ = command(*ASK[:2], "--device", "h100-sxm=3.6", "--devices", 1, "--precision", "fp8", *LOAD)
    assert code == 0
    assert "COST/MTOK" in out
    document = json.loads(
        command(*ASK[:2], "--device", "h100-sxm=3.6", "--devices", 1, "--precision", "fp8", *LOAD, "--json")[1]
    )
    pick = document["pick"]
    assert pick["cost_per_million_tokens"] == pytest.approx(3.6 / 3600 / pick["tokens_per_s"] * 1e6, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "h1000"), "unknown device 'h1000'"),
        (("--device", "h100-sxm=cheap"), "'cheap' is no price"),
        (("--device", "h100-sxm=-1"), "'-1' is no price"),
        (("--device", "h200="), "'' is no price"),
        (("--device", "h100-sxm"), "--device h100-sxm is given twice"),
        (("--slo", "tpot_p95=1s,tpot_p95=2s"), "tpot_p95 is given twice"),
        (("--slo", "tpot_p95=1s", "--output", "1"), "an answer of one token has no TPOT"),
        (("--kv-precision", "fp3"), "unknown precision of the cache 'fp3'"),
        (("--device", "a100-80g=2"), "some devices have a price and some have none"),
        (("--engine", "tgi"), "unknown engine 'tgi'"),
        (("--precision", "fp3"), "unknown precision 'fp3'"),
        (("--slo", "tpot_p42=1s"), "'tpot_p42=1s' is no target"),
        (("--slo", "tpot_p95"), "'tpot_p95' is no target"),
        (("--slo", "tpot_p95=12"), "--slo tpot_p95"),
        (("--slo", "tpot_p95=0s"), "no time that a request can keep"),
        (("--confidence", "high"), "--confidence 'high'"),
        (("--confidence", "100%"), "--confidence is 100%"),
        (("--devices", "0"), "--devices"),
        (("--plot", "front.pdf"), "neither .svg nor .png"),
    ],
)
def test_mistakes_are_said(command, options, message):
    code, out, err = command(*ASK, *options)
    assert code in (64, 65)
    assert message in err
    assert not out


def part(*ids, **changes):
    shape = {"layers": 24, "hidden": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "ffn": 8192,
             "vocab": 49152, "max_context": 8192} | changes  # fmt: skip
    fields = "".join(f"    {name}: {value}\n" for name, value in shape.items())
    entries = "".join(f"  {name}:\n{fields}" for name in ids)
    return f"apiVersion: fabrictool/v1\nkind: Part\narchitectures:\n{entries}"


def test_a_model_that_a_part_describes(command, folder):
    (folder / "mine.yaml").write_text(part("acme/Mine"))
    code, out, err = command("recommend", "mine.yaml", "--device", "h100-sxm", "--devices", 1, "--json")
    assert code == 0, err
    assert json.loads(out)["pick"]
    (folder / "two.yaml").write_text(part("acme/Mine", "acme/Yours"))
    code, _, err = command("recommend", "two.yaml", "--device", "h100-sxm")
    assert (code, "FT1411" in err, "describes 2 models: acme/Mine, acme/Yours" in err) == (65, True, True)
    (folder / "none.yaml").write_text("apiVersion: fabrictool/v1\nkind: Part\n")
    assert "none.yaml:1:1: error[FT1102]" in command("recommend", "none.yaml", "--device", "h100-sxm")[2]
    (folder / "known.yaml").write_text(part("Qwen/Qwen3-32B"))
    assert "error[FT1281]" in command("recommend", "known.yaml", "--device", "h100-sxm")[2]
    (folder / "odd.yaml").write_text(part("acme/Mine", heads=-1))
    assert "odd.yaml:7:" in command("recommend", "odd.yaml", "--device", "h100-sxm")[2]
    assert "error[FT1001]" in command("recommend", "nowhere.yaml", "--device", "h100-sxm")[2]


def test_an_unknown_model_and_one_that_fits_nowhere(command, folder):
    assert "FT1411" in command("recommend", "nobody/nothing", "--device", "h100-sxm")[2]
    (folder / "broken.json").write_text("{")
    code, _, err = command("recommend", "broken.json", "--device", "h100-sxm")
    assert code == 65
    assert "error[FT1423]: broken.json is not JSON" in err
    assert "error[FT4302]" in command("recommend", "nowhere/config.json", "--device", "h100-sxm")[2]
    code, _, err = command("recommend", "deepseek-ai/DeepSeek-R1", "--device", "h100-sxm", "--devices", 1)
    assert code == 65
    assert "error[FT2111]: no setting can run: deepseek-ai/DeepSeek-R1 at fp8 needs" in err
