"""What may pass from a tunnel to an engine, and in which words."""

import pytest

from fabrictool.agent.forwarder import EngineSide, allowed, request_head
from fabrictool.agent.supervisor import samples
from fabrictool.engines.paths import MODEL_PATHS
from fabrictool.mesh.framing import StreamHead


def head(path="/v1/completions", method="POST", headers=(), length=3):
    return StreamHead(b"s" * 16, method, path, headers, length)


@pytest.mark.parametrize("path", [*sorted(MODEL_PATHS), "/v1/completions?x=1"])
def test_what_a_gateway_offers_passes(path):
    assert allowed(head(path))


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/sleep",
        "/v1/../sleep",
        "/collective_rpc",
        "//v1/x",
        "/v1",
        "/v1/models",
        "/v1/load_lora_adapter",
        "/v1/completions?x=\xff",
        "/v1/x\r\nhost: y",
        "/v1/ x",
        "http://h/v1/",
    ],
)
def test_admin_routes_and_tricks_do_not(path):
    assert not allowed(head(path))


def test_other_methods_do_not():
    assert not allowed(head(method="DELETE"))
    assert not allowed(head(method="GET"))
    assert not allowed(head(method="POST /x HTTP/1.1\r\n"))


def test_hop_by_hop_headers_keys_and_injections_are_dropped():
    headers = (
        ("content-type", "application/json"),
        ("Authorization", "Bearer secret"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Length", "99"),
        ("host", "evil"),
        ("x-a", "1\r\nx-b: 2"),
        ("x-c: y\r\nx-d", "3"),
        ("x-request-id", "r1"),
    )
    text = request_head(head(headers=headers, length=3)).decode()
    assert text == (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 3\r\n"
        "content-type: application/json\r\nx-request-id: r1\r\n\r\n"
    )


def test_prometheus_text_is_summed_over_labels():
    text = '# HELP a b\na{x="1"} 2\na{x="2"} 3\nb 1.5\nbroken\nc NaNx\n'
    assert samples(text) == {"a": 5.0, "b": 1.5}


class FakeStream:
    def __init__(self):
        self.calls = []

    def write_eof(self):
        self.calls.append("end")

    def close(self):
        self.calls.append("reset")


@pytest.mark.parametrize(("error", "told"), [(None, "end"), (ConnectionResetError(), "reset")])
def test_an_engine_that_breaks_off_is_no_end_of_a_body(error, told):
    stream = FakeStream()
    EngineSide(stream).connection_lost(error)
    assert stream.calls == [told]
