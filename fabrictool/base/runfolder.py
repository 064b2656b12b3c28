"""The folder of one started unit, and the proof that it lives.

========== =====================================================================================================
spec.json  what it was told, written before it starts
lock       an advisory lock that the unit's process holds while it lives: the operating system releases it on any
           death, and says who holds it, so neither a stale pid file nor a reused pid can lie; its content names
           the machine and its boot, for on another machine the lock says nothing
process.json  pid and the address of its loopback status page, written by the unit itself
health.json   one line that says whether it serves, rewritten while it lives
status.json   its status document, as often
expected.json  a gateway's: when replicas that its requests wait for are to serve, as the operator's side says it
prometheus.json  where a gateway's series are, for a Prometheus on its host
handover.sock  a gateway's, by which its successor asks for its listening sockets
again      there, if it starts again when its host comes back
stopped    there, if it does not after all: somebody stopped it, or another one runs in its place
exit.json  how it ended, when it could still say so
dormant    there, if it ended because nobody asked for what it serves
log        its stderr, and its engine's
========== =====================================================================================================
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.files import file_error, write_atomic

LOG_OCTETS = 16 * 1024 * 1024
"""Some hundred thousand lines. Engines write for months, and the folder is on a file system with a quota."""
DORMANT = "dormant"
_FLOCK = "hhqqi"  # struct flock of 64-bit Linux: type, whence, start, length, pid


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The files of one unit; see the module's docstring."""

    path: Path

    @property
    def spec(self) -> Path:
        """What the unit was told."""
        return self.path / "spec.json"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def identity(self) -> Path:
        """Folder of its credential."""
        return self.path / "identity"

    @property
    def comes_back(self) -> bool:
        """Whether its process is started again after a reboot of its host, under the same session."""
        return (self.path / "again").exists() and not (self.path / "stopped").exists()

    @property
    def dormant(self) -> bool:
        return (self.path / DORMANT).exists()

    def fall_dormant(self) -> None:
        """Say that it ends because nobody asks for it; raises FT4301 or FT4302."""
        write_atomic(self.path / DORMANT, b"yes\n")

    def claim(self) -> int:
        """Become the one process of this folder; returns the descriptor that holds the lock until exit.

        Raises
        ------
        FabrictoolError
            FT7101 when another process lives here already, FT4301 when nothing can be written here.
        """
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise file_error(error, self.path) from error
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                return descriptor  # a shared file system without locks: the job's claim has to do
            os.close(descriptor)
            raise FabrictoolError.of("FT7101", f"another process runs in {self.path}", file=str(self.path)) from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "boot": boot_id()}).encode(), 0)
        except OSError as error:
            raise file_error(error, self.path / "lock") from error
        return descriptor

    def holder(self) -> int | None:
        """Pid of the living process, or None. Asking takes no lock, so it never disturbs a start.

        Raises
        ------
        FabrictoolError
            FT5108 when that cannot be known from here: the folder belongs to another machine, or its process lives
            in another pid namespace, where its pid means nothing to us.
        """
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise file_error(error, self.path) from error
        try:
            question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, question))
            written = _decoded(os.pread(descriptor, 4096, 0))
        except OSError as error:
            raise file_error(error, self.path) from error
        finally:
            os.close(descriptor)
        free = kind == fcntl.F_UNLCK
        host, here = str(written.get("host", "")), socket.gethostname()
        other_boot = written.get("boot", boot_id()) != boot_id()
        if other_boot and not (host == here and free) and not self.exit():  # free after a reboot of ours: dead
            raise _elsewhere(self.path, f"it was started on {host or 'another machine'}, and this is {here}")
        if free or other_boot:
            return None
        if pid <= 1:
            raise _elsewhere(self.path, "its process lives in another container or pid namespace")
        return int(pid)

    def write_process(self, **facts: Any) -> None:
        write_atomic(self.path / "process.json", json.dumps({"pid": os.getpid(), **facts}).encode())

    def process(self) -> dict[str, Any]:
        """What `write_process` wrote; empty before."""
        return self._read("process.json")

    def write_health(self, health: bytes, document: bytes) -> None:
        """Leave a sign of life."""
        write_atomic(self.path / "health.json", health)
        write_atomic(self.path / "status.json", document)

    def health(self) -> dict[str, Any]:
        """What `write_health` wrote last; empty before."""
        return self._read("health.json")

    def write_exit(self, code: int, reason: str, at: float) -> None:
        write_atomic(self.path / "exit.json", json.dumps({"code": code, "reason": reason, "at": at}).encode())

    def exit(self) -> dict[str, Any]:
        """How the unit ended; empty while it runs or when it was killed."""
        return self._read("exit.json")

    def log_tail(self, lines: int) -> list[str]:
        try:
            with self.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 200 * max(1, lines)))
                return file.read().decode(errors="replace").splitlines()[-lines:]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise file_error(error, self.log) from error

    def bound_log(self, most: int = LOG_OCTETS) -> None:
        """Cut a log that takes more to the younger half of that; raises FT4301 or FT4302.

        Whoever writes it goes on at its end, for it was opened to append. As with logrotate's copytruncate, lines that
        come in the moment between reading and cutting are lost, and lines that come before the kept ones are back stand
        before them.
        """
        try:
            with self.log.open("rb") as file:
                if os.fstat(file.fileno()).st_blocks * 512 <= most:  # of one that is not appended to, after a cut
                    return
                file.seek(-(most // 2), os.SEEK_END)
                kept = file.read().partition(b"\n")[2]
                kept = kept[: kept.rfind(b"\n") + 1]
            with self.log.open("ab", buffering=0) as file:  # one write: no line of the writer's comes into it
                file.truncate(0)
                file.write(b"(older lines were cut off)\n" + kept)
        except FileNotFoundError:
            return  # started by hand, or by a scheduler that brings it at the end
        except OSError as error:
            raise file_error(error, self.log) from error

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return _decoded((self.path / name).read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise file_error(error, self.path / name) from error


def boot_id() -> str:
    """Random id of this start of this machine's kernel; the same in all its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _elsewhere(path: Path, reason: str) -> FabrictoolError:
    hint = "run the tool there; if that machine is gone for good, remove the folder"
    return FabrictoolError.of(
        "FT5108", f"cannot tell from here whether {path.name} runs: {reason}", file=str(path), hint=hint
    )
