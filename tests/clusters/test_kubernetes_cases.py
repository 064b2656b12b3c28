"""A unit → its objects, word for word (tests/cases/clusters/kubernetes), and every object against the schemas.

The schemas are those that Kubernetes publishes (PyPI kubernetes-validate), the strict ones: an unknown field is wrong.
"""

import base64
import json
import stat
import subprocess
import time
from pathlib import Path

import kubernetes_validate
import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.kubernetes.manifests import objects_of
from fabrictool.clusters.kubernetes.names import label_value, object_name, selector
from fabrictool.clusters.protocol import NewUnit
from fabrictool.domain.inventory import ClusterSpec
from fabrictool.domain.specs import AgentSpec, GatewaySpec, decode_spec
from fabrictool.status.documents import Health

ROOT = Path(__file__).parents[1] / "cases" / "clusters" / "kubernetes"
CASES = sorted(ROOT.glob("*.json"))
VERSIONS = ["1.29", "1.33", "1.37"]
AGENT = {
    "fabric": "fab", "provider": "p", "site": "s", "cluster": "c", "node": "gpu", "replica": "m/0", "model": "m",
    "source": "hf://m", "engine": "vllm",
}  # fmt: skip
GATEWAY = {
    "fabric": "fab", "provider": "p", "site": "s", "cluster": "c", "node": "c", "name": "main",
    "listen": ["gateway.example", 8011], "mesh": ["gateway.example", 8012],
}  # fmt: skip


def objects(case):
    facts, desired = case["facts"], case["desired"]
    partition = {"device": "h100-sxm", "devices_per_node": 4, "nodes": 8} | facts.get("partition", {})
    described = ClusterSpec.model_validate_json(
        json.dumps(
            {"site": "s", "kind": "kubernetes", "kubernetes": {"context": "ctx", "namespace": "llm"}}
            | {"partitions": {"gpu": partition}, "software": {"python": {"container": "registry.example/ft:0.1.0"}}}
            | facts.get("cluster", {})
        )
    )
    if desired["unit"] == "gateway":
        spec = msgspec.convert(GATEWAY | desired.get("spec", {}), GatewaySpec)
        operation, address = "gateway-main-g1-0a1b2c3d", "gateway/main"
    else:
        spec = msgspec.convert(AGENT | {"device": partition["device"]} | desired.get("spec", {}), AgentSpec)
        operation, address = f"replica-{spec.replica.replace('/', '-')}-g1-0a1b2c3d", f"replica/{spec.replica}"
    files = {"identity/session.key": b"planted"} | {
        name: text.encode() for name, text in desired.get("files", {}).items()
    }
    unit = NewUnit(desired.get("operation", operation), address, spec, files, "0123456789abcdef", 7)
    return objects_of(unit, described, "c", "fab").all


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_unit_gives_these_objects(path):
    case = json.loads(path.read_text())
    if "error" in case:
        with pytest.raises(FabrictoolError) as caught:
            objects(case)
        assert caught.value.problems[0].code == case["error"]
        assert case["says"] in str(caught.value)
        return
    assert objects(case) == case["commands"]["objects"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", [p for p in CASES if "error" not in json.loads(p.read_text())], ids=lambda p: p.stem)
def test_the_schemas_take_every_object(path, version):
    for each in objects(json.loads(path.read_text())):
        kubernetes_validate.validate(each, version, strict=True)


def test_the_schemas_would_refuse_a_field_that_is_not_there():
    job = objects({"facts": {}, "desired": {"unit": "agent"}})[-1]
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


def test_what_is_secret_is_in_the_secret_alone():
    config, secret, job = objects({"facts": {}, "desired": {"unit": "agent"}})
    planted = base64.b64encode(b"planted").decode()
    assert planted in json.dumps(secret)
    assert not any(word in json.dumps([config, job]) for word in ("planted", planted))


def test_a_gateway_is_told_to_listen_in_its_pod_and_remembered_as_it_was_told():
    config, *_ = objects({"facts": {}, "desired": {"unit": "gateway"}})
    assert decode_spec(config["data"]["unit.json"].encode()).listen.host == "0.0.0.0"  # noqa: S104
    assert decode_spec(config["data"]["spec.json"].encode()).listen.host == "gateway.example"


@pytest.mark.parametrize("text", ["a", "Q_x.y", "x" * 63, "x" * 64, "ä", "-a", "a/b", "." * 80])
def test_any_text_becomes_a_label_and_a_name(text):
    assert len(label_value(text)) <= 63
    assert label_value(label_value(text)) == label_value(text)
    assert len(object_name(text)) <= 63
    assert object_name(text).replace("-", "a").isalnum()
    assert object_name(text).islower()


def test_names_that_differ_stay_different():
    long = [f"replica-{'x' * 80}-{n}-g1-0a1b2c3d" for n in range(9)]
    assert len({object_name(each) for each in long}) == len({label_value(each) for each in long}) == 9


def test_a_selector_names_the_fabric_first():
    assert selector("fab", ["b", "a"]) == "fabrictool.io/fabric=fab,fabrictool.io/operation in (a,b)"


def test_the_container_makes_a_run_folder_that_is_its_own(tmp_path):
    """Its script, run here, on mounts with the links that a kubelet makes."""
    objects_made = objects({"facts": {}, "desired": {"unit": "agent", "spec": {"walltime_s": 60.0}}})
    script = objects_made[-1]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert script.splitlines()[-1].startswith("exec python3 -P -m fabrictool.agent /run/fabrictool/unit")
    here = script.replace("/run/fabrictool", str(tmp_path)).replace("exec python3", "exec echo")
    real = tmp_path / "secret" / "..2027" / "identity"
    real.mkdir(parents=True)
    (real / "session.key").write_bytes(b"planted")
    (real / "session.key").chmod(0o440)
    (tmp_path / "secret" / "..data").symlink_to("..2027")
    (tmp_path / "secret" / "identity").symlink_to("..data/identity")
    (tmp_path / "config").mkdir()
    for name, key in (("spec.json", "unit.json"), ("meta.json", "meta.json")):
        (tmp_path / "config" / name).write_text(objects_made[0]["data"][key])
    for _ in range(2):  # a container that is started again finds its files
        done = subprocess.run(["sh", "-c", here], capture_output=True, text=True, check=True, timeout=20)
    ends = int(done.stdout.split()[-1])
    assert 0 < ends - time.time() <= 61
    unit = tmp_path / "unit"
    assert (unit / "identity" / "session.key").read_bytes() == b"planted"
    assert stat.S_IMODE((unit / "identity" / "session.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((unit / "identity").stat().st_mode) == 0o700
    assert decode_spec((unit / "spec.json").read_bytes()).walltime_s == 60.0


def test_the_readiness_probe_reads_what_a_unit_writes(tmp_path):
    job = objects({"facts": {}, "desired": {"unit": "agent"}})[-1]
    argv = job["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]["exec"]["command"]
    argv = [word.replace("/run/fabrictool", str(tmp_path)) for word in argv]
    (tmp_path / "unit").mkdir()
    for health, code in ((Health(at=1.0, ready=True), 0), (Health(at=1.0, ready=False), 1)):
        (tmp_path / "unit" / "health.json").write_bytes(msgspec.json.encode(health))
        assert subprocess.run(argv, check=False, timeout=20).returncode == code
