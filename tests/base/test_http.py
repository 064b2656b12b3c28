"""The client beside real servers: what it follows, what it trusts, and which way it takes."""

import datetime as dt
import ipaddress
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fabrictool.base import http
from fabrictool.base.errors import FabrictoolError
from fabrictool.base.http import NoAnswerError, UnsendableError, ask
from fabrictool.status.client import fetch

PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "all_proxy")


class Server:
    """Answers as its `pages` say: path → (status, headers, body); it is its own proxy, too."""

    def __init__(self, context=None):
        self.pages = {"/": (200, {"ETag": '"7"'}, b"hello")}
        self.seen = []
        self.silent = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        if context is not None:
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.port = self._http.server_port
        self.url = f"{'http' if context is None else 'https'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self):
        self.silent.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def _handler(server):  # noqa: N805 - the handler below has the other self
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.seen.append((self.path, dict(self.headers)))
                if self.path == "/silent":
                    server.silent.wait()
                    return
                status, headers, body = server.pages.get(self.path, (200, {}, b"from afar"))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        return Handler


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def no_proxies_of_ours(monkeypatch):
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


def get(address, **options):
    return ask("GET", address, headers=options.pop("headers", {}), timeout_s=options.pop("timeout_s", 20.0), **options)


def test_an_answer_is_status_body_and_tag(server):
    assert get(server.url) == http.HttpResponse(200, "OK", b"hello", '"7"')
    server.pages["/teapot"] = (418, {}, b"short and stout")
    assert get(f"{server.url}/teapot").status == 418


def test_redirects_are_answers_unless_they_may_be_followed(server):
    server.pages["/moved"] = (302, {"Location": "/"}, b"")
    server.pages["/loop"] = (302, {"Location": "/loop"}, b"")
    assert get(f"{server.url}/moved").status == 302
    assert get(f"{server.url}/moved", redirects=1).body == b"hello"
    server.seen.clear()
    assert get(f"{server.url}/loop", redirects=3).status == 302
    assert len(server.seen) == 4


def test_a_key_for_a_status_page_does_not_follow_a_redirect(server):
    server.pages["/status"] = (302, {"Location": "/elsewhere"}, b"")
    with pytest.raises(FabrictoolError, match="HTTP 302") as error:
        fetch(server.url, key="planted-key")
    assert error.value.problems[0].code == "FT5201"
    assert [path for path, _ in server.seen] == ["/status"]
    with pytest.raises(FabrictoolError, match="not a status document"):
        fetch(server.url)
    assert [path for path, _ in server.seen] == ["/status", "/status", "/elsewhere"]


def test_no_more_is_read_than_the_limit(server, monkeypatch):
    monkeypatch.setattr(http, "MAX_OCTETS", 2**20)
    server.pages["/all"] = (200, {}, b"x" * 2**20)
    server.pages["/more"] = (200, {}, b"x" * (2**20 + 1))
    assert len(get(f"{server.url}/all").body) == 2**20
    with pytest.raises(NoAnswerError, match="longer than 1 MiB"):
        get(f"{server.url}/more")


def test_a_server_that_says_nothing_is_given_up(server):
    with pytest.raises(NoAnswerError, match="timed out"):
        get(f"{server.url}/silent", timeout_s=0.2)


@pytest.mark.parametrize("value", ["two\r\nlines", "caf\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_what_no_header_can_have_is_not_repeated(server, value):
    with pytest.raises(UnsendableError) as error:
        get(server.url, headers={"Authorization": value})
    assert value[:3] not in str(error.value)
    assert server.seen == []


def test_the_environments_proxy_is_asked_but_never_for_this_machine(server, monkeypatch):
    monkeypatch.setenv("http_proxy", f"127.0.0.1:{server.port}")
    assert get("http://far.invalid/state").body == b"from afar"
    assert [path for path, _ in server.seen] == ["http://far.invalid/state"]
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert get(server.url).body == b"hello"
    assert get(f"http://localhost:{server.port}").body == b"hello"
    with pytest.raises(NoAnswerError):
        get("http://far.invalid/state")


def test_no_proxy_and_direct_pass_the_proxy_by(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url)
    with pytest.raises(NoAnswerError):
        get("http://far.invalid/state", direct=True)
    monkeypatch.setenv("no_proxy", ".invalid")
    with pytest.raises(NoAnswerError):
        get("http://far.invalid/state")
    assert server.seen == []


def test_a_proxy_of_an_unknown_kind_is_named(monkeypatch):
    monkeypatch.setenv("http_proxy", "gopher://127.0.0.1:70")
    with pytest.raises(NoAnswerError, match=r"proxy.*gopher"):
        get("http://far.invalid/state")


def test_tls_trusts_what_ssl_cert_file_names(tmp_path, monkeypatch):
    authority = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority, tmp_path / "key.pem")
    server = Server(context)
    try:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(NoAnswerError, match="signed by no authority that is trusted here"):
            get(server.url)
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        assert get(server.url).body == b"hello"
    finally:
        server.close()


def self_signed(folder):
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    path = folder / "certificate.pem"
    path.write_bytes(certificate.public_bytes(pem))
    return path
