"""A certificate that renews itself: certbot, a real ACME server (Caddy's), and a gateway that sees the files change.

As docs/how-to/serve-over-tls.md has it; as root, for the server asks port 80 of the name.
"""

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from fabrictool.gateway.clienttls import LOOK_S, ClientTls
from fabrictool.gateway.staticlist import StaticNode
from tests.gateway.conftest import Bed, until
from tests.ports import free_port

HERE = Path(__file__).parent / "acme"
BUILD = Path(__file__).parents[2] / "build" / "acme"
CERTBOT, CADDY = BUILD / "bin" / "certbot", BUILD / "bin" / "caddy"
pytestmark = [pytest.mark.asyncio, pytest.mark.extended, pytest.mark.timeout(600)]


def install():
    """Both, in an environment of their own, once."""
    locked = HERE / "requirements.txt"
    ready = BUILD / ".ready"
    if not ready.exists() or ready.read_text() != locked.read_text():
        subprocess.run([sys.executable, "-m", "venv", "--clear", BUILD], check=True)
        pip = [BUILD / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "-r", locked]
        subprocess.run(pip, check=True)
        ready.write_text(locked.read_text())


@contextlib.contextmanager
def authority(folder):
    """The address of its directory, and the certificate by which it is trusted."""
    ports = {"HTTP_PORT": str(free_port()), "HTTPS_PORT": str(free_port())}
    home = {"HOME": str(folder), "XDG_DATA_HOME": str(folder / "data"), "XDG_CONFIG_HOME": str(folder / "config")}
    log = (folder / "caddy.log").open("wb")
    command = [CADDY, "run", "--config", HERE / "Caddyfile", "--adapter", "caddyfile"]
    process = subprocess.Popen(command, env=os.environ | ports | home, stdout=log, stderr=log)
    try:
        directory = f"https://localhost:{ports['HTTPS_PORT']}/acme/local/directory"
        yield directory, folder / "data/caddy/pki/authorities/local"
    finally:
        process.kill()
        process.wait()
        log.close()


async def certbot(folder, directory, root, *words):
    places = [f"--{name}-dir={folder / 'certbot' / name}" for name in ("config", "work", "logs")]
    usual = ["-n", "--agree-tos", "--register-unsafely-without-email", f"--server={directory}", *places]
    where = ["--http-01-port=80", "--http-01-address=127.0.0.1"]
    process = await asyncio.create_subprocess_exec(
        CERTBOT, *words, *usual, *where, env=os.environ | {"REQUESTS_CA_BUNDLE": str(root)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    text, _ = await process.communicate()
    assert process.returncode == 0, text.decode()


async def serial(bed, root):
    """Of the certificate that a new client is shown; it checks who signed it."""
    context = ssl.create_default_context(cafile=root)
    _, writer = await asyncio.open_connection(bed.host, bed.port, ssl=context)
    number = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    await writer.wait_closed()
    return number


@pytest.mark.skipif(os.geteuid() != 0, reason="port 80 is root's")
async def test_a_certificate_is_renewed_under_a_gateway_that_serves(tmp_path):
    install()
    with authority(tmp_path) as (directory, pki):
        await until((pki / "root.crt").exists, 60)
        root = pki / "root.crt"
        wanted = ["--standalone", "--ip-address=127.0.0.1", "--preferred-profile=shortlived"]
        await certbot(tmp_path, directory, root, "certonly", *wanted)
        (live,) = [path for path in (tmp_path / "certbot/config/live").iterdir() if path.is_dir()]
        bed = Bed()
        bed.tls = ClientTls(str(live / "fullchain.pem"), str(live / "privkey.pem"))
        await bed.start(nodes=[StaticNode("http://127.0.0.1:9", ["m"], "alpha")])
        try:
            first = await serial(bed, root)
            async with aiohttp.ClientSession() as http:
                context = ssl.create_default_context(cafile=root)
                url = f"https://{bed.host}:{bed.port}/health"
                async with http.get(url, ssl=context) as answer:
                    assert answer.status == 200
                await certbot(tmp_path, directory, root, "renew", "--force-renewal", "--no-random-sleep-on-renew")
                bed.clock.advance(LOOK_S + 1)
                await until(lambda: any(e.kind == "client-certificate" for e in bed.gateway.status().events))
                assert await serial(bed, root) != first
                async with http.get(url, ssl=context) as answer:
                    assert answer.status == 200, "the connection that was open stays"
        finally:
            await bed.stop()
