"""Where an engine is: in a virtual environment, behind an environment module, in a container's image, or at a path.

The adapter says what to run there; this says how to get there, and how to see that it is there before it is started.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from fabrictool.engines.protocol import EngineCommand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.engines.protocol import EngineLaunch

_HAS = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
_RUNS = 'at=$(command -v "$0") && [ -f "$at" ] && [ -x "$at" ]'
_LOADED = 'command -v module >/dev/null 2>&1 || . /etc/profile; module load "$0" || exit 66; exec "$@"'
"""A shell that loads the module ``$0`` and becomes the rest."""
_AGENTS_OWN = ("PYTHONHOME", "PYTHONPATH")
"""By which the agent's Python finds the agent's packages: another Python would load what was built for this one."""


def interpreter(launch: EngineLaunch) -> str:
    """Of an engine that is a Python package."""
    install = launch.install
    if install.venv:
        return f"{install.venv}/bin/python"
    return "python3" if install.module or install.container else launch.python


def program(launch: EngineLaunch, name: str) -> str:
    """Of an engine that is a program of that name."""
    install = launch.install
    return f"{install.venv}/bin/{name}" if install.venv else install.path or name


def command_of_package(
    launch: EngineLaunch,
    package: str,
    argv: Sequence[str],
    env: dict[str, str],
    unless_set: Mapping[str, str] = MappingProxyType({}),
) -> EngineCommand:
    """Of an engine that is a Python package; `argv` begins with `interpreter`, or with the program's own path.
    `package` is what that must have; empty: it has it.
    """
    if launch.install.path:
        command = command_of_program(launch, argv, env)
    else:
        command = _command(launch, argv, env, (interpreter(launch), "-c", _HAS, package) if package else ())
    return msgspec.structs.replace(command, unless_set=dict(unless_set))


def command_of_program(launch: EngineLaunch, argv: Sequence[str], env: dict[str, str]) -> EngineCommand:
    """Of an engine that is a program; `argv` begins with it."""
    return _command(launch, argv, env, ("/bin/sh", "-c", _RUNS, argv[0]))


def _command(launch: EngineLaunch, argv: Sequence[str], env: dict[str, str], probe: tuple[str, ...]) -> EngineCommand:
    install = launch.install
    elsewhere = bool(install.venv or install.module or install.container or install.path)
    unset = _AGENTS_OWN if elsewhere else ()
    if install.module:
        loads = ("/bin/sh", "-c", _LOADED, install.module)
        return EngineCommand((*loads, *argv), env, unset, (*loads, *probe) if probe else ())
    if install.container:
        enters = (*install.runtime, *_binds(launch), _image(install.container))
        return EngineCommand((*enters, *argv), env, unset, (*enters, *probe) if probe else ())
    return EngineCommand(tuple(argv), env, unset, probe)


def _binds(launch: EngineLaunch) -> list[str]:
    """The model's files, the folder of its socket, and for a home that of what can be made again: not the user's."""
    words = ["--home", launch.cache_dir] if launch.cache_dir else ["--no-home"]
    for path in (launch.model, *launch.adapters.values()):
        words += ["--bind", f"{path}:{path}:ro"] if path.startswith("/") else []
    folder = launch.socket.rpartition("/")[0]
    return [*words, "--bind", f"{folder}:{folder}"] if folder else words


def _image(container: str) -> str:
    """A reference without a scheme is one of a registry, as everywhere."""
    return container if container.startswith("/") or "://" in container else f"docker://{container}"
