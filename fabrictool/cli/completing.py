"""What a shell offers after Tab: names from the files here. It asks no cluster; where nothing is known it is silent."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def units(incomplete: str) -> list[str]:
    """Those of the last apply: ``replica/MODEL/N``, ``gateway/NAME``."""
    return _beginning(incomplete, _units())


def models(incomplete: str) -> list[str]:
    """Of the catalogue, by their ids."""
    from fabrictool.catalog import catalogued_ids

    return _beginning(incomplete, catalogued_ids())


def clusters(incomplete: str) -> list[str]:
    """Of the inventory that the blueprint here names."""
    return _beginning(incomplete, _clusters())


def explained(incomplete: str) -> list[str]:
    """What `explain` knows: codes, whether they are typed small or large, and keys of files."""
    from fabrictool.catalog.errors import error_codes
    from fabrictool.cli.fields import paths

    codes = _beginning(incomplete.upper(), error_codes()) if incomplete else []
    return codes or _beginning(incomplete, paths())


def whys(incomplete: str) -> list[str]:
    """``MODEL@PLACE``, for `plan --why-not`: with spaces a shell would take it for three words."""
    return _beginning(incomplete, _whys())


def documents(incomplete: str) -> list[str]:
    """Whose schema can be printed: kinds of files, and the first words of commands."""
    from fabrictool.blueprint.schema import FILES
    from fabrictool.cli.answer_schemas import COMMANDS

    return _beginning(incomplete, {command.partition(" ")[0] for command in (*FILES, *COMMANDS)})


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    with contextlib.suppress(FabrictoolError, OSError):  # a shell has no room for complaints
        return sorted(name for name in names if name.startswith(incomplete))
    return []


def _units() -> Iterator[str]:
    from fabrictool.base.settings import Settings
    from fabrictool.blueprint.load import load_identity
    from fabrictool.cli.source import find_blueprint
    from fabrictool.state.folder import FabricFolder

    fabric = load_identity(find_blueprint(None), environment=os.environ).fabric
    yield from FabricFolder(Settings.from_environment().state_path / fabric).read_state().applied_units


def _clusters() -> Iterator[str]:
    from fabrictool.cli.source import Source

    yield from Source(lenient=True, planned=True).identity.inventory.clusters


def _whys() -> Iterator[str]:
    from fabrictool.cli.source import Source

    loaded = Source(lenient=True, planned=True).loaded
    places = {
        name
        for cluster, described in loaded.inventory.clusters.items()
        for partition, its in described.partitions.items()
        for name in (f"{cluster}/{partition}", its.device)
    }
    for model in loaded.blueprint.models:
        yield from (f"{model}@{place}" for place in places)
