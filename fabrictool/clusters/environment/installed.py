"""The packages that are installed here: each file is compared with its RECORD while it is packed."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import json
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.mesh.attestation import BUILD_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fabrictool.clusters.environment.requirements import TargetPlatform

OWN = "fabrictool"
_LEFT_OUT = frozenset(["INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json"])
"""Of a ``dist-info``: who installed it, from where and when, which is no content."""
_OLD_NAMES = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}


def requires(name: str) -> Sequence[str] | None:
    """The ``Requires-Dist`` of an installed package; None when it is not installed."""
    distribution = _distribution(name)
    return None if distribution is None else distribution.requires or []


def version_of(name: str) -> str:
    """Of an installed package; "" for none."""
    distribution = _distribution(name)
    return "" if distribution is None else distribution.version


def misfits(names: Iterable[str], target: TargetPlatform) -> list[str]:
    """The packages whose compiled parts are not for `target`, with the reason."""
    reasons = []
    for name in names:
        distribution = _distribution(name)
        tags = re.findall(r"^Tag: (\S+)$", (distribution and distribution.read_text("WHEEL")) or "", re.MULTILINE)
        platforms = [platform for tag in tags for platform in tag.rsplit("-", 1)[-1].split(".")]
        if platforms and not any(fits(platform, target) for platform in platforms):
            reasons.append(f"{name} is for {' or '.join(dict.fromkeys(platforms))}")
    return reasons


def fits(platform: str, target: TargetPlatform) -> bool:
    """Whether a wheel's platform tag suits a glibc system; what was built here is taken to."""
    if platform in ("any", f"linux_{target.machine}"):
        return True
    named = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", platform)
    old = re.fullmatch(r"(manylinux\d+)_(\w+)", platform)
    if named is not None:
        return named[3] == target.machine and (int(named[1]), int(named[2])) <= target.glibc
    return old is not None and old[2] == target.machine and _OLD_NAMES.get(old[1], (99, 0)) <= target.glibc


def files_of(name: str) -> dict[str, bytes]:
    """Path under ``lib/`` → octets of everything that an importer may read.

    Raises
    ------
    FabrictoolError
        FT5503 when a file is missing or is not what RECORD says, FT5508 when the package is not installed.
    """
    distribution = _distribution(name)
    if distribution is None:
        hint = "pip install 'fabrictool[agent,gateway,reference]' here first"
        raise FabrictoolError.of("FT5508", f"{name} is not installed here", thing=f"package/{name}", hint=hint)
    if name == OWN and _editable(distribution):
        return own_files()
    # Not `distribution.files`: from Python 3.12 on that leaves out what is missing.
    record = distribution.read_text("RECORD")
    if not record:
        raise _different(name, "it has no RECORD, so it cannot be verified")
    contents = {}
    for path, recorded, *_ in csv.reader(record.splitlines()):
        if not wanted(path):
            continue
        try:
            data = Path(str(distribution.locate_file(path))).read_bytes()
        except OSError as error:
            raise _different(name, f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from error
        mode, _, value = recorded.partition("=")
        if not value:
            raise _different(name, f"RECORD has no hash of {path}")
        if not same(data, mode, value):
            raise _different(name, f"{path} differs from RECORD")
        contents[path] = data
    signed = Path(str(distribution.locate_file(f"{OWN}/{BUILD_FILE}")))
    if name == OWN and signed.is_file():  # it came after the installation, so RECORD does not know it
        contents[f"{OWN}/{BUILD_FILE}"] = signed.read_bytes()
    return contents


def wanted(path: str) -> bool:
    """Whether a file of a package belongs into an environment: none outside of it, no scripts, caches or stubs."""
    parts = path.split("/")
    if (
        path.startswith(("/", ".."))
        or ".." in parts
        or "__pycache__" in parts
        or path.endswith((".pyc", ".pyi", ".pth"))
    ):
        return False
    return not (len(parts) == 2 and parts[0].endswith(".dist-info") and parts[1] in _LEFT_OUT)


def same(data: bytes, mode: str, value: str) -> bool:
    """Whether `data` has the hash that RECORD gives: base64 without its padding."""
    try:
        digest = hashlib.new(mode, data).digest()
    except ValueError:
        return False
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() == value


def own_files() -> dict[str, bytes]:
    """Of this package as it lies here, for an editable installation, of which no RECORD can know."""
    import fabrictool  # noqa: PLC0415 - this very package, as a folder

    root = Path(fabrictool.__file__).parent
    contents = {}
    for path in sorted(root.rglob("*")):
        inner = path.relative_to(root)
        if (
            path.is_file()
            and "__pycache__" not in inner.parts
            and not any(part.startswith(".") for part in inner.parts)
        ):
            contents[posixpath.join(OWN, inner.as_posix())] = path.read_bytes()
    return {path: data for path, data in contents.items() if wanted(path)}


def _editable(distribution: importlib.metadata.Distribution) -> bool:
    try:
        return bool(json.loads(distribution.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return False


@cache
def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _different(name: str, what: str) -> FabrictoolError:
    hint = f"install it again: pip install --force-reinstall --no-deps {name}=={version_of(name)}"
    return FabrictoolError.of("FT5503", f"{name} {version_of(name)}: {what}", thing=f"package/{name}", hint=hint)
