"""Processes whose wall clock a test sets while they run; their monotonic clocks go on."""

import shlex
import sys
from pathlib import Path

LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib")
HOUR = 3600
SETTINGS = {"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}


def set_clock(file, ahead):
    """Seconds; at once."""
    beside = file.with_suffix(".new")
    beside.write_text(f"{ahead:+d}\n")
    beside.replace(file)


def clock_of(file):
    """The environment of a process that reads its clock from `file`."""
    set_clock(file, 0)
    return SETTINGS | {"FAKETIME_TIMESTAMP_FILE": str(file), "LD_PRELOAD": str(library())}


def library():
    """Debian's package faketime brings it; None where it is missing."""
    return next((path for folder in LIBRARIES for path in Path(folder).glob("**/faketime/libfaketimeMT.so.1")), None)


class Clocks:
    """An environment for units whose Python reads its clock from a file, one for each cluster and kind of unit."""

    def __init__(self, folder):
        self.folder = folder
        self.venv = folder / "venv"
        (self.venv / "bin").mkdir(parents=True)
        python = self.venv / "bin" / "python"
        python.write_text(
            f"""#!/bin/sh
# Called as: python -P -m fabrictool.KIND .../CLUSTER/OPERATION
case "$3" in fabrictool.agent|fabrictool.gateway)
  FAKETIME_TIMESTAMP_FILE={shlex.quote(str(folder))}/$(basename "$(dirname "$4")")-${{3#fabrictool.}}
  export FAKETIME_TIMESTAMP_FILE {" ".join(f"{name}={value}" for name, value in SETTINGS.items())}
  export LD_PRELOAD={shlex.quote(str(library()))};;
esac
exec {shlex.quote(sys.executable)} "$@"
"""
        )
        python.chmod(0o755)
        for cluster in ("one", "two"):
            for kind in ("agent", "gateway"):
                self.set(cluster, kind, 0)

    def set(self, cluster, kind, ahead):
        """Seconds; at once."""
        set_clock(self.folder / f"{cluster}-{kind}", ahead)
