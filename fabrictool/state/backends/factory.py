"""From the blueprint's words to the store that is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.blueprint.secrets import resolve
from fabrictool.state.backends.git import GitStore
from fabrictool.state.backends.http import HttpStore

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from fabrictool.domain.statebackend import StateBackend
    from fabrictool.state.backends.protocol import StateStore


def store_elsewhere(described: StateBackend | None, folder: Path, environment: Mapping[str, str]) -> StateStore | None:
    """None for the default, the fabric's folder; nothing is asked yet, also not for the token."""
    if described is None:
        return None
    if described.git is not None:
        return GitStore(described.git.url, described.git.branch, folder / "state.git", environment=environment)
    server = described.http
    if server is None:
        return None
    token = server.token
    return HttpStore(server, None if token is None else lambda: resolve(token, environment))
