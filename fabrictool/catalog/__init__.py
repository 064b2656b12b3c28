"""Data only: accelerators, links, models and engines, every number with its source."""

from fabrictool.catalog.tables import (
    Accelerator,
    Engine,
    Interconnect,
    ModelArchitecture,
    accelerators,
    engines,
    links,
    model,
    models,
    startable,
)

__all__ = [
    "Accelerator",
    "Engine",
    "Interconnect",
    "ModelArchitecture",
    "accelerators",
    "engines",
    "links",
    "model",
    "models",
    "startable",
]
