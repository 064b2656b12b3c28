"""``python -m fabrictool.mesh.transport.bridge HOST:PORT …``: standard input and output, tied to a hub's mesh port.

Meant as the forced command of a key (``command="…",restrict`` in authorized_keys): whoever has the key gets to these
hubs and to nothing else, without a shell and without forwarding. The TLS of the mesh runs through it from end to end.
Standard library only: the account that runs it need not have more of fabrictool than this file's package.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

READY = b"fabrictool-bridge 1\n"
COMMAND = "fabrictool-bridge"
CONNECT_SECONDS = 10.0
CHUNK_OCTETS = 64 * 1024


def target(allowed: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Which hub: the one that the client asked for if it is allowed; the only one for a client that names none."""
    words = environment.get("SSH_ORIGINAL_COMMAND", "").split()
    if len(words) == 2 and words[0] == COMMAND:
        return words[1] if words[1] in allowed else None
    return allowed[0] if len(allowed) == 1 else None


def main(allowed: Sequence[str], environment: Mapping[str, str]) -> int:
    """Carry octets both ways until either end is over."""
    if not allowed:
        sys.stderr.write("usage: python -m fabrictool.mesh.transport.bridge HOST:PORT …\n")
        return 64
    chosen = target(allowed, environment)
    if chosen is None:
        sys.stderr.write(f"bridge: only these may be reached: {', '.join(allowed)}\n")
        return 1
    host, _, port = chosen.rpartition(":")
    try:
        hub = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"bridge: cannot reach {chosen}: {error}\n")
        return 1
    hub.settimeout(None)
    hub.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _write(1, READY)
    threading.Thread(target=_upwards, args=(hub,), daemon=True).start()
    try:
        while data := hub.recv(CHUNK_OCTETS):
            _write(1, data)
    except OSError:
        return 1
    return 0


def _upwards(hub: socket.socket) -> None:
    """From standard input to the hub; its end is the hub's, too."""
    with suppress(OSError):
        while data := os.read(0, CHUNK_OCTETS):
            hub.sendall(data)
    with suppress(OSError):  # it may have closed first
        hub.shutdown(socket.SHUT_RDWR)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
