"""What TLS peers refuse each other for, said in words: a real handshake with real certificates."""

import socket
import ssl
import threading
import time

import pytest

from fabrictool.base.tlswords import spoken
from fabrictool.mesh.identity import create_root, issue_provider, issue_session
from fabrictool.mesh.transport.tls import IdentityFiles, client_context, server_context

DAY = 86400.0


def identity(folder, root, *, now, seconds=DAY):
    folder.mkdir()
    files = IdentityFiles(folder)
    files.write(issue_session(issue_provider(root, "p", now=now), "agent", now=now, seconds=seconds), root)
    return files


def failure(server, client):
    """What the client says of the handshake."""
    ours, theirs = socket.socketpair()

    def serve():
        try:
            with server_context(server).wrap_socket(theirs, server_side=True) as tls:
                tls.recv(1)
        except OSError:
            theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(OSError, match=r"_ssl\.c") as error, client_context(client).wrap_socket(ours) as tls:
        tls.recv(1)
    ours.close()
    thread.join(10)
    return spoken(error.value)


@pytest.mark.parametrize(
    ("offset", "said"), [(+10 * DAY, "is not valid yet, or one of the two clocks"), (-10 * DAY, "has expired, or one")]
)
def test_certificates_and_clocks_in_words(tmp_path, offset, said):
    now = time.time()
    root = create_root("f", now=now - 30 * DAY)
    wrong = identity(tmp_path / "wrong", root, now=now + offset)
    right = identity(tmp_path / "right", root, now=now)
    text = failure(wrong, right)
    assert said in text
    assert "_ssl.c" not in text


def test_another_federation_in_words(tmp_path):
    now = time.time()
    files = [identity(tmp_path / name, create_root("f", now=now - DAY), now=now) for name in ("a", "b")]
    assert failure(*files) == "the other side's certificate is signed by no authority that is trusted here"


def test_other_errors_stay_as_they_are():
    assert spoken(OSError("no route")) == "no route"
    assert spoken(ssl.SSLError("x")) == "TLS failed: unknown"
