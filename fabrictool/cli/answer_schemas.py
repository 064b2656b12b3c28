"""JSON Schemas of what commands print with ``--json``, made from its types; committed under ``docs/schema/answers/``.

They leave room for what a later minor version adds: a reader ignores keys that it does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.docstrings import attribute_docstrings
from fabrictool.cli import answers, fabric_answers, forecast_answers
from fabrictool.domain.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

DIALECT = "https://json-schema.org/draft/2020-12/schema"


@dataclass(frozen=True, slots=True)
class Printed:
    """What a command prints."""

    kinds: tuple[type[msgspec.Struct], ...]
    """One of them, or of a stream those of which each line is one. `Problems` comes with all."""
    stream: bool = False


def _document(*kinds: type[msgspec.Struct]) -> Printed:
    return Printed(kinds)


def _stream(*kinds: type[msgspec.Struct]) -> Printed:
    return Printed((answers.StreamVersion, *kinds), stream=True)


COMMANDS: Mapping[str, Printed] = {
    "validate": _document(),
    "explain": _document(answers.Explanation, answers.FieldExplanation, answers.Decision),
    "doctor": _document(answers.Checks),
    "show": _document(answers.Values, fabric_answers.SavedPlan, answers.Scripts),
    "plan": _document(
        fabric_answers.PlanAnswer, forecast_answers.WhatIf, forecast_answers.Pareto, forecast_answers.HorizonAnswer
    ),
    "apply": _stream(fabric_answers.PolicyLine, fabric_answers.StepLine, fabric_answers.EndLine),
    "destroy": _stream(fabric_answers.StepLine, fabric_answers.EndLine),
    "reconcile": _stream(
        fabric_answers.DriftLine, fabric_answers.HealingLine, fabric_answers.NotHealedLine, fabric_answers.StepLine
    ),
    "status": _document(fabric_answers.FabricStatus, fabric_answers.UnitStatus),
    "events": _document(fabric_answers.Events),
    "usage": _document(fabric_answers.UsageAnswer),
    "simulate": _document(forecast_answers.Simulation),
    "recommend": _document(forecast_answers.RecommendationAnswer),
    "calibrate": _document(forecast_answers.CalibrationAnswer),
    "trace stats": _document(forecast_answers.TraceStatistics),
    "trace profile": _document(forecast_answers.WorkloadProfile),
    "instance": _document(forecast_answers.InstanceAnswer),
    "catalogue add": _document(answers.Architecture),
    "catalogue models": _document(answers.CatalogueModels),
    "catalogue devices": _document(answers.CatalogueDevices),
    "agent assign": _document(answers.Assignment),
    "agent unassign": _document(answers.Assignment),
    "adopt": _document(answers.Adoption, answers.ReleaseAnswer),
    "mesh members": _document(fabric_answers.FleetAnswer),
    "mesh paths": _document(fabric_answers.FleetAnswer),
    "mesh records": _document(fabric_answers.RecordsAnswer),
    "mesh convergence": _document(fabric_answers.Convergence),
    "mesh observe": _stream(fabric_answers.MeshEventLine),
    "mesh replay": _document(fabric_answers.MeshReplay),
    "state show": _document(fabric_answers.StateAnswer),
    "state history": _document(fabric_answers.StateHistory),
    "state rebuild": _document(fabric_answers.StateRebuilt),
    "trust show": _document(answers.TrustAnswer),
    "trust host": _document(answers.HostKeys),
    "bootstrap": _document(answers.Environment),
    "prune": _document(answers.Leftovers),
    "weights lock": _document(answers.WeightsLock),
    "weights plan": _document(answers.WeightsPlan),
    "weights stage": _document(answers.WeightsStage),
    "weights verify": _document(answers.WeightsVerify),
    "weights list": _document(answers.WeightsList),
    "weights prune": _document(answers.WeightsPrune),
}
"""Every command that has ``--json``, as it is typed."""


def file_of(command: str) -> str:
    """Name of the schema's file, with the major version of what it describes."""
    return f"{command.replace(' ', '-')}.v{answers.FORMAT_VERSION.partition('.')[0]}.json"


def answer_schema(command: str) -> dict[str, Any]:
    """The schema of a command's document, or of a line of its stream."""
    printed = COMMANDS[command]
    kinds: tuple[type[msgspec.Struct], ...] = (*printed.kinds, answers.Problems)
    flat = fabric_answers.WITH_THE_FIELDS_OF_A_PLAN
    _, definitions = msgspec.json.schema_components([*kinds, *([Plan] if flat & set(_structs_of(kinds)) else [])])
    types = {kind.__name__: kind for kind in _structs_of([*kinds, Plan])}
    for name, definition in definitions.items():
        _complete(definition, types[name])
    for kind in flat:
        if kind.__name__ in definitions:
            _add_fields(definitions[kind.__name__], definitions["Plan"])
    definitions.pop("Plan", None)
    what = "a line of" if printed.stream else "what is printed by"
    return {
        "$schema": DIALECT,
        "title": f"{what} `fabrictool {command} --json`",
        "anyOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds],
        "$defs": definitions,
    }


def _add_fields(definition: dict[str, Any], plan: dict[str, Any]) -> None:
    definition["properties"] = plan["properties"] | definition["properties"]
    definition["required"] = sorted({*plan["required"], *definition["required"]})


def _complete(definition: dict[str, Any], kind: type) -> None:
    """What msgspec does not say: a field with a default is written as well, and what the fields mean."""
    properties = definition.get("properties", {})
    written = {name for name, field in properties.items() if "default" in field and not _leaves_out_defaults(kind)}
    definition["required"] = sorted({*definition.get("required", ()), *written})
    meanings = attribute_docstrings(kind)
    for name, field in properties.items():
        field.pop("default", None)
        if name in meanings:
            field["description"] = _one_line(meanings[name])
    if "description" in definition:
        definition["description"] = _one_line(definition["description"])


def _leaves_out_defaults(kind: type) -> bool:
    return issubclass(kind, msgspec.Struct) and kind.__struct_config__.omit_defaults


def _one_line(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def _structs_of(kinds: Iterable[type[msgspec.Struct]]) -> Iterator[type]:
    """These and all that their fields hold."""
    waiting, seen = list(msgspec.inspect.multi_type_info(kinds)), set[type]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
            if node.cls in seen:
                continue
            seen.add(node.cls)
            yield node.cls
            waiting += [field.type for field in node.fields]
            continue
        for name in getattr(node, "__struct_fields__", ()):
            below = getattr(node, name)
            parts = below if isinstance(below, tuple) else (below,)
            waiting += [part for part in parts if isinstance(part, msgspec.inspect.Type)]
