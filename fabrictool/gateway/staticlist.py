"""The static list of ``gateway run --registry``: servers that no mesh tells of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec

from fabrictool.base.errors import InvalidInputError, Place, Problem
from fabrictool.base.files import file_error
from fabrictool.base.units import Duration, UnitError
from fabrictool.domain.specs import Pairing, PatienceRule, Phase
from fabrictool.gateway.directory import RoutingTarget, meeting_place
from fabrictool.gateway.upstream import TcpConnector
from fabrictool.routing.admission import Priority

if TYPE_CHECKING:
    from pathlib import Path


Silence = Literal["first_byte", "whole", "idle"]
"""As a blueprint's `SilenceLimits` has them."""


class StaticNode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file."""

    url: str
    """``http://host:port`` of an OpenAI-compatible server."""
    models: list[str]
    provider: str = "default"
    device: str = ""
    variant: str = ""
    context: int = 0
    weight: float = 1.0
    engine: str = ""
    phase: Phase = "unified"
    """``prefill``: it computes prompts for the others of its model."""
    pairing: Pairing = "relayed"
    """``together`` of SGLang's servers that share requests: both are asked at the same time."""
    meets_at: str = ""
    """``address:port`` of such a ``prefill`` server's rendezvous, where those that fetch its caches reach it."""
    site: str = ""
    labels: list[str] = []
    """What requests may ask for by ``x-fabric-labels``."""
    slots: int = 0
    """Requests that it works on at the same time; 0: it is sent all at once."""
    by_priority: bool = False
    """It serves requests by their ``priority``, the smallest first: vLLM with ``--scheduling-policy priority``."""


class StaticModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file says of a model, in the words of a blueprint."""

    reasoning: bool | None = None
    """Absent: seen by the lengths of its answers."""
    patience: dict[Silence, str] = {}
    """How long its servers may be silent, such as ``45s``; what is absent is learned."""


class StaticRegistry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file: nodes, and the consumer groups that keys may name."""

    nodes: list[StaticNode]
    groups: dict[str, list[str]] = {}
    models: dict[str, StaticModel] = {}
    aliases: dict[str, str] = {}
    """Another name → the model that it means."""
    priorities: dict[str, Priority] = {}
    """Tenant → the most important class that its requests may have."""


def read_registry(path: Path) -> StaticRegistry:
    """Parse a static registry, YAML or JSON; all problems at once under FT8001."""
    import yaml  # noqa: PLC0415 - a mesh gateway never reads YAML

    try:
        document = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe loaders
        registry = msgspec.convert(document, StaticRegistry)
    except OSError as error:
        raise file_error(error, path) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = Place(str(path), mark.line + 1, mark.column + 1) if mark else Place(str(path))
        raise InvalidInputError(Problem("FT8001", f"not YAML: {getattr(error, 'problem', error)}", place)) from error
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        hint = "nodes: [{url: http://host:port, models: [name], provider: …, device: …, variant: …, context: …}]"
        raise InvalidInputError.of("FT8001", f"not a registry: {error}", file=str(path), hint=hint) from error
    problems = [p for index, node in enumerate(registry.nodes) for p in _node_problems(path, index, node)]
    served = {model for node in registry.nodes for model in node.models}
    for alias, model in registry.aliases.items():
        if model not in served or alias in served:
            why = f"no node serves {model}" if model not in served else "it is the name of a model"
            problems.append(Problem("FT8001", f"aliases.{alias}: {why}", Place(str(path), thing=f"aliases.{alias}")))
    problems += [p for name, model in registry.models.items() for p in _model_problems(path, name, model, served)]
    if not registry.nodes:
        problems.append(Problem("FT8001", "the registry lists no nodes", Place(str(path))))
    if problems:
        raise InvalidInputError(problems)
    return registry


def static_targets(registry: StaticRegistry) -> list[RoutingTarget]:
    """A target for each model of each node."""
    targets = []
    for index, node in enumerate(registry.nodes):
        parts = urlsplit(node.url)
        connector = TcpConnector(parts.hostname or "", parts.port or 80, parts.path.rstrip("/"))
        group = [
            RoutingTarget(
                f"{index}/{model}".encode(),
                model,
                node.provider,
                connector,
                f"{parts.hostname}:{parts.port or 80}",
                context=node.context,
                weight=node.weight,
                device=node.device,
                precision=node.variant,
                engine=node.engine,
                phase=node.phase,
                pairing=node.pairing,
                meets_at=meeting_place(node.meets_at),
                site=node.site,
                labels=frozenset(node.labels),
                slots=node.slots,
                declared_slots=node.slots,
                by_priority=node.by_priority,
            )
            for model in node.models
        ]
        for target in group:
            target.shares = [other for other in group if other is not target]
            target.ejection = group[0].ejection
        targets += group
    return targets


def declared_patience(registry: StaticRegistry) -> dict[str, PatienceRule]:
    """What it says of models, as gateways go by it."""
    return {
        name: PatienceRule(
            _seconds(model, "first_byte"), _seconds(model, "whole"), _seconds(model, "idle"), model.reasoning
        )
        for name, model in registry.models.items()
    }


def _seconds(model: StaticModel, of_what: Silence) -> float | None:
    return float(Duration.parse(model.patience[of_what])) if of_what in model.patience else None


def _model_problems(path: Path, name: str, model: StaticModel, served: set[str]) -> list[Problem]:
    place = Place(str(path), thing=f"models.{name}")
    problems = [] if name in served else [Problem("FT8001", f"models.{name}: no node serves it", place)]
    for what, text in model.patience.items():
        try:
            seconds = float(Duration.parse(text))
        except UnitError as error:
            problems.append(Problem("FT8001", f"models.{name}.patience.{what}: {error}", place))
            continue
        if not 1.0 <= seconds <= 86400.0:
            problems.append(Problem("FT8001", f"models.{name}.patience.{what}: between 1s and 24h, not {text}", place))
    return problems


def _node_problems(path: Path, index: int, node: StaticNode) -> list[Problem]:
    place = Place(str(path), thing=f"nodes[{index}]")
    problems = []
    try:
        parts = urlsplit(node.url)
        valid = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        hint = "http://host:port; for TLS put a proxy beside the engine"
        problems.append(Problem("FT8001", f"nodes[{index}]: {node.url!r} is not an http URL", place, hint))
    if not node.models:
        problems.append(Problem("FT8001", f"nodes[{index}]: models is empty", place))
    at_once = node.phase == "prefill" and node.pairing == "together"
    if at_once is not bool(node.meets_at) or (at_once and meeting_place(node.meets_at) is None):
        hint = "an address and a port, of a server with `phase: prefill` and `pairing: together`, and of no other"
        problems.append(Problem("FT8001", f"nodes[{index}]: meets_at is {node.meets_at!r}", place, hint))
    if not 0 < node.weight < 1e6:
        problems.append(Problem("FT8001", f"nodes[{index}]: weight must be above 0", place))
    if not 0 <= node.slots < 1e6:
        problems.append(Problem("FT8001", f"nodes[{index}]: slots must be 0 or more", place))
    return problems
