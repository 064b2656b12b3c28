"""Data only: accelerators, links, models and engines, every number with its source."""

from fabrictool.catalog.architecture import ModelArchitecture
from fabrictool.catalog.tables import (
    Accelerator,
    Engine,
    Interconnect,
    accelerators,
    catalogued_ids,
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
    "catalogued_ids",
    "engines",
    "links",
    "model",
    "models",
    "startable",
]
