"""Ports for servers that tests start: no two tests of a machine get the same one, whatever processes they run in.

A port that was free a moment ago may be given out again, or taken by a connection, before its server is there. So
these lie below those of connections (from 32768 on) and of agents' engines (from 20000 on), and whoever got one keeps
it until his process ends.
"""

import fcntl
import itertools
import os
import random
import socket
import tempfile
from pathlib import Path

FIRST, LAST = 12_000, 20_000

_turns = itertools.cycle(range(FIRST, LAST))
_locks = []


def free_port():
    if not _locks:
        path = Path(tempfile.gettempdir()) / f"fabrictool-test-ports-{os.getuid()}"
        _locks.append(path.open("a"))
        # Somewhere of one's own: whoever starts at the same place asks for the same ports in turn.
        for _ in range(random.SystemRandom().randrange(LAST - FIRST)):
            next(_turns)
    for port in itertools.islice(_turns, LAST - FIRST):
        if _is_free(port) and _is_ours(port):
            return port
    raise OSError(f"no port is free from {FIRST} to {LAST}")


def _is_free(port):
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _is_ours(port):
    """One byte of the file stands for one port; the kernel lets go of them when the process ends."""
    try:
        fcntl.lockf(_locks[0], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True
