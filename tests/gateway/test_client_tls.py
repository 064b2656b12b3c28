"""TLS for clients: files on the gateway's host, taken over when they are replaced."""

import asyncio
import datetime as dt
import ssl

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from fabrictool.base.errors import FabrictoolError
from fabrictool.gateway.clienttls import LOOK_S, ClientTls
from fabrictool.gateway.staticlist import StaticNode
from tests.gateway.conftest import FakeEngine, until

pytestmark = pytest.mark.asyncio


def certificate(folder, name="localhost"):
    """A new one in the two files, as whoever renews certificates would write it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    for file, content in (
        ("cert.pem", made.public_bytes(pem)),
        ("key.pem", key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())),
    ):
        (folder / f"{file}.new").write_bytes(content)
        (folder / f"{file}.new").replace(folder / file)
    return made.serial_number


def files(folder):
    return str(folder / "cert.pem"), str(folder / "key.pem")


async def test_clients_speak_tls_and_a_renewed_certificate_is_taken_over(make_bed, tmp_path):
    first = certificate(tmp_path)
    bed, engine = make_bed(), FakeEngine("x")
    await engine.start()
    bed.tls = ClientTls(*files(tmp_path))
    await bed.start(nodes=[StaticNode(engine.url, ["m"], "alpha")])
    assert bed.gateway.status().url == f"https://{bed.gateway.listen_address}"

    async def ask():
        context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        async with (
            aiohttp.ClientSession(headers={"authorization": f"Bearer {bed.KEY}"}) as http,
            http.post(
                f"https://localhost:{bed.port}/v1/chat/completions",
                json={"model": "m", "stream": True},
                ssl=context,
            ) as answer,
        ):
            assert answer.status == 200
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        _, writer = await asyncio.open_connection("localhost", bed.port, ssl=context)
        peer = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        await writer.wait_closed()
        return x509.load_der_x509_certificate(peer).serial_number

    assert await ask() == first
    second = certificate(tmp_path)
    bed.clock.advance(LOOK_S + 1)
    await until(lambda: any(event.kind == "client-certificate" for event in bed.gateway.status().events))
    assert await ask() == second
    await engine.stop()
    await bed.stop()


async def test_files_that_are_wrong_are_said_and_the_old_ones_stay(tmp_path):
    certificate(tmp_path)
    tls = ClientTls(*files(tmp_path))
    assert tls.look() == ""
    old = (tmp_path / "key.pem").read_bytes()
    certificate(tmp_path)
    (tmp_path / "key.pem").write_bytes(old)
    assert "do not belong together" in tls.look()
    assert tls.look() == "", "said once"
    (tmp_path / "cert.pem").unlink()
    assert "the new certificate is not used" in tls.look()
    with pytest.raises(FabrictoolError) as refused:
        ClientTls(*files(tmp_path))
    assert refused.value.problems[0].code == "FT8006"
