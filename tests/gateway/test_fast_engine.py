"""An engine that talks as fast as it can, in a process of its own, and clients that do not listen."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.ports import free_port

READERS, MOST_EACH_KB = 16, 2048
"""A client that does not read may cost what lies in the kernel and a transport's buffer; a turn of uvloop's reading
took 7 MB when nothing ended it."""
ENGINE = """
import socket, threading
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
listener.bind(("127.0.0.1", 0))
listener.listen(64)
print(listener.getsockname()[1], flush=True)
event = b"data: " + b"x" * 1000 + b"\\n\\n"
many = (b"%x\\r\\n%b\\r\\n" % (len(event), event)) * 4000
def talk(plug):
    head = b""
    while b"\\r\\n\\r\\n" not in head:
        head += plug.recv(65536)
    plug.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-type: text/event-stream\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n")
    for _ in range(10):
        plug.sendall(many)
while True:
    threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()
"""


def memory_kb(process):
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def test_a_client_that_does_not_listen_costs_no_more_than_its_buffers(tmp_path):
    engine = subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True)
    node = {"url": f"http://127.0.0.1:{engine.stdout.readline().strip()}", "models": ["m"], "provider": "p"}
    (tmp_path / "nodes.json").write_text(json.dumps({"nodes": [node]}))
    port = free_port()
    command = [sys.executable, "-m", "fabrictool.cli.main", "gateway", "run", "--listen", f"127.0.0.1:{port}"]
    gateway = subprocess.Popen([*command, "--registry", tmp_path / "nodes.json"], stderr=subprocess.PIPE, text=True)
    plugs = []
    try:
        while "serving" not in gateway.stderr.readline():
            assert gateway.poll() is None
        before = memory_kb(gateway)
        body = b'{"model": "m", "messages": [], "stream": true}'
        for _ in range(READERS):
            plug = socket.socket()
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            plug.connect(("127.0.0.1", port))
            plug.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            plugs.append(plug)
        for plug in plugs:
            plug.settimeout(30)
            assert plug.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200", "its answer has begun"
        time.sleep(2.0)  # in which the engine says all that anybody takes
        assert memory_kb(gateway) - before < READERS * MOST_EACH_KB
    finally:
        for plug in plugs:
            plug.close()
        for process in (gateway, engine):
            process.kill()
            process.wait()
            (process.stdout or process.stderr).close()
