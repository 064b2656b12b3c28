"""Calibrations of one's own: the files that ``calibrate`` wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.files import file_error
from fabrictool.simulator.calibration import calibrations_in, dumps, loads

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.simulator.calibration import Calibration


def texts_of(path: Path) -> tuple[str, ...]:
    """What is in a file, or in all files of a folder, as `simulator.calibration.dumps` writes it.

    Raises
    ------
    FabrictoolError
        FT2120 when there is none, or one is no calibration; FT4302 for a file that cannot be read.
    """
    try:
        files = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        contents = [(str(file), file.read_bytes()) for file in files]
    except OSError as error:
        raise file_error(error, path) from error
    if not contents:
        raise InvalidInputError.of("FT2120", f"{path} holds no calibration", hint="fabrictool calibrate DATA.csv")
    texts = []
    for name, data in contents:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InvalidInputError.of("FT2120", f"{name} is not UTF-8 text: {error}") from error
        texts.append(dumps(loads(text, name)))
    return tuple(texts)


def read_calibrations(path: Path | None) -> tuple[Calibration, ...]:
    """Those of ``--calibrations``; raises as `texts_of`."""
    return () if path is None else calibrations_in(texts_of(path))
