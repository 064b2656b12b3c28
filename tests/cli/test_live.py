"""A gateway that wants a key, asked by `status --url` and by `top`."""

import http.server
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.cli import watching
from fabrictool.cli.live import LiveStatus, key_of
from fabrictool.cli.main import main
from fabrictool.cli.watching import _gateway_lines
from fabrictool.domain.observed import ClusterFacts, Observed, ObservedUnit
from fabrictool.status.client import StatusUnavailableError
from fabrictool.status.documents import GatewayStatus, Totals, encode
from tests.tui.test_top import gateway

KEY = "ftk_a-key-that-opens"


@pytest.fixture
def url():
    """Of a server that shows a gateway's status to whoever has the key."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.headers.get("authorization") == f"Bearer {KEY}"
            body = encode(gateway()) if known else b"{}"
            self.send_response(200 if known else 401)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_status_says_that_a_key_is_wanted_and_takes_one_by_reference(url, monkeypatch, capsys):
    assert main(["status", "--url", url]) == 69
    said = capsys.readouterr().err
    assert "it asks for a key" in said
    assert "--key secret://env/NAME" in said
    monkeypatch.setenv("GATEWAY_KEY", "wrong-key-wrong-key")
    assert main(["status", "--url", url, "--key", "secret://env/GATEWAY_KEY"]) == 69
    assert "the key is not accepted" in capsys.readouterr().err
    monkeypatch.setenv("GATEWAY_KEY", KEY)
    assert main(["status", "--url", url, "--key", "secret://env/GATEWAY_KEY"]) == 0
    assert "llama" in capsys.readouterr().out


def test_a_key_itself_is_refused_on_the_command_line(url, capsys):
    assert main(["status", "--url", url, "--key", KEY]) == 64
    said = capsys.readouterr().err
    assert "--key takes a reference" in said
    assert KEY not in said
    assert main(["status", "--key", "secret://env/X"]) == 64  # of no use without --url


def test_top_asks_with_the_key(url):
    with LiveStatus(None, url, "") as ask, pytest.raises(FabrictoolError, match="FT5201"):
        ask()
    with LiveStatus(None, url, KEY) as ask:
        assert ask().fabric == "swiss-ai"
    assert key_of("") == ""


def test_percentiles_of_few_samples_say_of_how_many():
    rows = "\n".join(_gateway_lines(gateway(), {})).splitlines()
    assert "612 ms (n=3)" in next(row for row in rows if row.startswith("llama"))
    assert "n=" not in next(row for row in rows if row.startswith("qwen"))


def test_a_gateway_that_does_not_answer_is_no_reason_to_ask_no_other(monkeypatch):
    """Two run; the first is stuck."""
    asked = []

    def fetch(url, **_):
        asked.append(url)
        if url == "http://east":
            raise StatusUnavailableError.of("FT5201", "no answer")
        nothing = {"nodes": [], "models": [], "totals": Totals(), "registry_records": 0, "registry_root": ""}
        return GatewayStatus(
            release="",
            at=0.0,
            started_at=0.0,
            fabric="t",
            session="",
            listen=listen[url],
            mesh="",
            policy="",
            **nothing,
        )

    monkeypatch.setattr(watching, "fetch", fetch)
    units = [
        ObservedUnit(address=f"gateway/{name}", operation=name, state=state, spec_digest="")
        for name, state in (("west", "running"), ("north", "pending"), ("east", "running"))
    ]
    seen = Observed(clusters={"c": ClusterFacts(cluster="c", known=True, units=tuple(units))})
    cluster = SimpleNamespace(page=lambda operation: nullcontext(f"http://{operation}"))
    fabric = SimpleNamespace(observe=lambda: seen, clusters={"c": cluster})
    source = SimpleNamespace(fabric=lambda: nullcontext(fabric))
    listen = {"http://west": "127.0.0.1:1"}
    with watching.gateway_url(source) as url:
        assert url == "http://west"
    assert asked == ["http://east", "http://west"]
    asked.clear()
    listen = {"http://west": ""}
    with watching.gateway_url(source) as url:
        assert url == "http://west", "a hub, where there is nothing better"
    assert asked == ["http://east", "http://west"] * 2
