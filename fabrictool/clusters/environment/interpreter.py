"""Which Python starts a cluster's agents."""

from __future__ import annotations

import posixpath
import shlex
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError

if TYPE_CHECKING:
    from fabrictool.clusters.survey import Survey
    from fabrictool.domain.inventory import ClusterSpec

MODULES_THERE = "command -v module >/dev/null 2>&1 || . /etc/profile"
"""In a shell that is no login shell."""


def python_of(described: ClusterSpec, cluster: str, survey: Survey) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The interpreter's words, and shell lines that come before them; raises FT5403 when there is none.

    What `bootstrap` placed goes before a bare interpreter: its wrapper was made for that one. Jobs name the release and
    not the link: one that waits in a queue starts with what it was planned with, and that is not removed meanwhile.
    """
    way = described.software.python
    if way.venv is not None:
        return (f"{way.venv}/bin/python",), ()
    if way.container is not None:
        return (described.software.runtime, "exec", "--nv", way.container, "python3"), ()  # `--nv` shows the GPUs
    if survey.environment:
        return (posixpath.join(survey.base, "env", survey.environment, "bin", "python"),), ()
    if way.path is not None:
        return (way.path,), ()
    if way.module is not None:
        return ("python3",), (MODULES_THERE, f"module load {shlex.quote(way.module)} || exit 66")
    message = f"{cluster} has no Python for agents"
    raise FabrictoolError.of("FT5403", message, thing=f"cluster/{cluster}", hint=f"fabrictool bootstrap {cluster}")
