"""How long 2,000 models take to validate, beside the floor: libyaml's bare composer on the same text, same process.

``python tests/bench/validate.py [MODELS]`` prints a table; the medians of five runs, read and floor alternating.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import yaml

from fabrictool.blueprint import load

RUNS = 5
INVENTORY = Path(__file__).parents[1] / "cases" / "blueprint" / "inventory.yaml"
HEAD = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: large
defaults: {engine: vllm, trust: [alpha, beta]}
trust: {groups: {all: {allow: [alpha, beta]}}}
tenants: {me: {group: all, key: secret://env/KEY}}
gateway: {cluster: alpha-box, listen: 127.0.0.1:8011, mesh: 10.0.0.12:8012}
models:
"""
MODEL = """\
  model-{index}:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    slo: {{ttft_p95: 800ms, tpot_p95: 40ms, attain: 99%}}
    demand: {{rate: {index}.5 req/s, input: 1100 tok, output: 400 tok}}
    replicas: {{min: 1, max: 4}}
    place: {{prefer: [gh200], spread: site}}
"""


def text_of(models: int) -> str:
    """A blueprint of that many models, in the style of the tutorial."""
    return HEAD + "".join(MODEL.format(index=index) for index in range(models))


def measure(models: int) -> tuple[float, float]:
    """Median seconds of a whole load, and of the composer alone."""
    text = text_of(models)
    loads, floors = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blueprint.yaml"
        path.write_text(text)
        for _ in range(RUNS):
            begin = time.perf_counter()
            loaded = load(path, inventory_path=INVENTORY, environment={})
            loads.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            yaml.compose(text, Loader=yaml.CSafeLoader)
            floors.append(time.perf_counter() - begin)
            if len(loaded.blueprint.models) != models:
                raise RuntimeError("the loader lost models")
    return statistics.median(loads), statistics.median(floors)


def main(argv: list[str] | None = None) -> None:
    """Print the table for the number of models that is given, or 2,000."""
    models = int(argv[0]) if argv else 2000
    loaded, floor = measure(models)
    print(f"validate {models} models, {text_of(models).count(chr(10))} lines, median of {RUNS} runs")
    print(f"  load (YAML, schema, references)  {loaded:6.3f} s")
    print(f"  floor (bare C composer)          {floor:6.3f} s")
    print(f"  ratio                            {loaded / floor:6.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
