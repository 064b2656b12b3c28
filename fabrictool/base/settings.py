"""Settings from the environment: the only place that reads it; ``docs/reference/settings.md`` comes from here."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.base.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping


def _setting(variable: str, default: str, text: str) -> str:
    """One setting: its environment variable, its default and its sentence for the reference page."""
    return field(default=default, metadata={"variable": variable, "text": text})


@dataclass(frozen=True, slots=True)
class Settings:
    """What a machine or a user may set outside the blueprint."""

    state_dir: str = _setting(
        "FABRICTOOL_STATE_DIR",
        "~/.local/state/fabrictool",
        "State, journals, leases, trust material and the run folders of local clusters.",
    )
    cache_dir: str = _setting(
        "FABRICTOOL_CACHE_DIR", "~/.cache/fabrictool", "What can be made again: dequantised weights."
    )
    keymap: str = _setting(
        "FABRICTOOL_KEYMAP",
        "~/.config/fabrictool/keymap.yaml",
        "Keys of `fabrictool top`, by action; without the file they are those that `?` lists.",
    )
    log_level: str = _setting(
        "FABRICTOOL_LOG", "warning", "Level of the log lines on stderr: debug, info, warning or error."
    )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the variables; an empty one counts as unset."""
        source = os.environ if environment is None else environment
        chosen = {f.name: source[f.metadata["variable"]] for f in fields(cls) if source.get(f.metadata["variable"])}
        return cls(**chosen)

    @property
    def state_path(self) -> Path:
        """`state_dir`, absolute: units leave the folder in which they were started; raises FT4303."""
        return _absolute(self.state_dir, "FABRICTOOL_STATE_DIR")

    @property
    def keymap_path(self) -> Path | None:
        """`keymap`, absolute; None: it was not set, and the usual file is not there. Raises FT4303."""
        path = _absolute(self.keymap, "FABRICTOOL_KEYMAP")
        return path if self.keymap != Settings().keymap or path.exists() else None

    @property
    def cache_path(self) -> Path:
        """`cache_dir`, absolute; raises FT4303."""
        return _absolute(self.cache_dir, "FABRICTOOL_CACHE_DIR")


def _absolute(text: str, variable: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no such user; no working directory
        message = f"{variable}={text} names no folder: {error}"
        raise InvalidInputError.of("FT4303", message, hint="give an absolute path") from error
