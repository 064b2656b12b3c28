"""The commands on a namespace: plan, apply, no change, destroy; kubectl is real, the API is a contract mock.

The mock's `play` makes pods out of Jobs and Deployments at once, and says that all are ready: nothing runs in them.
"""

import json
import os
import shutil

import pytest

from tests.clusters.api_contract_mock import MARK, ApiContractMock

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        shutil.which("kubectl") is None,
        reason="NO kubectl HERE (Debian: kubernetes-client): the kind kubernetes is UNTESTED",
    ),
]
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: small
models:
  chat: {source: "hf://meta-llama/Llama-3.1-8B-Instruct", replicas: {min: 2, max: 2}}
gateway: {cluster: edge, listen: "gateway.llm.svc:8011", mesh: "gateway.llm.svc:8012"}
trust: {groups: {all: {allow: [alpha]}}}
tenants: {me: {group: all, key: secret://env/KEY}}
"""
INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}}
sites: {zurich: {provider: alpha}}
clusters:
  edge:
    site: zurich
    kind: kubernetes
    poll: 1s
    kubernetes: {context: mock, namespace: llm}
    software: {python: {container: "registry.example/ft:0.1.0"}}
    partitions:
      h100: {device: h100-sxm, devices_per_node: 8, nodes: 4, walltime: 7d}
"""


def test_plan_apply_and_destroy(command_line, tmp_path):
    mock = ApiContractMock()
    with mock.serve() as url, mock.play():
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "mock", "cluster": {"server": url}}],
            "contexts": [{"name": "mock", "context": {"cluster": "mock", "user": ""}}],
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        (tmp_path / "b.yaml").write_text(BLUEPRINT)
        (tmp_path / "i.yaml").write_text(INVENTORY)
        environment = os.environ | {
            "KUBECONFIG": str(tmp_path / "kubeconfig"),
            "HOME": str(tmp_path),
            "FABRICTOOL_STATE_DIR": str(tmp_path / "state"),
            "KEY": "planted-0123456789abcdef0123456789abcdef",
        }

        def run(*words):
            argv = [*words, "-b", "b.yaml", "-i", "i.yaml"]
            done = command_line.run(argv, cwd=tmp_path, env=environment, timeout=120)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        run("trust", "init")
        run("apply", "--yes")
        assert len(mock.names("jobs")) == 2
        assert len(mock.names("deployments")) == len(mock.names("services")) == 1
        operations = {each["metadata"]["annotations"][MARK] for each in mock.objects.values()}
        assert len(operations) == 3
        everything = json.dumps([each for (kind, _), each in mock.objects.items() if kind != "secrets"])
        assert "PRIVATE KEY" not in everything
        assert "planted" not in everything
        assert "No changes" in run("plan")
        assert "3 of 3 units run" in run("status")
        run("destroy", "--yes")
        assert mock.objects == {}
