"""Units in a namespace: the real kubectl over real HTTP, against an API contract mock; its file says what it is not."""

import json
import shutil

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.kinds import open_cluster
from fabrictool.clusters.kubernetes.cluster import KubernetesCluster
from fabrictool.clusters.kubernetes.facts import read_objects
from fabrictool.clusters.protocol import NewUnit
from fabrictool.domain.inventory import ClusterSpec
from fabrictool.domain.specs import AgentSpec, GatewaySpec, HostPort
from tests.clusters.api_contract_mock import ApiContractMock

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None,
    reason="NO kubectl HERE (Debian: kubernetes-client): the kind kubernetes is UNTESTED",
)
DESCRIBED = ClusterSpec.model_validate_json(
    json.dumps(
        {
            "site": "s",
            "kind": "kubernetes",
            "kubernetes": {"context": "mock", "namespace": "llm"},
            "software": {"python": {"container": "registry.example/ft:0.1.0"}},
            "partitions": {"gpu": {"device": "h100-sxm", "devices_per_node": 4, "nodes": 2}},
        }
    )
)
COMMON = {"fabric": "fab", "provider": "p", "site": "s", "cluster": "c"}


def agent(number=0, devices=1):
    spec = AgentSpec(
        **COMMON, partition="gpu", replica=f"m/{number}", model="m", source="hf://m", engine="vllm", device="h100-sxm",
        devices=devices, walltime_s=3600.0,
    )  # fmt: skip
    files = {"identity/session.key": b"planted"}
    return NewUnit(f"replica-m-{number}-g1-0a1b2c3d", f"replica/m/{number}", spec, files, "0123456789abcdef", 7)


def gateway(generation=1):
    spec = GatewaySpec(**COMMON, name="main", listen=HostPort("h", 8011), mesh=HostPort("h", 8012))
    operation = f"gateway-main-g{generation}-0a1b2c3d"
    return NewUnit(operation, "gateway/main", spec, {"keys.json": b"{}"}, "0123456789abcdef", 7)


@pytest.fixture
def mock():
    return ApiContractMock()


@pytest.fixture
def cluster(mock, tmp_path, monkeypatch):
    with mock.serve() as url:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "mock", "cluster": {"server": url}}],
            "contexts": [{"name": "mock", "context": {"cluster": "mock", "user": ""}}],
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        monkeypatch.setenv("HOME", str(tmp_path))  # its cache of discovery
        yield open_cluster("c", "fab", DESCRIBED, tmp_path)


def states(cluster):
    facts = cluster.observe()
    assert facts.known, facts.reason
    return {unit.operation: unit.state for unit in facts.units}


def codes(failed):
    return {operation: error.problems[0].code for operation, error in failed.items()}


@needs_kubectl
def test_the_life_of_a_replica(mock, cluster):
    unit = agent()
    assert cluster.start([unit]) == {}
    assert states(cluster) == {unit.operation: "pending"}
    pod = mock.pod(unit.operation)
    mock.logs[pod] = "one\ntwo\n"
    (seen,) = cluster.observe().units
    assert (seen.state, seen.ready, seen.address, seen.lineage) == ("running", True, "replica/m/0", "0123456789abcdef")
    assert seen.ends_at == seen.begins_at + 3600
    assert cluster.spec(unit.operation) == unit.spec
    assert cluster.log_tail(unit.operation, 5) == ["one", "two"]
    with pytest.raises(FabrictoolError) as caught:
        cluster.forget([unit.operation])
    assert caught.value.problems[0].code == "FT5102"
    cluster.stop([unit.operation])
    assert states(cluster) == {unit.operation: "running"}, "a pod that leaves still holds its devices"
    mock.gone(pod)
    assert states(cluster) == {unit.operation: "ended"}
    cluster.forget([unit.operation])
    assert mock.objects == {}


@needs_kubectl
def test_an_operation_is_started_at_most_once(mock, cluster):
    unit = agent()
    for _ in range(2):
        assert cluster.start([unit]) == {}
    posted = [path for method, path in mock.requests if method == "POST"]
    assert len([path for path in posted if path.endswith("/jobs")]) == 1
    cluster.stop([unit.operation])
    assert cluster.start([unit]) == {}, "it was told to stop: it is over, and that is no error"
    assert mock.names("jobs") == []


@needs_kubectl
def test_a_job_that_somebody_deleted_is_not_made_again(mock, cluster):
    unit = agent()
    cluster.start([unit])
    del mock.objects["jobs", f"ft-{unit.operation}"]
    assert states(cluster) == {unit.operation: "killed"}
    assert cluster.start([unit]) == {}
    assert mock.names("jobs") == []


@needs_kubectl
@pytest.mark.parametrize("lost", ["configmaps", "secrets", "jobs"])
def test_an_answer_that_is_lost_is_no_second_start(mock, cluster, lost):
    unit = agent()
    mock.lose_answers["POST", lost] = 1
    cluster.start([unit])
    assert cluster.start([unit]) == {}
    assert mock.names("jobs") == [f"ft-{unit.operation}"]
    posted = [path for method, path in mock.requests if method == "POST" and path.endswith("/jobs")]
    assert len(posted) <= 2


@needs_kubectl
def test_a_start_that_was_cut_off_is_continued(mock, cluster):
    unit = agent()
    mock.failures["POST", "jobs"] = (500, "InternalError", "etcdserver: request timed out")
    failed = cluster.start([unit])
    assert codes(failed) == {unit.operation: "FT5413"}
    assert failed[unit.operation].problems[0].transient
    assert states(cluster) == {unit.operation: "prepared"}
    mock.failures.clear()
    assert cluster.start([unit]) == {}
    assert states(cluster) == {unit.operation: "pending"}


@needs_kubectl
def test_one_refusal_does_not_stop_the_others(mock, cluster):
    units = [agent(0), agent(1, devices=8), agent(2)]
    assert codes(cluster.start(units)) == {units[1].operation: "FT5408"}
    assert len(mock.names("jobs")) == 2


@needs_kubectl
@pytest.mark.parametrize(
    ("why", "transient"), [("jobs.batch is forbidden: User cannot create", False), ("exceeded quota: gpus", True)]
)
def test_the_api_servers_own_words(mock, cluster, why, transient):
    mock.failures["POST", "jobs"] = (403, "Forbidden", why)
    unit = agent()
    (problem,) = cluster.start([unit])[unit.operation].problems
    assert why in problem.message
    assert (problem.code, problem.transient) == ("FT5413", transient)


@needs_kubectl
def test_no_secret_no_job(mock, cluster):
    mock.failures["POST", "secrets"] = (403, "Forbidden", "secrets is forbidden")
    unit = agent()
    assert codes(cluster.start([unit])) == {unit.operation: "FT5413"}
    assert mock.names("jobs") == []


@needs_kubectl
def test_a_name_that_another_holds_is_not_touched(mock, cluster):
    unit = agent()
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"ft-{unit.operation}"}}
    mock.objects["configmaps", f"ft-{unit.operation}"] = theirs
    assert codes(cluster.start([unit])) == {unit.operation: "FT5412"}
    assert mock.names("jobs") == []
    for verb in (cluster.stop, cluster.kill, cluster.forget):
        verb([unit.operation])
    assert mock.objects["configmaps", f"ft-{unit.operation}"] is theirs


@needs_kubectl
def test_a_namespace_that_does_not_answer_is_unknown_and_not_empty(mock, cluster):
    mock.failures["GET", "pods"] = (403, "Forbidden", "pods is forbidden")
    facts = cluster.observe()
    assert not facts.known
    assert "forbidden" in facts.reason
    unit = agent()
    with pytest.raises(FabrictoolError) as caught:
        cluster.start([unit])
    assert caught.value.problems[0].code == "FT5414"
    assert mock.objects == {}


@needs_kubectl
def test_a_kill_leaves_a_second_and_never_forgets_a_pod(mock, cluster):
    unit = agent()
    cluster.start([unit])
    pod = mock.pod(unit.operation)
    cluster.kill([unit.operation])
    assert mock.objects["pods", pod]["metadata"]["deletionGracePeriodSeconds"] == 1
    assert states(cluster) == {unit.operation: "running"}


@needs_kubectl
def test_a_gateways_service_stays_with_its_successor(mock, cluster):
    first, second = gateway(1), gateway(2)
    assert cluster.start([first]) == {}
    assert cluster.start([second]) == {}
    cluster.stop([first.operation])
    cluster.forget([first.operation])
    assert mock.names("services") == ["ft-fab-gateway-main"]
    assert mock.names("deployments") == [f"ft-{second.operation}"]
    cluster.stop([second.operation])
    cluster.forget([second.operation])
    assert mock.objects == {}


@needs_kubectl
def test_many_units_are_a_few_calls(mock, cluster):
    units = [agent(number) for number in range(30)]
    assert cluster.start(units) == {}
    assert len(mock.names("jobs")) == 30
    lists = [path for method, path in mock.requests if method == "GET" and path.endswith("/pods")]
    assert len(lists) == 3


def test_a_missing_kubectl_is_an_unknown_cluster():
    cluster = KubernetesCluster("c", "fab", DESCRIBED, program="no-such-kubectl")
    facts = cluster.observe()
    assert not facts.known
    assert "no-such-kubectl" in facts.reason
    with pytest.raises(FabrictoolError) as caught:
        cluster.stop(["x"])
    assert caught.value.problems[0].code == "FT5411"


def test_what_cannot_be_written_down_is_said_by_the_plan():
    cluster = KubernetesCluster("c", "fab", DESCRIBED, program="no-such-kubectl")
    assert cluster.outlook([agent(), agent(1, devices=8)])[1][0].startswith("FT5408")


# -- what came back → what runs; pure ---------------------------------------------------------------------------

META = {
    "name": "ft-x",
    "labels": {"fabrictool.io/lineage": "0123456789abcdef"},
    "annotations": {"fabrictool.io/operation": "x", "fabrictool.io/address": "replica/m/0"},
}


def item(kind, **more):
    return {"kind": kind, "metadata": META | more.pop("metadata", {}), **more}


def config(**marks):
    noted = META["annotations"] | {f"fabrictool.io/{mark}": value for mark, value in marks.items()}
    spec = '{"unit":"agent","fabric":"f","provider":"p","site":"s","cluster":"c","node":"n","replica":"m/0","model":"m"'
    text = spec + ',"source":"x","engine":"vllm"}'
    return item("ConfigMap", data={"spec.json": text}, metadata={"annotations": noted})


def pod(phase, state=None, **more):
    status = {"phase": phase, "containerStatuses": [{"state": state}] if state else []}
    return item("Pod", status=status | more.pop("status", {}), spec={}, **more)


DONE = {"terminated": {"exitCode": 0, "reason": "Completed"}}
OOM = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
PULL = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
FAILED = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
NO_NODE = {
    "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/8 nodes: Insufficient nvidia.com/gpu"}]
}


@pytest.mark.parametrize(
    ("items", "state", "word"),
    [
        ([config()], "prepared", ""),
        ([config(started="1")], "killed", "somebody else"),
        ([config(stopped="1", started="1")], "ended", "told to stop"),
        ([config(), item("Job")], "pending", "no pod yet"),
        ([config(), item("Job"), pod("Pending", status=NO_NODE)], "pending", "Insufficient"),
        ([config(), item("Job"), pod("Pending", PULL)], "pending", "ImagePullBackOff"),
        ([config(), item("Job"), pod("Running")], "running", "starting"),
        ([config(), item("Job"), pod("Unknown")], "running", ""),
        ([config(stopped="1"), pod("Running", metadata={"deletionTimestamp": "now"})], "running", "leaving"),
        ([config(), item("Job"), pod("Succeeded", DONE)], "ended", "left in order"),
        ([config(), item("Job"), pod("Failed", OOM)], "killed", "exit 137: OOMKilled"),
        ([config(), item("Job"), pod("Failed", status={"reason": "DeadlineExceeded"})], "killed", "DeadlineExceeded"),
        ([config(), item("Job", status=FAILED)], "killed", "BackoffLimitExceeded"),
        ([config(), item("Deployment"), pod("Failed", OOM)], "pending", "another one follows"),
        ([pod("Running")], "damaged", "ConfigMap"),
    ],
)
def test_objects_become_one_unit(items, state, word):
    (unit,) = read_objects(json.dumps({"kind": "List", "items": items}), thing="cluster/c").units
    assert unit.state == state
    assert word in f"{unit.reason} {unit.detail}"
    assert unit.holds is (state == "damaged")
    assert unit.address == "replica/m/0"


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"items": [1]}', "error: connection lost"])
def test_an_answer_that_is_none_is_an_error(text):
    with pytest.raises(FabrictoolError) as caught:
        read_objects(text, thing="cluster/c")
    assert caught.value.problems[0].code == "FT5401"
