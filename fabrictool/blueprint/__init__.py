"""YAML → domain objects, with ``file:line:column`` for every complaint."""

from fabrictool.blueprint.load import Loaded, load

__all__ = ["Loaded", "load"]
