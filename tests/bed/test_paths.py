"""Two closed sites: no job reaches the gateway directly; one leaves by ssh to a bridge, the other by a proxy."""

import shlex
import subprocess
import sys

import pytest

from tests.bed.federation import USERS

CLOSED = """
table inet ftclosed {
  chain forward_closed { type filter hook forward priority -1; iifname "eth1" oifname "eth0" counter drop
  }
}
"""
PROXY_PORT, PASSWORD = 3128, "a-proxy-password-that-must-not-leak"
CONNECT_PROXY_OF_THE_TEST = """
import asyncio, base64, sys
token = base64.b64encode(("fabric:" + sys.argv[3]).encode()).decode()
async def carry(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def serve(reader, writer):
    head = (await reader.readuntil(b"\\r\\n\\r\\n")).decode()
    if "Basic " + token not in head:
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\\r\\n\\r\\n")
        writer.close()
        return
    host, port = head.split()[1].rsplit(":", 1)
    above, below = await asyncio.open_connection(host, int(port))
    writer.write(b"HTTP/1.1 200 OK\\r\\n\\r\\n")
    await asyncio.gather(carry(reader, below), carry(above, writer), return_exceptions=True)
async def main():
    async with await asyncio.start_server(serve, sys.argv[1], int(sys.argv[2])) as server:
        print("ready", flush=True)
        await server.serve_forever()
asyncio.run(main())
"""
MESH_PORT = 8483
"""Other federations of the session keep theirs."""
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 2)"


def proxy(bed):
    argv = [
        sys.executable, "-c", CONNECT_PROXY_OF_THE_TEST, bed.inner_address("b-login"), str(PROXY_PORT), PASSWORD,
    ]  # fmt: skip
    process = bed.machine("b-login").popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == "ready\n"
    return process


def stop(process):
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture(scope="module")
def closed(bed, make_federation):
    fed = make_federation("closed")
    for name in ("a-gw", "b-gw"):
        bed.machine(name).run(["nft", CLOSED])
    bridge = f"{sys.executable} -m fabrictool.mesh.transport.bridge {fed.gateway}:{MESH_PORT}"
    line = shlex.quote(f'command="{bridge}",restrict ')
    keys = f"(printf %s {line}; cat .ssh/fabric.pub) >> .ssh/authorized_keys"
    key = f"ssh-keygen -qt ed25519 -N '' -f .ssh/fabric && {keys}"
    bed.machine("a-login").run(["sh", "-c", key], user=USERS["a"])
    bed.machine("b-login").run(["sh", "-c", f"umask 077 && echo {PASSWORD} > proxy-password"], user=USERS["b"])
    process = proxy(bed)
    by_ssh = {
        "host": bed.inner_address("a-login"),
        "user": USERS["a"],
        "identity": "~/.ssh/fabric",
        "host_keys": bed.host_keys("a-login"),
    }
    by_proxy = {
        "address": f"{bed.inner_address('b-login')}:{PROXY_PORT}",
        "user": "fabric",
        "password": "secret://file/~/proxy-password",
    }
    cpu = {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}
    clusters = {
        "a": fed.cluster("a", {"normal": cpu | {"walltime": "60m"}}, egress={"ssh": by_ssh}),
        "b": fed.cluster("b", {"normal": cpu | {"walltime": "60m"}}, egress={"proxy": by_proxy}),
        "ing": fed.cluster("ing", {"cpu": cpu}, kind="ssh"),
    }
    pins = [{"cluster": name, "replicas": 1} for name in ("a", "b")]
    model = {"replicas": {"min": 2, "max": 2}, "place": {"pin": pins}}
    fed.write(clusters, {"tiny": model}, client_port=8051, mesh_port=MESH_PORT)
    fed.up()
    fed.proxy = process
    yield fed
    stop(fed.proxy)
    for name in ("a-gw", "b-gw"):
        bed.machine(name).run(["nft", "delete table inet ftclosed"])


def answer_of(fed, site):
    return fed.ask("tiny", **{"x-fabric-providers": f"p-{site}"})[0]


@pytest.mark.parametrize("node", ["a-n1", "b-n1"])
def test_no_node_reaches_the_gateway_directly(bed, closed, node):
    argv = [sys.executable, "-c", REACH, closed.gateway, str(MESH_PORT)]
    assert bed.machine(node).run(argv, check=False).returncode != 0


@pytest.mark.parametrize("site", ["a", "b"])
def test_replicas_of_closed_sites_answer(closed, site):
    assert answer_of(closed, site) == "200"


def test_a_path_that_broke_comes_back_by_itself(bed, closed):
    stop(closed.proxy)
    closed.wait("the replica behind the proxy is gone", lambda: answer_of(closed, "b") == "503")
    assert answer_of(closed, "a") == "200"
    closed.proxy = proxy(bed)
    closed.wait("the replica behind the proxy answers again", lambda: answer_of(closed, "b") == "200", within_s=90)


def test_the_proxys_password_is_in_no_file_of_the_fabric(bed, closed):
    closed.run("plan", "-o", "saved.plan")
    files = [path for path in closed.folder.rglob("*") if path.is_file()]
    assert [path for path in files if PASSWORD.encode() in path.read_bytes()] == []
    assert PASSWORD not in bed.machine("b-n1").run(["ps", "-eo", "args"]).stdout
