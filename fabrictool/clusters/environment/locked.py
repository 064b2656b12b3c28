"""Packages for another Python or another platform than ours: from the lock file, as wheels, by pip."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.base.files import file_error
from fabrictool.clusters.environment.installed import same, wanted
from fabrictool.clusters.environment.requirements import normal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fabrictool.clusters.environment.requirements import TargetPlatform

LOCK = "requirements.lock"
OLDEST_GLIBC = (2, 17)
"""What is assumed of a site that does not say."""
PIP_SECONDS = 900.0


def shipped_lock() -> Path | None:
    """The lock file of the checkout that this package lies in, if it does."""
    import fabrictool  # noqa: PLC0415 - this very package, as a folder

    folder = Path(fabrictool.__file__).parents[1]
    return folder / LOCK if (folder / LOCK).is_file() and (folder / "pyproject.toml").is_file() else None


def read_lock(path: Path | None) -> dict[str, str]:
    """Name → ``NAME==VERSION`` with its hashes, as pip reads it, without markers.

    Raises
    ------
    FabrictoolError
        FT5506 when there is none, FT43xx when it cannot be read.
    """
    if path is None:
        hint = "run from a checkout of fabrictool, or give its requirements.lock with --lock"
        message = "the site's Python or platform differs from this machine's, and no lock file was found"
        raise FabrictoolError.of("FT5506", message, hint=hint)
    try:
        text = path.read_text()
    except OSError as error:
        raise file_error(error, path) from error
    pins = {}
    for line in text.replace("\\\n", " ").splitlines():
        match = re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;]+)", line)
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}", line)
        if match and hashes:
            pins[normal(match[1])] = " ".join([match[0], *hashes])
    return pins


def subset(lock: dict[str, str], names: Iterable[str]) -> str:
    """The requirements file of some packages; raises FT5506 for one that the lock does not have."""
    missing = [name for name in names if name not in lock]
    if missing:
        message = f"the lock file does not have {', '.join(missing)}"
        raise FabrictoolError.of("FT5506", message, hint="is it the lock file of this version?")
    return "".join(f"{lock[name]}\n" for name in names)


def pip_arguments(target: TargetPlatform, requirements: str, folder: str) -> list[str]:
    """Wheels alone, so that nothing is built; each with a hash of the lock file."""
    minor = "".join(map(str, target.version))
    glibc = target.glibc if target.glibc > (0, 0) else OLDEST_GLIBC
    platforms = [f"manylinux_{glibc[0]}_{number}_{target.machine}" for number in range(glibc[1], 4, -1)]
    platforms += [f"{old}_{target.machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1")]
    return [
        "download", "--quiet", "--disable-pip-version-check", "--no-input", "--dest", folder, "--no-deps",
        "--require-hashes", "--only-binary", ":all:", "--python-version", target.minor, "--implementation", "cp",
        "--abi", f"cp{minor}", "--abi", "abi3", "--abi", "none",
        *(word for platform in platforms for word in ("--platform", platform)),
        "--requirement", requirements,
    ]  # fmt: skip


def wheels_for(
    target: TargetPlatform, requirements: str, pip: Sequence[str] = (sys.executable, "-m", "pip")
) -> dict[str, bytes]:
    """Download and open them: path under ``lib/`` → octets.

    Raises
    ------
    FabrictoolError
        FT5507 with pip's own words, FT5503 for a wheel whose files are not those of its RECORD.
    """
    with tempfile.TemporaryDirectory(prefix="fabrictool-") as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text(requirements)
        wheels = Path(folder, "wheels")
        wheels.mkdir()
        try:
            done = subprocess.run(
                [*pip, *pip_arguments(target, str(listed), str(wheels))],
                capture_output=True, check=False, timeout=PIP_SECONDS, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except (subprocess.TimeoutExpired, OSError) as error:
            raise _pip_failed(str(error)) from error
        if done.returncode != 0:
            raise _pip_failed(done.stderr.decode(errors="replace"))
        contents: dict[str, bytes] = {}
        for path in sorted(wheels.glob("*.whl")):
            contents |= wheel_files(path.name, path.read_bytes())
        return contents


def wheel_files(name: str, data: bytes) -> dict[str, bytes]:
    """What a wheel puts on the path of imports, each file as its RECORD has it."""
    contents = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as wheel:
            record = next(entry for entry in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", entry))
            for path, digest, *_ in csv.reader(io.StringIO(wheel.read(record).decode())):
                inner = re.sub(r"^[^/]+\.data/(?:purelib|platlib)/", "", path)
                if path == record or re.match(r"[^/]+\.data/", inner) or not wanted(inner):
                    continue
                content = wheel.read(path)
                mode, _, value = digest.partition("=")
                if not same(content, mode, value):
                    raise FabrictoolError.of("FT5503", f"{name}: {path} differs from RECORD", thing=f"package/{name}")
                contents[inner] = content
    except (zipfile.BadZipFile, StopIteration, KeyError, ValueError) as error:
        raise FabrictoolError.of("FT5503", f"{name} is not a wheel: {error}", thing=f"package/{name}") from error
    return contents


def _pip_failed(output: str) -> FabrictoolError:
    lines = [line for line in output.strip().splitlines() if "ERROR" in line] or output.strip().splitlines()[-3:]
    message = f"pip did not get the packages: {' '.join(lines)[:400]}"
    hint = "pip must be installed here and reach its index; a platform without a wheel cannot be served"
    passing = any(word in output for word in ("timed out", "Connection", "Temporary failure", "TimeoutExpired"))
    return UnreachableError.of("FT5507", message, hint=hint, transient=passing)
