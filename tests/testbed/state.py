"""Which bed is alive on this host: one file that outlives the process that made it, and a lock.

A process is known by its id and its start time, so that an id that the kernel gave away again is never touched.
"""

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path("/run/fabrictool-testbed")
FILE = FOLDER / "state.json"


class BedError(Exception):
    """What the bed refuses or could not do, in a sentence for the one who asked."""


@dataclass(frozen=True)
class Process:
    pid: int
    started: int  # clock ticks after boot

    @classmethod
    def of(cls, pid: int) -> "Process | None":
        """The living process with that id; None for a zombie too."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        return Process.of(self.pid) == self

    def kill(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class State:
    root: str
    boot: str
    processes: dict[str, Process] = field(default_factory=dict)  # machine -> its PID 1, as this host sees it
    owner: Process | None = None  # the test run that made it, and that should have ended it

    @property
    def alive(self) -> bool:
        return self.boot == boot_id() and any(process.alive for process in self.processes.values())

    @property
    def orphaned(self) -> bool:
        return self.owner is not None and not self.owner.alive


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read() -> State | None:
    try:
        raw = json.loads(FILE.read_text())
        processes = {name: Process(**process) for name, process in raw["processes"].items()}
        owner = Process(**raw["owner"]) if raw["owner"] else None
        return State(raw["root"], raw["boot"], processes, owner)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise BedError(f"{FILE} is not readable ({error}); remove it and run `down`") from error


def write(state: State) -> None:
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    draft = FILE.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(state), indent=1))
    draft.replace(FILE)


def forget() -> None:
    FILE.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(wait_s: float = 0) -> Iterator[None]:
    """One change at a time on this host, among threads too."""
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    deadline = time.monotonic() + wait_s
    with (FOLDER / "lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise BedError("another process is starting or stopping the testbed right now") from None
                time.sleep(0.05)
        yield
