"""The inventory of three centres' patterns: it is valid, and its jobs begin as the centres' own pages have them."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml

from fabrictool.clusters.jobs import job_of
from fabrictool.clusters.kinds import scheduler_of
from fabrictool.clusters.protocol import NewUnit
from fabrictool.domain.inventory import Inventory
from fabrictool.domain.specs import AgentSpec
from fabrictool.engines.adapter import EngineLaunch, adapter
from fabrictool.planner.units import install_of
from tests.clusters.test_cases import AGENT, survey_of

FILE = Path(__file__).parents[2] / "examples" / "site-patterns" / "inventory.yaml"
MODULES = "command -v module >/dev/null 2>&1 || . /etc/profile"
WANTED = {
    "amd": (
        ["--gpus-per-node=4", "--account=project_1"],
        [
            MODULES, "module purge", "module load LUMI || exit 66", "module load singularity-AI-bindings || exit 66",
            "export HF_HUB_OFFLINE=1", "export MIOPEN_USER_DB_PATH=/tmp/miopen",
        ],
        "singularity exec --rocm --home /cache --bind /model:/model:ro /appl/local/containers/vllm.sif python3 -m vllm",
    ),
    "gh200": (
        ["--exclusive", "--account=a01"],
        [
            "unset SSH_AUTH_SOCK", "export HF_HUB_OFFLINE=1", "export NCCL_NET='AWS Libfabric'",
            "export NCCL_SOCKET_IFNAME=hsn",
        ],
        "/agents/python -m vllm",
    ),
    "infiniband": (
        ["--gres=gpu:4", "--account=proj02", "--qos=normal"],
        [
            MODULES, "module load apptainer/1.3 || exit 66", "unset http_proxy", "unset https_proxy",
            "export APPTAINER_BIND=/dev/infiniband", "export GLOO_SOCKET_IFNAME=ib0", "export HF_HUB_OFFLINE=1",
            "export NCCL_SOCKET_IFNAME=ib0", "export PYTHONNOUSERSITE=1", MODULES, "module load python/3.11 || exit 66",
        ],
        "apptainer exec --nv --home /cache --bind /model:/model:ro /lustre/images/vllm-0.33.sif python3 -m vllm",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def inventory():
    return Inventory.model_validate_json(json.dumps(yaml.safe_load(FILE.read_text())))


def test_the_patterns_are_all_here(inventory):
    assert inventory.clusters.keys() == WANTED.keys()


@pytest.mark.parametrize("name", WANTED)
def test_a_job_begins_as_the_centre_has_it(inventory, name):
    described = inventory.clusters[name]
    ((partition, its),) = described.partitions.items()
    spec = msgspec.convert(AGENT | {"node": partition, "device": its.device, "devices": 4, "tp": 4}, AgentSpec)
    scheduler = scheduler_of("slurm")
    survey = survey_of({"sections": {"version": ["slurm 24.05.1"]}}, scheduler)
    unit = NewUnit("replica-m-0-g1-0a1b2c3d", "replica/m/0", spec, {}, "0123456789abcdef", 7)
    submission = scheduler.submission(survey.scheduler, job_of(unit, described, name, "fab", survey, scheduler))
    options, lines, engine = WANTED[name]
    assert [word for word in submission.argv if word in options] == sorted(options, key=submission.argv.index)
    script = submission.script.splitlines()
    begin = next(number for number, line in enumerate(script) if line.startswith('if [ "$(cat claim)"')) + 1
    assert script[begin : begin + len(lines)] == lines
    assert ("--environment=/capstor/scratch/fabrictool/vllm.toml" in script[-1]) == (name == "gh200")
    install = install_of(described.software, "vllm", its.device)
    given = {} if isinstance(install, msgspec.UnsetType) else {"install": install}
    launch = EngineLaunch(
        engine="vllm", model="/model", served_name="m", host="127.0.0.1", port=1, python="/agents/python",
        cache_dir="/cache", **given,
    )  # fmt: skip
    assert " ".join(adapter("vllm").command(launch).argv).startswith(engine)
