"""What other packages add to this one: entry points that they declare, by group and name.

Looking them up reads the installed packages' metadata; it is done when something starts, never for a request.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from fabrictool.base.errors import InvalidInputError

ROUTING_POLICIES = "fabrictool.routing_policies"


def plugin_names(group: str) -> tuple[str, ...]:
    """What is installed for `group`, in order."""
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


def load_plugin(group: str, name: str) -> object:
    """What the entry point `name` of `group` stands for.

    Raises
    ------
    InvalidInputError
        FT8130: its package cannot be imported. KeyError: there is none of that name.
    """
    entry = next((entry for entry in entry_points(group=group) if entry.name == name), None)
    if entry is None:
        raise KeyError(name)
    try:
        return entry.load()
    except Exception as error:  # whatever a stranger's module does when it is imported
        where = f"{entry.value} of {entry.dist.name}" if entry.dist is not None else entry.value
        message = f"the plug-in {name!r} ({where}) cannot be loaded: {type(error).__name__}: {error}"
        raise InvalidInputError.of("FT8130", message, thing=name) from error
