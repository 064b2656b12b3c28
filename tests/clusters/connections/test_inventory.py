"""From a login node of the inventory to a connection."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.connections import pins
from fabrictool.clusters.connections.commands import portable, wrap
from fabrictool.clusters.connections.errors import of_connecting
from fabrictool.clusters.connections.factory import connect_login, endpoint_of
from fabrictool.clusters.connections.openssh_connection import OpensshConnection
from fabrictool.clusters.connections.protocol import Endpoint
from fabrictool.domain.inventory import Login

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGZha2VmYWtlZmFrZWZha2VmYWtlZmFrZWZha2VmYWtl"


def login(**changes):
    return Login.model_validate(
        {"host": "login.example.org", "user": "ann", "host_keys": [KEY]} | changes, strict=False
    )


def test_an_endpoint_is_what_the_inventory_says():
    described = login(
        user="secret://env/WHO",
        identity="~/.ssh/site",
        jump=[{"host": "a", "host_keys": [KEY]}, {"host": "b", "port": 2222, "user": "bob", "host_keys": [KEY]}],
    )
    found = endpoint_of(described, {"WHO": "carol"})
    assert (found.host, found.port, found.user, found.identity) == ("login.example.org", 22, "carol", "~/.ssh/site")
    assert [(hop.host, hop.port, hop.user, hop.host_keys) for hop in found.jumps] == [
        ("a", 22, "carol", (KEY,)),
        ("b", 2222, "bob", (KEY,)),
    ]
    with pytest.raises(FabrictoolError, match="FT1401"):
        endpoint_of(described, {})


def test_the_transport_of_the_inventory_is_used():
    with connect_login(login(transport="openssh", control_path="~/s")) as found:
        assert isinstance(found, OpensshConnection)


@pytest.mark.parametrize("field", [{"control_path": "~/s"}, {"ssh_config": True}])
def test_what_is_for_openssh_is_refused_elsewhere(field):
    with pytest.raises(ValidationError, match="program ssh only"):
        login(**field)
    login(transport="openssh", **field)


def test_what_plans_and_applies_never_loads_fabric():
    code = (
        "import sys, fabrictool.applier.apply, fabrictool.state.fabric\n"
        "import fabrictool.clusters.connections.factory as f\n"
        "from fabrictool.clusters.connections.protocol import Endpoint\n"
        f"point = Endpoint('a', 22, 'u', ({KEY!r},))\n"
        "f.connect(point).close(); f.connect(point, 'openssh').close()\n"
        "assert 'asyncssh' in sys.modules\n"
        "print(sorted({'fabric', 'paramiko', 'invoke'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_what_is_sent_is_plain_text_for_any_shell():
    text = wrap(["printf", "a", "'\n!\\"]).text
    assert text.isascii()
    assert text.isprintable()
    inside = text.split("'")[3]
    assert set(inside) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-./,:=@+\\")


def test_every_byte_survives_the_encoding():
    every = "".join(chr(byte) for byte in range(1, 128)) + "é€"
    line = portable(f"printf %s '{every.replace(chr(39), '')}'")
    done = subprocess.run(["sh", "-c", line], capture_output=True, check=True)
    assert done.stdout == every.replace("'", "").encode()


def test_certificates_are_asked_for_only_when_an_authority_is_pinned():
    def asked(*keys):
        return pins.algorithms(pins.pins(Endpoint("h", 22, "u", keys)))

    assert not [name for name in asked(KEY) if "cert" in name]
    assert asked(KEY)[0] == "ssh-ed25519"
    assert "cert" in asked(f"@cert-authority {KEY}")[0]
    assert "ssh-dss" not in asked(KEY)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (ConnectionRefusedError(111, "refused"), "FT5301"),
        ("Connection closed by 10.0.0.1 port 22", "FT5301"),
        ("Unable to negotiate with 10.0.0.1: no matching cipher found", "FT5310"),
        ("something new", "FT5301"),
    ],
)
def test_what_the_libraries_say_before_a_login(said, code):
    (problem,) = of_connecting(Endpoint("h", 22, "u", (KEY,)), said).problems
    assert (problem.code, problem.transient) == (code, code == "FT5301")
