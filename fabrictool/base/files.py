"""Files that survive a crash: write beside, fsync, rename."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, Place, Problem

if TYPE_CHECKING:
    from pathlib import Path


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace the file `path` by `data`, or leave it as it was; its folder is made if need be.

    Raises
    ------
    FabrictoolError
        FT4301 (no space left) or FT4302 (no rights, read-only, not a folder); the old content is still there.
    """
    try:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    except ValueError as error:
        raise file_error(IsADirectoryError(errno.EISDIR, "is a folder"), path) from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise file_error(error, path) from error


def write_output(path: Path, data: bytes) -> None:
    """Write what a user asked for where they asked for it: a device or a pipe is written to, never replaced.

    Raises
    ------
    FabrictoolError
        FT4301 or FT4302, also for a folder that does not exist.
    """
    try:
        regular = not path.exists() or path.is_file()
        if regular and path.parent.is_dir():
            write_atomic(path.resolve(), data)
        else:
            with path.open("wb") as file:
                file.write(data)
    except OSError as error:
        raise file_error(error, path) from error


def sync_folder(folder: Path) -> None:
    """Make renames and creations inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_error(error: OSError, path: Path | str) -> FabrictoolError:
    """The coded form of an operating system error on `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FabrictoolError(
            Problem(
                "FT4301",
                f"no space left while writing {path}",
                Place(file=str(path)),
                "free some space (or quota) and run the same command again; nothing was lost",
                transient=True,
            )
        )
    reason = error.strerror or str(error)
    return FabrictoolError(
        Problem(
            "FT4302",
            f"cannot use {path}: {reason.lower()}",
            Place(file=str(path)),
            "check that it is there, its owner and its mode; the state folder is chosen with FABRICTOOL_STATE_DIR",
        )
    )
