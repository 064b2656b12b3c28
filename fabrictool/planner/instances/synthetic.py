"""Made-up fabrics of any size: to try the planner, to compare engines, and to see what a federation would look like.

Models are as popular as Zipf's law says (exponent 1.2), and their rates are scaled so that all together ask for a given
share of what the fabric could serve at best, by the planner's linear relaxation.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fabrictool.base.canonical import tidy
from fabrictool.base.errors import InvalidInputError
from fabrictool.domain.blueprint import Blueprint
from fabrictool.domain.inventory import Inventory
from fabrictool.planner.build import build_problem
from fabrictool.planner.formulation import Formulation

if TYPE_CHECKING:
    from fabrictool.planner.problem import PlacementProblem

ZIPF = 1.2
"""Exponent of the models' popularity: that of planner.md's instances."""
MOST_MODELS, MOST_GPUS = 2000, 1_000_000
DEVICES = (
    ("a100-80g", 8),
    ("gh200", 4),
    ("h100-sxm", 8),
    ("a100-40g", 8),
    ("l40s", 8),
    ("h200", 8),
    ("b200", 8),
    ("mi300x", 8),
    ("l4", 4),
    ("a6000", 8),
    ("mi250x", 8),
    ("a40", 4),
)
"""(device, devices a node) in the order in which fabrics get them."""
MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "Qwen/Qwen3-30B-A3B",
    "swiss-ai/Apertus-8B-2509",
    "mistralai/Mistral-7B-v0.1",
    "swiss-ai/Apertus-70B-2509",
    "Qwen/Qwen3-1.7B",
    "meta-llama/Llama-2-13b-hf",
    "mistralai/Mixtral-8x7B-v0.1",
    "meta-llama/Llama-3.2-3B",
    "codellama/CodeLlama-34b-hf",
)
"""Architectures, used in turn."""
LENGTHS = ((200, 200), (600, 74), (1200, 530), (730, 64), (2000, 250), (400, 900))
"""Mean (input, output) tokens, used at random: from short chats to long documents."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much there is of everything."""

    models: int
    types: int
    gpus: int


def parse(text: str) -> Size:
    """``MODELSxTYPESxGPUS``, such as ``50x8x5000``. Raises InvalidInputError FT2010."""
    match = re.fullmatch(r"(\d{1,5})x(\d{1,3})x(\d{1,8})", text)
    if not match:
        raise InvalidInputError.of("FT2010", f"{text!r} is not a size", hint="MODELSxTYPESxGPUS, such as 50x8x5000")
    size = Size(*map(int, match.groups()))
    if not (1 <= size.models <= MOST_MODELS and 1 <= size.types <= len(DEVICES) and size.gpus <= MOST_GPUS):
        hint = f"1 to {MOST_MODELS} models, 1 to {len(DEVICES)} device types, up to {MOST_GPUS:,} devices"
        raise InvalidInputError.of("FT2010", f"{text}: there are no fabrics of this size", hint=hint)
    if size.gpus < 8 * size.types:
        raise InvalidInputError.of("FT2010", f"{text}: a node of each type needs {8 * size.types} devices at least")
    return size


def inventory(size: Size, seed: int) -> dict[str, Any]:
    """The document: each device type in two clusters of two providers, unless it is too small to be parted."""
    rng = random.Random(f"inventory {seed}")
    shares = [rng.uniform(0.5, 1.5) for _ in range(size.types)]
    clusters: dict[str, Any] = {}
    for (device, per_node), share in zip(DEVICES, shares, strict=False):
        nodes = max(1, round(size.gpus * share / sum(shares) / per_node))
        parts = (nodes - nodes // 2, nodes // 2)
        for site, count in zip(("north", "south"), parts, strict=True):
            if count:
                clusters[f"{site}-{device}"] = {
                    "site": site,
                    "kind": "local",
                    "partitions": {"gpu": {"device": device, "devices_per_node": per_node, "nodes": count}},
                }
    return {
        "apiVersion": "fabrictool/v1",
        "kind": "Inventory",
        "providers": {"north": {}, "south": {}},
        "sites": {"north": {"provider": "north"}, "south": {"provider": "south"}},
        "clusters": clusters,
    }


def blueprint(size: Size, seed: int, scale: float = 1.0) -> dict[str, Any]:
    """The document; the most popular model asks for `scale` req/s."""
    rng = random.Random(f"blueprint {seed}")
    models = {}
    for at in range(size.models):
        given, answer = rng.choice(LENGTHS)
        models[f"m{at:03d}"] = {
            "source": f"hf://{MODELS[at % len(MODELS)]}",
            "engine": "vllm",
            "variant": {"precision": "bf16", "context": "4096 tok"},
            "demand": {
                "rate": f"{tidy(scale / (at + 1) ** ZIPF)} req/s",
                "input": f"{given} tok",
                "output": f"{answer} tok",
            },
            "replicas": {"min": 1, "max": size.gpus},
        }
    return {
        "apiVersion": "fabrictool/v1",
        "kind": "Blueprint",
        "fabric": f"synthetic-{size.models}x{size.types}x{size.gpus}",
        "inventory": "inventory.yaml",
        "models": models,
        "objective": ("latency",),
    }


def documents(size: Size, seed: int, load: float) -> dict[str, dict[str, Any]]:
    """File name → document of a fabric whose models ask for `load` of what it could serve at best."""
    resources = inventory(size, seed)
    first = blueprint(size, seed)
    problem, _ = build_problem(
        Blueprint.model_validate(first),
        Inventory.model_validate(resources),
        usable=list(resources["clusters"]),
        unseen=(),
        current={},
    )
    return {
        "blueprint.yaml": blueprint(size, seed, tidy(load * most_load(problem))),
        "inventory.yaml": resources,
    }


def most_load(problem: PlacementProblem) -> float:
    """By how much all rates can grow together before some demand goes unserved, by the linear relaxation."""
    low, high = 0.0, 1.0
    while _serves(problem, high) and high < 1e9:
        low, high = high, high * 4
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if _serves(problem, middle) else (low, middle)
    return low


def _serves(problem: PlacementProblem, factor: float) -> bool:
    scaled = replace(problem, needs=tuple(replace(need, rate=need.rate * factor) for need in problem.needs))
    relaxed = Formulation(scaled, range(len(scaled.options)), whole=False)
    answer = relaxed.minimise("served", seconds=600, seed=0)
    return answer is not None and answer.objective <= 1e-6 * sum(need.rate for need in scaled.needs)
