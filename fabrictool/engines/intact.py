"""Whether a model's files on this machine are whole: what `doctor` asks before an engine fails on them.

Files of an installed distribution are compared with the hashes that it lists. Of others the outside is looked at: a
GGUF file says where its tensors end, a safetensors file how long it is. Bytes that were changed inside of a tensor are
found by a hash alone, and these files come with none.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.files import file_error
from fabrictool.engines.artifacts import resolve

if TYPE_CHECKING:
    from fabrictool.base.errors import FabrictoolError

_BLOCK = 1 << 22
_GGUF = b"GGUF"
_LONGEST_HEADER = 100 << 20
"""Octets; what the safetensors library reads at most."""


def check_intact(source: str) -> str:
    """The place of the model at `source` when nothing is wrong with it; ids that engines fetch themselves pass.

    Raises
    ------
    InvalidInputError
        FT701x as `resolve`, FT7014 the file is corrupt or cut off.
    """
    place = resolve(source)
    path = Path(place)
    if not path.is_absolute():
        return place
    try:
        if source.startswith("pypi://"):
            _as_listed(source, path)
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        for file in files:
            _outside(source, file)
    except OSError as error:
        raise file_error(error, path) from error
    return place


def _as_listed(source: str, path: Path) -> None:
    distribution = importlib.metadata.distribution(source.removeprefix("pypi://").partition("/")[0])
    for entry in distribution.files or ():
        if entry.hash is None or Path(str(entry.locate())).resolve() != path:
            continue
        digest = hashlib.new(entry.hash.mode)
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        if base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode() != entry.hash.value:
            hint = f"python -m pip install --no-deps --force-reinstall {distribution.name}"
            raise _corrupt(source, path, "it is not the file that its distribution lists", hint)


def _outside(source: str, file: Path) -> None:
    with file.open("rb") as opened:
        head = opened.read(8)
        if file.suffix == ".safetensors":
            _safetensors(source, file, head, opened.read(min(_LONGEST_HEADER, int.from_bytes(head, "little"))))
        elif file.suffix == ".gguf" and head[:4] != _GGUF:
            raise _corrupt(source, file, f"it does not begin with {_GGUF.decode()}")
    if file.suffix == ".gguf":
        _tensors(source, file)


def _safetensors(source: str, file: Path, head: bytes, header: bytes) -> None:
    size = file.stat().st_size
    try:
        tensors = {name: row for name, row in json.loads(header).items() if name != "__metadata__"}
        end = max((int(row["data_offsets"][1]) for row in tensors.values()), default=0)
    except (ValueError, AttributeError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise _corrupt(source, file, "its header cannot be read") from error
    whole = len(head) + int.from_bytes(head, "little") + end
    if size != whole:
        raise _corrupt(source, file, f"it has {size} octets, its header says {whole}")


def _tensors(source: str, file: Path) -> None:
    """With the reader that the reference engine has; where that is not installed, the beginning has to do."""
    try:
        import gguf  # noqa: PLC0415 - heavy, and not on every operator's machine
    except ImportError:
        return
    try:
        gguf.GGUFReader(str(file))
    except (ValueError, KeyError, IndexError, TypeError, OverflowError, UnicodeDecodeError) as error:
        raise _corrupt(source, file, f"it is cut off or damaged: {error}") from error


def _corrupt(source: str, file: Path, why: str, hint: str = "fetch it again") -> FabrictoolError:
    return InvalidInputError.of("FT7014", f"{file.name} is corrupt: {why}", thing=source, hint=hint)
