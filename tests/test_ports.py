"""What `free_port` gives is given once, in whatever process one asks."""

import socket
import subprocess
import sys

from tests import ports

ASK = """
import sys
from tests.ports import free_port
print(*(free_port() for _ in range(200)), flush=True)
sys.stdin.read()
"""


def test_no_port_is_given_twice():
    askers = [
        subprocess.Popen([sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    try:
        ports = [port for asker in askers for port in asker.stdout.readline().split()]
    finally:
        for asker in askers:
            asker.communicate(timeout=20)
    assert len(set(ports)) == len(ports) == 8 * 200


def test_a_port_in_use_is_not_given(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(ports, "_turns", iter([taken.getsockname()[1], port := ports.free_port()]))
        assert ports.free_port() == port
