"""A small fabric in YAML, for tests of what is built from blueprint and inventory."""

from fabrictool.blueprint import load
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, ObservedUnit
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.state import Placed, State
from fabrictool.planner.explaining.alternatives import choice_sentences, unused_sentences
from fabrictool.planner.explaining.resolving import Resolver
from fabrictool.planner.situation import Situation
from fabrictool.planner.solvers.exact import ExactSolver
from fabrictool.planner.work import StepwiseWork, never

INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}, beta: {}}
sites: {a: {provider: alpha}, b: {provider: beta}}
clusters:
  dear:
    site: a
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 2, price: 80 CHF/h}}
  cheap:
    site: b
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 2, price: 8 CHF/h}}
  spot:
    site: b
    kind: local
    partitions: {gpu: {device: h100-sxm, devices_per_node: 8, nodes: 2, price: 4 CHF/h, tier: scavenger}}
"""
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
objective: [cost]
models:
  m:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    engine: vllm
    variant: {precision: bf16, context: 4096 tok}
    demand: {rate: 200 req/s, input: 500 tok, output: 100 tok}
    replicas: {min: 1, max: 40}
    RULES
  other:
    source: hf://meta-llama/Llama-3.1-8B-Instruct
    engine: vllm
    variant: {precision: bf16, context: 4096 tok}
    demand: {rate: 1 req/s, input: 500 tok, output: 100 tok}
    replicas: {min: 1, max: 40}
    OTHER
"""


def write_fabric(folder, rules="", other="", inventory=INVENTORY):
    text = BLUEPRINT.replace("RULES", rules.replace("\n", "\n    ")).replace("OTHER", other)
    (folder / "inventory.yaml").write_text(inventory)
    (folder / "blueprint.yaml").write_text(text)
    return folder / "blueprint.yaml"


def situation(folder, rules="", *, other="", old="", new=""):
    """The situation of the fabric with `rules` for its first model, `other` for its second, and `new` for `old`."""
    file = write_fabric(folder, rules, other)
    if old:
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new, 1))
    loaded = load(file, environment={})
    return Situation(loaded.blueprint, loaded.inventory, ("dear", "cheap", "spot"), (), {}, 0.0)


def solved(instance):
    *_, solution = ExactSolver().solve(instance, deadline_s=30, seed=0)
    return solution


def applied(there, whole, *, away=()):
    """Evidence of the fabric that a plan leads to; of clusters that are `away` nothing is known."""
    units = {name: [] for name in there.inventory.clusters}
    specs, generations, started = {}, {}, {}
    for action in whole.actions:
        if action.kind == "delete":
            continue
        units[action.cluster].append(
            ObservedUnit(
                address=action.address,
                operation=action.operation,
                state="running",
                spec_digest=spec_digest(action.spec),
            )
        )
        specs[action.operation], generations[action.address] = action.spec, 1
        started[action.address] = Placed.of(action.spec, action.cluster, action.operation)
    clusters = {
        name: ClusterFacts(cluster=name, known=name not in away, units=() if name in away else tuple(its))
        for name, its in units.items()
    }
    state = State(fabric="f", lineage="l", generations=generations, units=started, applied_situation=whole.situation)
    return Evidence(fabric="f", lineage="l", at=0.0, clusters=clusters, specs=specs, state=state)


def resolver(instance, solution, *, work=10_000, left_s=never):
    return Resolver(instance, solution, 0, StepwiseWork(work, left_s))


def told(instance, solution, currency="CHF"):
    """What a plan says of what was not chosen."""
    asked = resolver(instance, solution)
    return [*unused_sentences(asked, currency), *choice_sentences(asked, currency)]
