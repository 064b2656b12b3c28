"""The life of a unit's process, agent or gateway: read the spec, claim the folder, run, say how it ended."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.files import file_error
from fabrictool.base.logs import configure_logging
from fabrictool.base.runfolder import RunFolder
from fabrictool.domain.specs import AgentSpec, GatewaySpec, decode_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

S = TypeVar("S", AgentSpec, GatewaySpec)

_log = logging.getLogger("fabrictool.unit")


def run_unit(
    folder: RunFolder,
    kind: type[S],
    run: Callable[[S, RunFolder], Coroutine[Any, Any, str]],
    loop: Callable[[Coroutine[Any, Any, str]], str] = asyncio.run,
    *,
    stays: bool = False,
) -> int:
    """Returns the exit code; the reason goes to ``exit.json`` and the log, never a traceback for a known error.

    One that `stays` keeps its working folder, for the sake of a command that the user gave.
    """
    configure_logging("info")
    folder = RunFolder(folder.path.absolute())
    if not stays:
        os.chdir("/")  # hold no folder of the user's busy
    try:
        spec = read_spec(folder, kind)
        folder.claim()  # the descriptor stays open until this process ends, however it ends
    except FabrictoolError as error:
        report(error)
        return error.exit_code  # the folder may belong to another process: write nothing into it
    try:
        if isinstance(spec, AgentSpec):
            os.environ.update(visible_devices(spec, os.environ))  # this process is the unit: its engine inherits it
        reason, code = loop(run(spec, folder)), 0
    except FabrictoolError as error:
        report(error)
        reason, code = str(error), error.exit_code
    except Exception as error:  # noqa: BLE001 - the last line of defence: exit.json must say that it ended
        _log.exception("this is a bug in fabrictool: report it with the log")
        reason, code = f"defect: {error!r}", 70
    try:
        folder.write_exit(code, reason, SystemClock().wall())
    except FabrictoolError as error:  # the disk is full: the lock and the code say that it is over, too
        report(error)
    _log.info("ended: %s", reason)
    return code


def visible_devices(spec: AgentSpec, environment: Mapping[str, str]) -> dict[str, str]:
    """What shows an engine its devices; where this machine is restricted already, the n-th of what is left."""
    if not spec.visibility_variable or not spec.device_indices:
        return {}
    left = environment.get(spec.visibility_variable, "")
    names = [name.strip() for name in left.split(",")] if left else []
    if names and max(spec.device_indices) >= len(names):
        wanted = max(spec.device_indices)
        message = f"{spec.visibility_variable}={left} lists {len(names)} devices, but number {wanted} is needed"
        raise InvalidInputError.of("FT7104", message, hint="correct devices_per_node in the inventory, or the variable")
    chosen = [names[index] if names else str(index) for index in spec.device_indices]
    return {spec.visibility_variable: ",".join(chosen)}


def read_spec(folder: RunFolder, kind: type[S]) -> S:
    """The spec of a folder; raises FT7102 when it is another unit's or none."""
    try:
        spec = decode_spec(folder.spec.read_bytes())
    except OSError as error:
        raise file_error(error, folder.spec) from error
    except msgspec.DecodeError as error:
        message = f"spec.json is not a unit's spec: {error}"
        raise InvalidInputError.of("FT7102", message, file=str(folder.spec)) from error
    if not isinstance(spec, kind):
        message = f"spec.json is not {kind.__name__} but {type(spec).__name__}"
        raise InvalidInputError.of("FT7102", message, file=str(folder.spec))
    return spec


def report(error: FabrictoolError) -> None:
    """All that is wrong, in the log."""
    for problem in error.problems:
        _log.error("%s", problem.render())
