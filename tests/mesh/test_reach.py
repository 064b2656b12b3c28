"""Agents reach a hub by every path, over real sockets and TLS: a CONNECT proxy of the test's own, a real sshd."""

import asyncio
import base64
import os
import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest
import pytest_asyncio

import fabrictool
from fabrictool.domain.specs import EgressSpec, ProxySpec, SshHostSpec
from fabrictool.mesh.framing import STREAM_CREDIT, StreamHead
from fabrictool.mesh.transport import reach
from fabrictool.mesh.transport.bridge import READY
from tests.clusters.connections.conftest import _sshd, yard  # noqa: F401 - fixtures
from tests.clusters.connections.servers import public
from tests.mesh.test_transport import Collect, Echo, until
from tests.ports import free_port

pytestmark = pytest.mark.asyncio
NOWHERE = "127.0.0.254"
"""An address of this machine where no hub listens: what is refused there gets to the hub by a proxy or by ssh only."""


class ConnectProxyOfTheTest:
    """Connects where it is asked to; `answer` replaces its first answer, `hub` what it really connects to."""

    def __init__(self, hub):
        self.hub, self.answer, self.password, self.requests, self.writers = hub, None, None, [], []

    async def start(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def serve(self, reader, writer):
        self.writers.append(writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.requests.append(head.split("\r\n")[0])
        token = base64.b64encode(f"me:{self.password}".encode()).decode()
        if self.answer is not None:
            writer.write(self.answer)
            return
        if self.password is not None and f"Basic {token}" not in head:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            return
        above, below = await asyncio.open_connection("127.0.0.1", self.hub)
        self.writers.append(below)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(self.carry(reader, below), self.carry(above, writer))

    async def carry(self, reader, writer):
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    def cut(self):
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()

    async def stop(self):
        self.server.close()
        self.cut()
        await asyncio.sleep(0)

    def spec(self, **changes):
        return EgressSpec(proxy=ProxySpec(host="127.0.0.1", port=self.port, **changes))


@pytest.fixture(autouse=True)
def no_proxy_of_this_machine(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest_asyncio.fixture
async def hub(federation):
    node, _ = federation.node("hub", role="gateway")
    node.port = await node.listen("127.0.0.1", 0)
    yield node
    await node.close()


@pytest_asyncio.fixture
async def agent(federation):
    node, listener = federation.node("a")
    listener.accept = lambda stream, head, peer: Echo()
    yield node
    await node.close()


@pytest_asyncio.fixture
async def proxy(hub):
    server = await ConnectProxyOfTheTest(hub.port).start()
    yield server
    await server.stop()


def dialled(agent, hub, egress):
    """By a wrong address, so that the direct path is refused; returns the route."""
    agent.dial([(NOWHERE, hub.port)], egress)
    return agent.hub_links.routes[f"{NOWHERE}:{hub.port}"]


async def carries_both_ways(agent, hub):
    payload, sink = os.urandom(STREAM_CREDIT * 2), Collect()
    stream = hub.tunnel(agent.session).open_stream(StreamHead(b"s" * 16, "POST", "/v1/x", (), len(payload)), sink)
    stream.write(payload)
    stream.write_eof()
    await asyncio.wait_for(sink.ended, 20)
    assert bytes(sink.data) == payload


async def joined(agent, hub):
    await until(lambda: agent.neighbours and hub.neighbours, 30)


# -- proxies --------------------------------------------------------------------------------------------------------


async def test_a_proxy_is_used_where_the_direct_path_is_refused(agent, hub, proxy):
    route = dialled(agent, hub, proxy.spec())
    await joined(agent, hub)
    assert route.used == "proxy"
    assert list(route.failures) == ["direct"]
    assert agent.hub_links.errors == {}
    assert proxy.requests == [f"CONNECT {NOWHERE}:{hub.port} HTTP/1.1"]
    await carries_both_ways(agent, hub)


async def test_the_direct_path_comes_first(agent, hub, proxy):
    agent.dial([("127.0.0.1", hub.port)], proxy.spec())
    await joined(agent, hub)
    assert agent.hub_links.routes[f"127.0.0.1:{hub.port}"].used == "direct"
    assert proxy.requests == []


async def test_the_environments_proxy_and_its_password(agent, hub, proxy, monkeypatch):
    proxy.password = "pass word"
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:pass%20word@127.0.0.1:{proxy.port}")
    agent.dial([(NOWHERE, hub.port)])
    await joined(agent, hub)


async def test_a_password_comes_from_a_file_that_nobody_else_reads(agent, hub, proxy, tmp_path):
    proxy.password, file = "hunter2", tmp_path / "password"
    file.write_text("hunter2\n")
    file.chmod(0o644)
    egress = proxy.spec(user="me", password=f"secret://file/{file}")
    address = f"{NOWHERE}:{hub.port}"
    dialled(agent, hub, egress)
    await until(lambda: "can be read by others" in agent.hub_links.errors.get(address, ""))
    file.chmod(0o600)
    await joined(agent, hub)


@pytest.mark.parametrize(("lasted", "begins_with"), [(0.0, "proxy"), (3600.0, "direct")])
async def test_a_path_that_dies_is_replaced_beginning_with_one_that_lasts(
    agent, hub, proxy, monkeypatch, lasted, begins_with
):
    """`lasted`: how long a connection has to, to count as one that lasts."""
    monkeypatch.setattr(reach, "STABLE_SECONDS", lasted)
    route = dialled(agent, hub, proxy.spec())
    await joined(agent, hub)
    proxy.cut()
    await until(lambda: len(proxy.requests) == 2 and agent.neighbours)
    assert route.used == "proxy"
    assert list(route.failures) == (["direct"] if begins_with == "direct" else [])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "wants a user and a password"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "refuses connections"),
        (b"garbage\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 8000, "octets of headers"),
        (b"", "did not answer within"),
        (b"HTTP/1.1 200 OK\r\n\r\nSSH-2.0-x\r\n", "data of its own"),
    ],
    ids=["407", "403", "garbage", "huge", "silent", "talks-first"],
)
async def test_a_proxy_that_lets_nobody_through_is_named_beside_the_other_paths(
    agent, hub, proxy, monkeypatch, answer, words
):
    if not answer:
        monkeypatch.setattr(reach, "PATH_SECONDS", 1.0)
    proxy.answer = answer
    dialled(agent, hub, proxy.spec())
    address = f"{NOWHERE}:{hub.port}"
    await until(lambda: address in agent.hub_links.errors)
    error = agent.hub_links.errors[address]
    assert words in error
    assert words in agent.hub_links.routes[address].failures["proxy"]
    assert "direct: connection refused" in error
    assert hub.neighbours == []


async def test_a_proxy_that_leads_elsewhere_gains_nothing(agent, hub, proxy):
    """TLS runs inside: who cannot prove to be of the federation is refused, whatever the proxy says."""

    async def hello(reader, writer):
        await reader.read(1)
        writer.write(b"hello")
        writer.close()

    impostor = await asyncio.start_server(hello, "127.0.0.1", 0)
    proxy.hub = impostor.sockets[0].getsockname()[1]
    dialled(agent, hub, proxy.spec())
    address = f"{NOWHERE}:{hub.port}"
    await until(lambda: address in agent.hub_links.errors)
    assert "does not speak TLS" in agent.hub_links.errors[address]
    impostor.close()


# -- ssh ------------------------------------------------------------------------------------------------------------


def bridge_command(*hubs):
    """As it stands in authorized_keys; the account's Python need not have fabrictool installed."""
    folder = shlex.quote(str(Path(fabrictool.__file__).parent.parent))
    return f"PYTHONPATH={folder} {sys.executable} -m fabrictool.mesh.transport.bridge {' '.join(hubs)}"


def only(server, yard, command):  # noqa: F811 - the fixture's value
    """The key may run nothing but this."""
    quoted = command.replace('"', '\\"')
    (server.folder / "authorized").write_text(f'command="{quoted}",restrict {public(yard.key)}\n')


def ssh_to(server, yard, **changes):  # noqa: F811 - the fixture's value
    values = {
        "host": "127.0.0.1",
        "port": server.port,
        "user": server.endpoint().user,
        "identity": str(yard.key),
        "host_keys": (public(server.host_key),),
    }
    return SshHostSpec(**values | changes)


def banner_and_bridge(hub):
    return f"echo Welcome to the site; {bridge_command(f'127.0.0.1:{hub.port}')}"


def socat(hub):
    """As docs/how-to/leave-a-closed-site.md has it."""
    if shutil.which("socat") is None:
        pytest.skip("socat is not installed: the line of the how-to page with it is NOT tested here")
    return rf"printf 'fabrictool-bridge 1\n'; exec socat - TCP:127.0.0.1:{hub.port}"


@pytest.mark.usefixtures("firewall")
@pytest.mark.parametrize("command", [banner_and_bridge, socat])
async def test_a_key_that_may_only_run_the_bridge_leads_to_the_hub(agent, hub, yard, command):  # noqa: F811
    server = yard.server()
    only(server, yard, command(hub))
    agent.dial([("127.0.0.1", hub.port)], EgressSpec(ssh=ssh_to(server, yard)))
    await joined(agent, hub)
    route = agent.hub_links.routes[f"127.0.0.1:{hub.port}"]
    assert (route.used, list(route.failures)) == ("ssh", ["direct"])
    await carries_both_ways(agent, hub)
    server.cut()
    await until(lambda: not hub.neighbours)
    await joined(agent, hub)
    assert route.used == "ssh"


@pytest.mark.usefixtures("firewall")
async def test_a_login_node_that_forwards_leads_to_the_hub(agent, hub, yard):  # noqa: F811
    server = yard.server()
    agent.dial([("127.0.0.1", hub.port)], EgressSpec(login=ssh_to(server, yard)))
    await joined(agent, hub)
    assert agent.hub_links.routes[f"127.0.0.1:{hub.port}"].used == "login"
    await carries_both_ways(agent, hub)
    await agent.close()
    await until(lambda: not server.sessions(), 10)


@pytest.fixture
def firewall(hub, monkeypatch):
    """Refuses the agent's own connections to the hub, not those of ssh."""
    connect = reach._tcp

    async def blocked(host, port):
        if port == hub.port:
            raise ConnectionRefusedError("blocked by the test")
        return await connect(host, port)

    monkeypatch.setattr(reach, "_tcp", blocked)


def wrong_host(server, yard):  # noqa: F811 - the fixture's value
    return {"ssh": ssh_to(server, yard, host_keys=(public(yard.key),))}


def wrong_key(server, yard):  # noqa: F811 - the fixture's value
    return {"ssh": ssh_to(server, yard, identity=str(yard.host_ca))}


def talks(server, yard):  # noqa: F811 - the fixture's value
    only(server, yard, "cat /dev/zero")
    return {"ssh": ssh_to(server, yard)}


def other_hub(server, yard):  # noqa: F811 - the fixture's value
    only(server, yard, bridge_command("127.0.0.1:1"))
    return {"ssh": ssh_to(server, yard)}


def dead(server, yard):  # noqa: F811 - the fixture's value
    return {"ssh": ssh_to(server, yard, port=free_port())}


def nothing_forwarded(server, yard):  # noqa: F811 - the fixture's value
    only(server, yard, "true")
    return {"login": ssh_to(server, yard)}


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (wrong_host, "its host key is not one that the inventory pins"),
        (wrong_key, "it does not accept the key"),
        (talks, "the bridge did not answer"),
        (other_hub, "only these may be reached: 127.0.0.1:1"),
        (dead, "refused"),
        (nothing_forwarded, "does not connect us to"),
    ],
)
async def test_why_ssh_leads_nowhere_is_said(agent, hub, yard, prepare, words):  # noqa: F811
    egress = EgressSpec(**prepare(yard.server(), yard))
    dialled(agent, hub, egress)
    address = f"{NOWHERE}:{hub.port}"
    await until(lambda: address in agent.hub_links.errors, 30)
    assert words in agent.hub_links.errors[address]
    assert hub.neighbours == []


async def test_a_node_without_ssh_says_so(agent, hub, yard, monkeypatch):  # noqa: F811
    server = yard.server()
    monkeypatch.setenv("PATH", "/nowhere")
    dialled(agent, hub, EgressSpec(login=ssh_to(server, yard)))
    address = f"{NOWHERE}:{hub.port}"
    await until(lambda: "ssh is not installed on this node" in agent.hub_links.errors.get(address, ""))


# -- the bridge itself ------------------------------------------------------------------------------------------------


async def bridged(*arguments, asked=""):
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fabrictool.mesh.transport.bridge", *arguments,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"SSH_ORIGINAL_COMMAND": asked},
    )  # fmt: skip


@pytest.mark.parametrize("first", ["client", "hub"])
async def test_a_bridge_carries_both_ways_and_ends_with_either_end(first):
    seen, gone = asyncio.get_running_loop().create_future(), asyncio.Event()

    async def echo(reader, writer):
        writer.write(await reader.readexactly(5))
        if first == "hub":
            writer.close()
        seen.set_result(await reader.read())
        writer.close()
        gone.set()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    process = await bridged(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    process.stdin.write(b"hello")
    assert await process.stdout.readexactly(len(READY) + 5) == READY + b"hello"
    if first == "client":
        process.stdin.close()
        assert await asyncio.wait_for(seen, 10) == b""
    assert await asyncio.wait_for(process.wait(), 10) == 0
    await asyncio.wait_for(gone.wait(), 10)
    process.stdin.close()
    server.close()


@pytest.mark.parametrize(
    ("arguments", "asked", "code", "words"),
    [
        ([], "", 64, "usage:"),
        (["127.0.0.1:1"], "", 1, "cannot reach 127.0.0.1:1"),
        (["127.0.0.1:1"], "fabrictool-bridge 127.0.0.1:22", 1, "only these may be reached: 127.0.0.1:1"),
        (["nonsense"], "", 1, "cannot reach nonsense"),
    ],
)
async def test_a_bridge_that_leads_nowhere_says_why(arguments, asked, code, words):
    process = await bridged(*arguments, asked=asked)
    out, err = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, out) == (code, b"")
    assert words in err.decode()
    assert "Traceback" not in err.decode()


async def test_a_dial_that_is_given_up_takes_no_socket_with_it(federation):
    """The number of the socket that it closed belonged to the next one, which was then never read."""
    hub, _ = federation.node("hub", role="gateway")
    port = await hub.listen("127.0.0.1", 0)
    node, _ = federation.node("a")

    class GivenUp(asyncio.Protocol):
        """In the moment in which the handshake is over."""

        def connection_made(self, transport):
            dial.cancel()

    for _ in range(3):
        ours = await reach._tcp("127.0.0.1", port)
        dial = asyncio.create_task(reach._tls(ours, GivenUp, node._client_tls))
        del ours
        await asyncio.gather(dial, return_exceptions=True)
        assert dial.cancelled()
        pairs = [socket.socketpair() for _ in range(3)]
        for near, far in pairs:
            reader, writer = await asyncio.open_unix_connection(sock=near)
            far.send(b"to be read")
            assert await asyncio.wait_for(reader.readexactly(10), 5) == b"to be read"
            writer.close()
            await writer.wait_closed()
            far.close()
    await hub.close()
    await node.close()
