"""Which ways lead to a hub, and what proxies and ssh say, in words; no sockets."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabrictool.domain.specs import EgressSpec, HostPort, ProxySpec, SshHostSpec
from fabrictool.mesh.transport.bridge import READY, target
from fabrictool.mesh.transport.paths import (
    ANSWER_OCTETS,
    PathError,
    ProxyAnswer,
    Unusable,
    ViaProxy,
    ViaSsh,
    after_banner,
    excepted,
    paths_of,
    ssh_failure,
)

HUB = HostPort("hub.example.org", 8443)
PROXY = ViaProxy("proxy", 3128)
HOST = SshHostSpec(host="gate", user="fabric", identity="~/.ssh/hub", host_keys=("ssh-ed25519 AAAA",))
SSH, LOGIN = ViaSsh(HOST, "ssh"), ViaSsh(HOST, "login")


def kinds(egress=None, **environment):
    return [path.kind for path in paths_of(egress or EgressSpec(), environment, HUB)]


def test_the_order_is_direct_proxy_ssh_login():
    egress = EgressSpec(login=HOST, ssh=HOST, proxy=ProxySpec(host="p", port=1))
    assert kinds(egress) == ["direct", "proxy", "ssh", "login"]
    assert kinds() == ["direct"]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HTTPS_PROXY": "http://p:3128"}, ("p", 3128, "", "")),
        ({"https_proxy": "http://small:1", "HTTPS_PROXY": "http://large:2"}, ("small", 1, "", "")),
        ({"ALL_PROXY": "p:3128"}, ("p", 3128, "", "")),
        ({"HTTPS_PROXY": "http://u:p%40ss%3A@p:3128/"}, ("p", 3128, "u", "p@ss:")),
        ({"HTTPS_PROXY": "http://[::1]:3128"}, ("::1", 3128, "", "")),
        ({"HTTPS_PROXY": "http://p:3128", "NO_PROXY": "example.org"}, None),
        ({"HTTPS_PROXY": ""}, None),
    ],
)
def test_the_environments_proxy(environment, expected):
    proxies = [path for path in paths_of(EgressSpec(), environment, HUB) if path.kind == "proxy"]
    assert [(p.host, p.port, p.user, p.password) for p in proxies] == ([expected] if expected else [])


def test_the_inventory_counts_for_more_than_the_environment_and_its_exceptions():
    egress = EgressSpec(proxy=ProxySpec(host="site", port=8080))
    (_, proxy) = paths_of(egress, {"HTTPS_PROXY": "http://p:1", "NO_PROXY": "*"}, HUB)
    assert (proxy.host, proxy.port) == ("site", 8080)


@pytest.mark.parametrize("address", ["https://u:hunter2@p:1", "socks5://u:hunter2@p:1", "http://u:hunter2@p:x"])
def test_an_address_that_is_no_proxys_is_said_without_its_password(address):
    (_, unusable) = paths_of(EgressSpec(), {"HTTPS_PROXY": address}, HUB)
    assert isinstance(unusable, Unusable)
    assert "HTTPS_PROXY" in str(unusable.error)
    assert "hunter2" not in repr(unusable)


@pytest.mark.parametrize(
    ("no_proxy", "host", "expected"),
    [
        ("*", "hub.example.org", True),
        ("example.org", "hub.example.org", True),
        (".example.org", "hub.example.org", True),
        ("*.example.org", "hub.example.org", True),
        ("a, HUB.example.org", "hub.example.org", True),
        ("hub.example.org:8443", "hub.example.org", True),
        ("hub.example.org:443", "hub.example.org", False),
        ("ample.org", "hub.example.org", False),
        ("", "hub.example.org", False),
        (",, ,", "hub.example.org", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("fd00::/8", "fd00::1", True),
        ("[fd00::1]", "fd00::1", True),
    ],
)
def test_no_proxy(no_proxy, host, expected):
    assert excepted(no_proxy, HostPort(host, 8443)) is expected


def test_a_request_names_the_hub_and_proves_the_user():
    assert PROXY.request(HUB, "") == (b"CONNECT hub.example.org:8443 HTTP/1.1\r\nHost: hub.example.org:8443\r\n\r\n")
    assert b"CONNECT [::1]:1 HTTP" in PROXY.request(HostPort("::1", 1), "")
    known = ViaProxy("proxy", 3128, "me", "x")
    assert b"\r\nProxy-Authorization: Basic bWU6cGFzcw==\r\n" in known.request(HUB, "pass")
    assert "hunter2" not in repr(ViaProxy("proxy", 3128, "me", "hunter2"))


def answered(path, *pieces):
    answer = ProxyAnswer(path, HUB)
    return [answer.receive(piece) for piece in pieces]


def test_an_answer_in_any_pieces_lets_through():
    whole = b"HTTP/1.1 200 Connection established\r\nVia: x\r\n\r\n"
    assert answered(PROXY, whole) == [True]
    assert answered(PROXY, *(whole[i : i + 1] for i in range(len(whole))))[-1]


REFUSALS = [
    (PROXY, b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "wants a user and a password", "egress.proxy.user"),
    (ViaProxy("p", 1, "u"), b"HTTP/1.1 407 No\r\n\r\n", "does not accept the user", "check both"),
    (PROXY, b"HTTP/1.0 403 Forbidden\r\n\r\n", "refuses connections to hub.example.org:8443", "443 only"),
    (PROXY, b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "answers 502 Bad Gateway", "log"),
    (PROXY, b"HTTP/1.1 302 \x1b[31mred\r\n\r\n", "answers 302 [31mred", "log"),
    (PROXY, b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP", "port"),
    (PROXY, b"HTTP/1.1 what\r\n\r\n", "does not speak HTTP", "port"),
    (PROXY, b"HTTP/1.1\r\n\r\n", "does not speak HTTP", "port"),
    (PROXY, b"", "closed the connection", "allows"),
    (PROXY, b"HTTP/1.1 200 OK\r\n\r\nhello", "data of its own", "owner"),
    (PROXY, b"HTTP/1.1 200 OK\r\nX: " + b"x" * ANSWER_OCTETS, "octets of headers", "owner"),
]


@pytest.mark.parametrize(("path", "wire", "words", "hint"), REFUSALS)
def test_what_a_proxy_answers_is_said_in_words(path, wire, words, hint):
    with pytest.raises(PathError) as refused:
        answered(path, wire)
    (problem,) = refused.value.problems
    assert problem.code == "FT6206"
    assert words in problem.message
    assert "\x1b" not in problem.message
    assert hint in problem.hint


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=60), max_size=6), st.booleans())
def test_no_answer_raises_anything_else(pieces, proper):
    with contextlib.suppress(PathError):
        answered(PROXY, *([b"HTTP/1.1 "] if proper else []), *pieces)


def test_ssh_is_strict_and_its_arguments_hold_no_options_of_others():
    bridge, forwarded = SSH.argv(HUB, "k n"), LOGIN.argv(HUB, "k")
    for words in (bridge, forwarded):
        assert {"StrictHostKeyChecking=yes", "BatchMode=yes", "IdentitiesOnly=yes"} <= set(words)
        assert words[words.index("-F") + 1] == "none"
    assert bridge[-3:] == ["--", "gate", "fabrictool-bridge hub.example.org:8443"]
    assert 'UserKnownHostsFile="k n"' in bridge
    assert forwarded[-4:] == ["-W", "[hub.example.org]:8443", "--", "gate"]


def test_pins_become_known_hosts():
    keys = ("ssh-ed25519 AAAA", "@cert-authority ssh-rsa BBBB")
    path = ViaSsh(SshHostSpec(host="gate", user="u", host_keys=keys), "ssh")
    assert path.known_hosts() == "gate ssh-ed25519 AAAA\n@cert-authority gate ssh-rsa BBBB\n"


@pytest.mark.parametrize(
    ("log", "words", "hint"),
    [
        ("No ED25519 host key is known for gate\nHost key verification failed.", "host key is not one", "ssh-keyscan"),
        ("fabric@gate: Permission denied (publickey).", "does not accept the key", "identity"),
        ("channel 0: open failed: administratively prohibited\nstdio forwarding failed", "does not connect", "bridge"),
        ("ssh: connect to host gate port 22: Connection refused\n", "Connection refused", "try"),
        ("bridge: only these may be reached: a:1\n", "only these may be reached: a:1", "try"),
        ("", "ended without a message", "try"),
    ],
)
def test_what_ssh_says_is_said_in_words(log, words, hint):
    (problem,) = ssh_failure(log, SSH, HUB).problems
    assert problem.code == "FT6207"
    assert words in problem.message
    assert hint in problem.hint


def test_a_banner_before_the_stream_is_passed_over_and_endless_talk_is_not():
    assert not after_banner(b"Welcome!\n", SSH)
    assert after_banner(b"Welcome!\n" + READY, SSH)
    for talk in (b"x" * (ANSWER_OCTETS + 1), READY + b"and more"):
        with pytest.raises(PathError) as refused:
            after_banner(talk, SSH)
        assert refused.value.problems[0].code == "FT6208"


@pytest.mark.parametrize(
    ("asked", "allowed", "expected"),
    [
        ("fabrictool-bridge a:1", ["a:1"], "a:1"),
        ("fabrictool-bridge b:2", ["a:1", "b:2"], "b:2"),
        ("fabrictool-bridge c:3", ["a:1", "b:2"], None),
        ("fabrictool-bridge c:3", ["a:1"], None),
        ("", ["a:1"], "a:1"),
        ("", ["a:1", "b:2"], None),
        ("bash -i", ["a:1"], "a:1"),
    ],
)
def test_a_bridge_leads_to_what_its_key_allows(asked, allowed, expected):
    assert target(allowed, {"SSH_ORIGINAL_COMMAND": asked}) == expected
