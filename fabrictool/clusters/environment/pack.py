"""Files → a release: its manifest, its name by content, and the archive that carries it; pure.

The same content gives the same name wherever it is packed: no times, no owners, no order of folders.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import shlex
import tarfile
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST = "MANIFEST"
PYTHON = "bin/python"
_EPOCH = 315532800  # 1980-01-01, the earliest time that zip files know
_LEVEL = 4
"""Of compression: 6 takes more than twice as long, for 4 % less."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.,+@=~()-]*|[_.][A-Za-z0-9][A-Za-z0-9 _.,+@=~()-]*|__?[A-Za-z0-9_.+-]+")


@dataclass(frozen=True)
class Release:
    """One environment, ready to be sent."""

    name: str
    """16 hex digits of the manifest's SHA-256."""
    contents: Mapping[str, bytes]
    """Path → octets, the manifest among them."""

    @property
    def files(self) -> int:
        return len(self.contents)

    @property
    def size(self) -> int:
        """Octets of all files, unpacked."""
        return sum(map(len, self.contents.values()))

    @cached_property
    def archive(self) -> bytes:
        """``tar.gz``; its octets may differ between versions of zlib, its content does not."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path, data in sorted(self.contents.items()):
                # Not writable: some sites' start-up files of Python patch what they find, such as lists of authorities.
                entry = tarfile.TarInfo(path)
                entry.size, entry.mtime, entry.mode = len(data), _EPOCH, 0o555 if path == PYTHON else 0o444
                archive.addfile(entry, io.BytesIO(data))
        return gzip.compress(out.getvalue(), _LEVEL, mtime=0)

    @property
    def digest(self) -> str:
        """SHA-256 of the archive, hex."""
        return hashlib.sha256(self.archive).hexdigest()


def wrapper(python: str, module: str = "") -> bytes:
    """``bin/python``: the site's interpreter with the packages beside it before its own, wherever it is called from."""
    load = ["command -v module >/dev/null 2>&1 || . /etc/profile", f"module load {shlex.quote(module)} || exit 66"]
    lines = [
        "#!/bin/sh",
        "# Written by `fabrictool bootstrap`: the site's own Python with the packages of this release.",
        'here=$(CDPATH= cd -P -- "${0%/*}/.." && pwd -P) || exit 66',
        *(load if module else []),
        "unset PYTHONHOME",
        'export PYTHONPATH="$here/lib" PYTHONNOUSERSITE=1',
        f'exec {shlex.quote(python)} "$@"',
    ]
    return ("\n".join(lines) + "\n").encode()


def packed(packages: Mapping[str, bytes], python: bytes) -> Release:
    """`packages`: path under ``lib/`` → octets.

    Raises
    ------
    FabrictoolError
        FT5503 for a name that could leave the folder or that a shell's tools would misread.
    """
    files = {f"lib/{path}": data for path, data in packages.items()} | {PYTHON: python}
    for path in files:
        if not all(_NAME.fullmatch(part) for part in path.split("/")):
            raise FabrictoolError.of("FT5503", f"a package has a file with the name {path!r}")
    rows = [f"{hashlib.sha256(data).hexdigest()}  {path}\n" for path, data in sorted(files.items())]
    files[MANIFEST] = "".join(rows).encode()
    return Release(hashlib.sha256(files[MANIFEST]).hexdigest()[:16], files)
