"""What the operator has: commands on machine `op`, keys, pinned hosts, and sockets in any machine's network."""

import contextlib
import ctypes
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.testbed import files, keys, network
from tests.testbed.machine import Machine
from tests.testbed.relay_handle import RelayHandle
from tests.testbed.state import BedError

if TYPE_CHECKING:
    import itertools

CLONE_NEWNET = 0x40000000


class OperatorSide(ABC):
    """The part of a bed that plays the operator."""

    root: Path
    numbers: "itertools.count[int]"

    @abstractmethod
    def machine(self, name: str) -> Machine:
        """Of the bed."""

    @abstractmethod
    def address(self, name: str) -> str:
        """Of the bed."""

    @property
    def key_file(self) -> Path:
        """The operator's private key; every user of every machine lets it in."""
        return self.root / files.OPERATOR_KEY

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`: the right user, key and known hosts for every machine by name or address."""
        return self.root / "ssh_config"

    def operator_command(self, argv: Sequence[str], cwd: str | os.PathLike[str] | None = None) -> list[str]:
        op = f"/proc/{self.machine('op').process.pid}/ns"
        enter = ["nsenter", f"--net={op}/net", f"--mount={op}/mnt", f"--uts={op}/uts", "--"]
        return [*enter, "env", "-C", str(cwd or Path.cwd()), *argv]

    def operator_popen(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **more: Any,
    ) -> subprocess.Popen[str]:
        """Starts a command as root on the operator's machine. Its files, /tmp included, are this machine's.

        Signals reach the command itself. What it leaves behind ends with the bed.
        """
        arguments: dict[str, Any] = {"stdin": subprocess.DEVNULL, "text": True} | more
        return subprocess.Popen(self.operator_command(argv, cwd), env=env, **arguments)

    def operator_run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float = 120,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Like operator_popen, to the end; the exit status is the caller's to judge."""
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        command = self.operator_command(argv, cwd)
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False, **given)

    def ssh(
        self,
        name: str,
        *argv: str,
        port: int = 22,
        user: str | None = None,
        timeout: float = 60,
        stdin: str | None = None,
        via: RelayHandle | None = None,
        options: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        """OpenSSH's client on the operator's machine; the words of argv are one shell line there.

        `via` goes through a relay to the machine's port 22; `options` are such as "ControlMaster=yes".
        """
        who = ["-l", user] if user else []
        if via:
            port, options = via.port, [f"HostName={via.host}", f"HostKeyAlias={name}", *options]
        chosen = [word for option in options for word in ("-o", option)]
        command = ["ssh", "-F", str(self.ssh_config), *chosen, "-p", str(port), *who, name, *argv]
        return self.operator_run(command, timeout=timeout, stdin=stdin, cwd="/")

    def relay(self, to: str, port: int = 22, *, on: str = "op", listen: int = 0, **weather: float) -> RelayHandle:
        """A bad path to a machine's TCP port: connect to the handle's host and port instead. For `with`.

        It runs on machine `on`; the weather is relay.Weather's fields.
        """
        start = self.operator_popen if on == "op" else self.machine(on).popen
        host = self.address(on)
        return RelayHandle(start, (host, listen), (self.address(to), port), weather)

    def host_keys(self, name: str, port: int = 22) -> list[str]:
        """What a blueprint pins: lines `ssh-ed25519 AAAA...`."""
        spec = self.machine(name).spec
        if port not in spec.ssh_ports:
            raise BedError(f"{name} has no sshd on port {port}")
        return [keys.public(self.root / "m" / name / "ssh" / f"host_key_{port}")]

    @property
    def host_authority(self) -> str:
        """The public key that signed `host`'s host certificate, for @cert-authority."""
        return keys.public(self.root / files.HOST_CA)

    def new_key(self) -> Path:
        """A private key that no machine knows."""
        return keys.make_key(self.root / "keys" / f"key-{os.getpid()}-{next(self.numbers)}")

    def certify(self, key: Path, *principals: str, valid: str = "-5m:+1h") -> Path:
        """Signs a user key with the authority that all sshds trust; returns the certificate beside it."""
        return keys.sign(self.root / files.USER_CA, key, identity="operator", principals=list(principals), valid=valid)

    @contextlib.contextmanager
    def sockets_in(self, name: str = "op") -> Iterator[None]:
        """Sockets that this thread makes within belong to that machine's network."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/proc/thread-self/ns/net").open() as home, (network.NAMED / f"ft-{name}").open() as away:
            if libc.setns(away.fileno(), CLONE_NEWNET):
                raise BedError(f"cannot enter the network of {name}: {os.strerror(ctypes.get_errno())}")
            try:
                yield
            finally:
                if libc.setns(home.fileno(), CLONE_NEWNET):
                    raise BedError("cannot leave the network of a machine")
