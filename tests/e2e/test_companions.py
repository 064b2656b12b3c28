"""Two models that share a replica's memory, from the plan to both answers: a real process of the reference engine."""

import json
import re

import pytest

from tests.conftest import BLUEPRINT, INVENTORY
from tests.e2e.test_apply import ask
from tests.e2e.test_merging import engine_of
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BESIDE = """    companions:
      other:
        source: file://%(other)s
        architecture: HuggingFaceTB/SmolLM2-135M-Instruct
        demand: {rate: 0.5 req/s, input: 8 tok, output: 8 tok}
"""
SHARED = BLUEPRINT.replace("    place: {spread: site}\n", BESIDE)
APART = BLUEPRINT.replace(
    "trust:",
    "  other:\n    source: file://%(other)s\n"
    + BLUEPRINT[BLUEPRINT.index("    architecture") : BLUEPRINT.index("trust:")]
    + "trust:",
)


def text(bed, model):
    answer = ask(bed, model=model, max_tokens=12, temperature=0)
    return answer["choices"][0]["message"]["content"], answer["model"]


def test_a_companion_answers_as_it_does_by_itself_and_its_name_is_a_model_like_others(fabric_bed, tmp_path):
    bed = fabric_bed
    other = tmp_path / "other.gguf"
    write_tiny_model(other, seed=23, context=512)
    bed.write(INVENTORY, SHARED, replicas=1, other=other)
    assert "with other in the same memory" in bed.run("plan", "--assume-empty").stdout
    bed.up()
    line = engine_of(bed.units()["replica/tiny/0", "running"].pid)
    names = [line[at + 1] for at, word in enumerate(line) if word == "--served-name"]
    assert names == ["tiny", "other"]
    assert re.fullmatch(r"[0-9]+MiB", line[line.index("--memory") + 1])
    shared = {model: text(bed, model) for model in ("tiny", "other", "tiny")}
    assert {model for _, model in shared.values()} == {"tiny", "other"}
    assert shared["tiny"][0] != shared["other"][0]
    status = json.loads(bed.run("status", "--json").stdout)
    services = [service for node in status["gateway"]["nodes"] for service in node["services"]]
    assert [(service["model"], service["adapters"]) for service in services] == [("tiny", ["other"])]
    assert "No changes" in bed.run("plan", "--detailed-exitcode").stdout

    bed.write(INVENTORY, APART, replicas=1)
    bed.run("apply", "--yes")
    assert {model: text(bed, model) for model in ("tiny", "other")} == shared
    assert "--memory" not in engine_of(bed.units()["replica/other/0", "running"].pid)
