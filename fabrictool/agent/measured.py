"""The build that this process runs from: measured, and shown with a maintainer's signature that fits."""

from __future__ import annotations

from pathlib import Path

import fabrictool
from fabrictool.base.files import file_error
from fabrictool.mesh.attestation import BUILD_FILE, digest_of, read_build
from fabrictool.mesh.identity import IdentityError


def package_folder() -> Path:
    return Path(fabrictool.__file__).parent


def measured_build(folder: Path) -> bytes:
    """Digest of all files of a package but what Python writes there itself; raises FT43xx for what cannot be read."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        left_out = "__pycache__" in inner.parts or any(part.startswith(".") for part in inner.parts)
        if path.is_file() and not left_out and inner.as_posix() != BUILD_FILE:
            try:
                contents[inner.as_posix()] = path.read_bytes()
            except OSError as error:
                raise file_error(error, path) from error
    return digest_of(contents)


def signed_build(folder: Path) -> bytes:
    """The evidence for a record; b"" where nobody signed this installation.

    Raises
    ------
    FabrictoolError
        FT6008 what lies there is no signed build, or is one of other files than these; FT43xx it cannot be read.
    """
    path = folder / BUILD_FILE
    try:
        evidence = path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise file_error(error, path) from error
    if read_build(evidence).digest != measured_build(folder):
        raise IdentityError.of("FT6008", "it is signed for other files than those here", file=str(path))
    return evidence
