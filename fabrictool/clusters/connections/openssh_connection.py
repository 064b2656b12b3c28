"""The adapter for sites that want more than a key: OpenSSH's own client, many commands over one shared connection.

Either the connection is opened here, without ever asking a person (`BatchMode`), or a person has opened it before
(`control_path`): with a second factor, Kerberos, a hardware key. That one is used and never ended here.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fabrictool.clusters.connections import commands, errors, openssh_files
from fabrictool.clusters.connections.settings import ConnectionLimits
from fabrictool.clusters.connections.shell_verbs import ShellOutcome, ShellVerbs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fabrictool.clusters.connections.protocol import Endpoint

_PAUSE = 0.02
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
_CONTROL_SECONDS = 10.0
_END_SECONDS = 5.0
_PORT_TRIES = 5
_FAILED = 255
"""ssh's own failure; also a status that a command may have."""
_REFUSED = "refused by peer"
_NEVER_RAN = (_REFUSED, "Control socket ")
"""In the log of a client without a session: none was opened, or no connection is shared. Others may have run."""


class OpensshConnection(ShellVerbs):
    """One shared connection (ControlMaster) in a private folder, and one `ssh` process for each command over it."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        limits: ConnectionLimits | None = None,
        control_path: str = "",
        ssh_config: bool = False,
    ) -> None:
        super().__init__(endpoint)
        self._limits = limits or ConnectionLimits()
        self._theirs = str(Path(control_path).expanduser()) if control_path else ""
        self._ssh_config = ssh_config
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(self._limits.channels)
        self._folder: Path | None = None
        self._master: subprocess.Popen[bytes] | None = None
        self._serial = 0

    def close(self) -> None:
        """End the connection that was opened here; a later call opens it again."""
        with self._lock:
            self._end_master()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def _carry(self, text: str, stdin: bytes, timeout_s: float, *, urgent: bool = False) -> ShellOutcome:
        if urgent:
            return self._carried(text, stdin, timeout_s)
        with self._slots:
            return self._carried(text, stdin, timeout_s)

    def _carried(self, text: str, stdin: bytes, timeout_s: float) -> ShellOutcome:
        for _ in self._tries():
            log, process = self._client(text)
            try:
                out, err = process.communicate(stdin, timeout_s)
            except subprocess.TimeoutExpired as late:
                # The shared connection holds the pipes as long as the command runs: no waiting for their end.
                return ShellOutcome("timeout", late.output or b"", late.stderr or b"")
            finally:
                _ended(process)
                told = _taken(log)
            if process.returncode != _FAILED or re.search(rb"ft-[0-9a-f]{16}-end 255\n", err):
                return ShellOutcome("ended", out, err, process.returncode)
            if not any(words in told for words in _NEVER_RAN):
                return ShellOutcome("lost", out, err, why="the shared connection ended")
            self._after_refusal(told)
        raise errors.channel_refused(self._endpoint, "session open refused by peer")

    @contextmanager
    def stream(self, argv: Sequence[str]) -> Iterator[Iterator[bytes]]:
        wrapped = commands.wrap_stream(argv)
        log, process = self._begun_stream(wrapped, errors.named(argv))
        try:
            yield self._lines(process, errors.named(argv))
        finally:
            _ended(process)
            _taken(log)

    def _begun_stream(self, wrapped: commands.Wrapped, what: str) -> tuple[Path, subprocess.Popen[bytes]]:
        for _ in self._tries():
            log, process = self._client(wrapped.text)
            for line in _file(process.stdout):
                if wrapped.begun(line) is not None:
                    return log, process
            status = process.wait()
            _ended(process)
            told = _taken(log)
            if not any(words in told for words in _NEVER_RAN):
                if status != _FAILED:
                    raise errors.no_shell(self._endpoint, status, b"")
                raise errors.lost(self._endpoint, what, "the shared connection ended")
            self._after_refusal(told)
        raise errors.channel_refused(self._endpoint, "session open refused by peer")

    def _lines(self, process: subprocess.Popen[bytes], what: str) -> Iterator[bytes]:
        for line in _file(process.stdout):
            yield line.removesuffix(b"\n")
        if process.wait() == _FAILED:
            raise errors.lost(self._endpoint, what, "the shared connection ended")

    @contextmanager
    def forward(self, host: str, port: int) -> Iterator[tuple[str, int]]:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        for _ in range(_PORT_TRIES):
            self._opened()
            here = _free_port()
            if self._control("forward", "-L", f"127.0.0.1:{here}:{target}") == 0:
                break
        else:
            raise errors.channel_refused(self._endpoint, "port forwarding failed")
        try:
            yield "127.0.0.1", here
        finally:
            self._control("cancel", "-L", f"127.0.0.1:{here}:{target}")

    # -- clients of the shared connection ----------------------------------------------------------------------

    def _tries(self) -> Iterator[None]:
        """Until sessions have been refused for too long; the connection is up each time."""
        until, pause = time.monotonic() + self._limits.refused_s, _FIRST_PAUSE
        while True:
            self._opened()
            yield
            if time.monotonic() + pause > until:
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _client(self, text: str) -> tuple[Path, subprocess.Popen[bytes]]:
        """A process that speaks over the shared connection, and cannot open one of its own."""
        with self._lock:
            self._serial += 1
            log = self._private() / f"client{self._serial}"
        never = {"ControlMaster": "no", "ProxyCommand": "false", "LogLevel": "DEBUG1", "RequestTTY": "no"}
        words = [*_words(never.items()), "-E", str(log), "-T", "-a", "-x", "--", self._endpoint.host, text]
        argv = [self._program(), "-F", "none", "-S", self._path(), *words]
        pipe = subprocess.PIPE
        return log, subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe)

    def _after_refusal(self, told: str) -> None:
        """Nothing ran: either the login node opens no more sessions, or the shared connection has gone."""
        if _REFUSED in told:
            return
        with self._lock:
            if self._theirs:
                raise self._not_open()
            self._end_master()

    # -- the shared connection ---------------------------------------------------------------------------------

    def _path(self) -> str:
        return self._theirs or str(self._private() / "m")

    def _private(self) -> Path:
        """A folder with a short name: the path of a socket has hardly 100 bytes."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="ft-", dir="/tmp"))
        return self._folder

    def _program(self) -> str:
        program = shutil.which("ssh")
        if program is None:
            raise errors.no_program(self._endpoint, "ssh")
        return program

    def _opened(self) -> None:
        with self._lock:
            if self._theirs:
                if not Path(self._theirs).exists() or self._control("check") != 0:
                    raise self._not_open()
            elif self._master is None or self._master.poll() is not None or not Path(self._path()).exists():
                self._end_master()
                self._open()

    def _open(self) -> None:
        folder = self._private()
        chain = (*self._endpoint.jumps, self._endpoint)
        for number, hop in enumerate(chain):
            (folder / f"known{number}").write_text(openssh_files.known_hosts(hop))
            (folder / f"log{number}").write_text("")
        (folder / "config").write_text(openssh_files.hop_config(chain[:-1], folder, self._limits))
        last = len(chain) - 1
        settings = openssh_files.options(self._endpoint, folder / f"known{last}", self._limits)
        words = _words([*settings.items(), *openssh_files.identity_lines(self._endpoint)])
        if last:
            words += ["-o", f"ProxyCommand={openssh_files.proxy_command(folder, last - 1)}"]
        config = str(Path("~/.ssh/config").expanduser()) if self._ssh_config else "none"
        # The remote `cat` reads our pipe: should this process be killed, the shared connection ends by itself.
        argv = [self._program(), "-F", config, "-M", "-S", self._path(), *words, "-E", str(folder / f"log{last}")]
        argv += ["-T", "--", self._endpoint.host, "exec cat"]
        with (folder / "err").open("wb") as err:
            master = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=err)
        self._master = master
        until = time.monotonic() + self._limits.connect_s + self._limits.login_s * len(chain)
        while not Path(self._path()).exists():
            if master.poll() is not None or time.monotonic() > until:
                self._end_master()
                logs = [(folder / f"log{number}").read_text(errors="replace") for number in range(len(chain))]
                logs[-1] += (folder / "err").read_text(errors="replace")
                raise openssh_files.diagnosis(chain, logs, time.time(), self._limits)
            time.sleep(_PAUSE)

    def _end_master(self) -> None:
        if self._master is not None:
            _ended(self._master, gently=True)
            self._master = None
            Path(self._path()).unlink(missing_ok=True)

    def _control(self, verb: str, *words: str) -> int:
        argv = [self._program(), "-F", "none", "-S", self._path(), "-O", verb, *words, "--", self._endpoint.host]
        try:
            return subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CONTROL_SECONDS, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return _FAILED

    def _not_open(self) -> Exception:
        return errors.not_open(self._endpoint, self._theirs, openssh_files.by_hand(self._endpoint, self._theirs))


def _words(settings: Iterable[tuple[str, str]]) -> list[str]:
    return [word for key, value in settings for word in ("-o", f"{key}={value}")]


def _file(stream: IO[bytes] | None) -> Any:
    return stream or ()


def _taken(log: Path) -> str:
    """A client's log, which is then removed."""
    with suppress(OSError):
        text = log.read_text(errors="replace")
        log.unlink()
        return text
    return ""


def _ended(process: subprocess.Popen[bytes], *, gently: bool = False) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    if process.poll() is None:
        process.terminate() if gently else process.kill()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number
