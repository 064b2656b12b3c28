"""Files that survive a crash: write beside, fsync, rename."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fabrictool.base.errors import FabrictoolError, Place, Problem
from fabrictool.base.settings import Settings


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


def check_output(path: Path) -> None:
    """Refuse at once what `write_output` would refuse after the work: no such folder, or a folder by that name.

    Raises
    ------
    FabrictoolError
        FT4302.
    """
    if path.is_dir():
        raise file_error(IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)), path)
    if not path.parent.is_dir():
        raise file_error(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)), path)


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
            _mend(error, path),
        )
    )


def _mend(error: OSError, path: Path | str) -> str:
    hint = "check that it is there, its owner and its mode"
    folder = Path(path).parent
    if error.errno == errno.ENOENT and not folder.is_dir():
        hint = f"there is no folder {folder}: make it, or correct the path"
    elif error.errno == errno.EISDIR:
        hint = "this is a folder: name a file in it"
    ours = Settings.from_environment()
    if any(_below(path, place) for place in (ours.state_dir, ours.cache_dir)):
        hint += "; FABRICTOOL_STATE_DIR and FABRICTOOL_CACHE_DIR choose other folders"
    return hint


def _below(path: Path | str, folder: str) -> bool:
    try:
        return Path(path).expanduser().absolute().is_relative_to(Path(folder).expanduser().absolute())
    except (OSError, RuntimeError, ValueError):
        return False
