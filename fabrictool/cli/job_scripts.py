"""The jobs of a plan as schedulers would be given them, for whoever answers for a site."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from fabrictool.cli.answers import ScriptRow, Scripts
from fabrictool.cli.output import data, json_data, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.clusters.protocol import JobScript


def show_scripts(scripts: Sequence[JobScript], *, as_json: bool) -> None:
    """As text that is a shell script itself, or as JSON."""
    if as_json:
        json_data(Scripts(scripts=[ScriptRow(**asdict(script)) for script in scripts]))
        return
    for script in scripts:
        data(f"# {script.address} on {script.cluster}, submitted by\n# {script.command}\n{script.script}")
    if not scripts:
        say("this plan submits no job: what it starts are no jobs of a scheduler, or nothing")
