"""Two small fabrics in YAML that are played: a model on two CPU nodes, and two models on H100s of two providers."""

from fabrictool.blueprint import load
from fabrictool.domain.plan import ReplicaPlacement

INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}, beta: {}}
sites: {a: {provider: alpha}, b: {provider: beta}}
clusters:
  one:
    site: a
    kind: local
    partitions: {cpu: {device: cpu, nodes: 1, memory_per_node: 4GiB, price: 0.02 CHF/h, power: 65 W}}
    software: {engines: {reference: {}}}
  two:
    site: b
    kind: local
    partitions: {cpu: {device: cpu, nodes: 1, memory_per_node: 4GiB, price: 0.02 CHF/h, power: 65 W}}
    software: {engines: {reference: {}}}
"""
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: what-if
inventory: inventory.yaml
models:
  tiny:
    source: file:///nowhere/tiny.gguf
    architecture: HuggingFaceTB/SmolLM2-135M-Instruct
    engine: reference
    variant: {precision: q4_1, context: 2048 tok}
    demand: {rate: 0.5 req/s, input: 64 tok, output: 48 tok}
    slo: {ttft_p95: 5s, tpot_p95: 250ms, attain: 95%}
    replicas: {min: 2, max: 2}
trust: {groups: {all: {allow: [alpha, beta]}}}
gateway: {cluster: one, listen: 127.0.0.1:8011, mesh: 127.0.0.1:8012}
scenarios:
  calm: {models: {tiny: {demand: {rate: 0.1 req/s}}}}
  rush: {models: {tiny: {demand: {rate: 1.5 req/s}}}}
"""
WITHOUT_DEMAND = "\n".join(
    line for line in BLUEPRINT.partition("scenarios")[0].splitlines() if "demand" not in line and "slo" not in line
)
ACCELERATED = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}, beta: {}}
sites: {a: {provider: alpha}, b: {provider: beta}}
clusters:
  one:
    site: a
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 2, price: 16 USD/h, power: 8 kW}}
    software: {engines: {vllm: {}}}
  two:
    site: b
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 2}}
    software: {engines: {vllm: {}}}
"""
TWO_MODELS = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: two
inventory: inventory.yaml
models:
  llama:
    source: hf://meta-llama/Llama-3.1-8B
    variant: {precision: bf16, context: 8192 tok}
    demand: {rate: 10 req/s, input: 512 tok, output: 128 tok}
    replicas: {min: 1, max: 1}
  big:
    source: hf://meta-llama/Llama-3.3-70B-Instruct
    variant: {precision: bf16, context: 8192 tok}
    demand: {rate: 1 req/s, input: 512 tok, output: 128 tok}
    replicas: {min: 1, max: 1}
"""


def loaded(folder, blueprint=BLUEPRINT, inventory=INVENTORY):
    (folder / "inventory.yaml").write_text(inventory)
    (folder / "blueprint.yaml").write_text(blueprint)
    return load(folder / "blueprint.yaml", environment={})


def replica(name, inventory, cluster="one", tp=1):
    """`name` is ``MODEL/INDEX``; it stands in the only partition of the cluster."""
    ((partition, described),) = inventory.clusters[cluster].partitions.items()
    return ReplicaPlacement(
        replica=name,
        model=name.rpartition("/")[0],
        provider=inventory.provider_of(cluster),
        site=inventory.clusters[cluster].site,
        cluster=cluster,
        partition=partition,
        device=described.device,
        tp=tp,
    )
