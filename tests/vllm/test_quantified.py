"""A real vLLM behind an agent of a fabric whose routing goes by latency: it is measured before it serves, and once."""

import json

import pytest

from tests.conftest import BLUEPRINT, INVENTORY
from tests.vllm.conftest import VLLM
from tests.vllm.test_apply import MODELS, SETTINGS, ask, smollm2  # noqa: F401 - a fixture

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


@pytest.fixture
def fabric(fabric_bed, smollm2):  # noqa: F811 - the fixture of that name  # noqa: F811 - the fixture of that name
    options = json.dumps({"enforce-eager": True, **SETTINGS})
    head, _, rest = BLUEPRINT.partition("models:")
    models = MODELS.format(folder=smollm2, options=options, adapters="{}", precision="bf16")
    blueprint = head + models + rest.partition("trust:")[2].replace("{affinity: false}", "{policy: slo-headroom}")
    own = f"\n    software: {{engines: {{vllm: {{venv: {VLLM}}}}}}}\n    partitions:"
    fabric_bed.write(blueprint=blueprint, inventory=INVENTORY.replace("\n    partitions:", own))
    fabric_bed.run("trust", "init")
    return fabric_bed


def agent_of(fabric):
    unit = fabric.units()["replica/smol/0", "running"]
    cluster = next(c for c in fabric.clusters().values() if c.state(unit.operation) is not None)
    return cluster.document(unit.operation)


def test_a_replica_is_measured_once_and_known_at_its_next_start(fabric):
    shown = []
    for _ in range(2):
        fabric.run("apply", "--yes", timeout=1200)
        assert ask(fabric, "What is the capital of France?")
        agent = agent_of(fabric)
        shown.append(agent.engine.steps)
        kinds = [event.kind for event in agent.events]
        assert kinds.index("measured") < kinds.index("engine-ready")
        print(next(event.text for event in agent.events if event.kind == "measured"))
        assert agent.engine.by_priority
        fabric.run("destroy", "--yes")
    first, again = shown
    assert list(first.prompts) == ["32", "64", "128", "256"][: len(first.prompts)], "a busy machine has time for fewer"
    assert list(first.batches) == ["1", "2", "4", "8"][: len(first.batches)]
    assert len(first.prompts) > 1
    assert min([*first.prompts.values(), *first.batches.values()]) > 0
    assert not first.was_kept
    assert (again.prompts, again.batches, again.was_kept) == (first.prompts, first.batches, True)
