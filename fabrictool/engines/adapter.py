"""The door of this room: `adapter(name)` gives the adapter of an engine."""

from __future__ import annotations

from fabrictool.base.errors import InvalidInputError
from fabrictool.engines.checks import nearest
from fabrictool.engines.external import External
from fabrictool.engines.llama_cpp import LlamaCpp
from fabrictool.engines.protocol import (
    Capabilities,
    EngineAdapter,
    EngineCommand,
    EngineLaunch,
    MetricNames,
    Readiness,
)
from fabrictool.engines.reference_adapter import Reference
from fabrictool.engines.sglang import SGLang
from fabrictool.engines.vllm import Vllm

__all__ = [
    "Capabilities",
    "EngineAdapter",
    "EngineCommand",
    "EngineLaunch",
    "MetricNames",
    "Readiness",
    "adapter",
    "engine_capabilities",
    "engine_names",
]


def engine_names() -> tuple[str, ...]:
    """The engines that blueprints may name."""
    return tuple(sorted(name for name, engine in _adapters().items() if not engine.capabilities.brought))


def engine_capabilities() -> dict[str, Capabilities]:
    """What the engines can be asked for, by their names."""
    return {name: engine.capabilities for name, engine in _adapters().items()}


def adapter(name: str) -> EngineAdapter:
    """The adapter of the engine with that name.

    Raises
    ------
    InvalidInputError
        FT7001 when there is none.
    """
    adapters = _adapters()
    if name not in adapters:
        raise InvalidInputError.of(
            "FT7001", f"unknown engine {name!r}", thing=f"engine/{name}", hint=nearest(name, engine_names())
        )
    return adapters[name]


def _adapters() -> dict[str, EngineAdapter]:
    every: tuple[EngineAdapter, ...] = (Reference(), LlamaCpp(), Vllm(), SGLang(), External())
    return {engine.name: engine for engine in every}
