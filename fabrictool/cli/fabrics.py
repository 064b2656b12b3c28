"""From options to a loaded blueprint and an opened fabric; shared by the commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.base.errors import UsageError
from fabrictool.base.settings import Settings
from fabrictool.cli.output import print_problems

if TYPE_CHECKING:
    from fabrictool.applier.fabric import Fabric
    from fabrictool.blueprint import Loaded


def find_blueprint(given: Path | None) -> Path:
    """The blueprint that is meant: the one given, ``blueprint.yaml``, or the only one in ``blueprints/``."""
    if given is not None:
        return given
    if Path("blueprint.yaml").exists():
        return Path("blueprint.yaml")
    found = sorted(Path("blueprints").glob("*.yaml")) if Path("blueprints").is_dir() else []
    if len(found) == 1:
        return found[0]
    what = f"blueprints/ holds {len(found)}" if found else "there is no blueprint.yaml here"
    raise UsageError.of("FT9004", f"which blueprint? {what}", hint="-b FILE; `fabrictool init` writes a starter")


def load(
    blueprint: Path | None,
    inventory: Path | None,
    *,
    overlay: str | None = None,
    scenario: str | None = None,
    quiet: bool = False,
) -> Loaded:
    """Load and check; warnings go to stderr, unless `quiet`, for a second look."""
    from fabrictool.blueprint import load as load_blueprint

    loaded = load_blueprint(
        find_blueprint(blueprint), inventory_path=inventory, overlay=overlay, scenario=scenario, environment=os.environ
    )
    if not quiet:
        print_problems(loaded.warnings)
    return loaded


def open_fabric(loaded: Loaded) -> Fabric:
    """The fabric of a loaded blueprint under this user's settings."""
    from fabrictool.applier.fabric import Fabric
    from fabrictool.applier.stores.factory import store_elsewhere

    name, settings = loaded.blueprint.fabric, Settings.from_environment()
    elsewhere = store_elsewhere(loaded.blueprint.state, settings.state_path / name, os.environ)
    return Fabric.open(name, loaded.inventory, settings, elsewhere=elsewhere)
