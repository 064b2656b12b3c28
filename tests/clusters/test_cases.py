"""Facts and a wish → the exact commands: every file in tests/cases/clusters is one case.

`facts` is what the login node printed (lines by section) and the inventory's cluster; `desired` is a unit to be
started, or a verb. `commands` is what must follow, word for word; `error` the code that must be raised instead.
"""

import json
import shlex
from pathlib import Path

import msgspec
import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.jobs import job_of
from fabrictool.clusters.kinds import scheduler_of
from fabrictool.clusters.protocol import NewUnit
from fabrictool.clusters.survey import read_survey
from fabrictool.domain.inventory import ClusterSpec
from fabrictool.domain.specs import AgentSpec, GatewaySpec

ROOT = Path(__file__).parents[1] / "cases" / "clusters"
CASES = sorted(path for path in ROOT.rglob("*.json") if path.parent.name != "kubernetes")

LOGIN = {
    "host": "login.example",
    "user": "u",
    "host_keys": ["ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILmUnzB17gKWybRRj5qtR6JyJz4S5PO9d5jFtr/HAOpo"],
}
AGENT = {
    "fabric": "fab", "provider": "p", "site": "s", "cluster": "c", "replica": "m/0", "model": "m", "source": "hf://m",
    "engine": "vllm",
}  # fmt: skip
GATEWAY = {
    "fabric": "fab", "provider": "p", "site": "s", "cluster": "c", "name": "main",
    "listen": ["h", 1], "mesh": ["h", 2],
}  # fmt: skip
SECTIONS = {"now": ["1800000000"], "host": ["login1", "/home/u"], "base": ["/home/u/.fabrictool"], "environment": []}


def survey_of(facts, scheduler):
    sections = SECTIONS | facts.get("sections", {})
    text = "".join(f"@{name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items())
    return read_survey(text + "@end\n", scheduler, thing="cluster/c")


def commands(case):
    """What the code says; the shape of a case's `commands`."""
    facts, desired = case["facts"], case["desired"]
    scheduler = scheduler_of(case["kind"])
    if desired["action"] in ("stop", "kill", "lookup"):
        return {"shell": getattr(scheduler, desired["action"])().splitlines()}
    if desired["action"] == "survey":
        return {"shell": scheduler.survey(brief=desired["brief"]).splitlines()}
    partition = {"device": "h100", "devices_per_node": 4, "nodes": 8} | facts.get("partition", {})
    described = ClusterSpec.model_validate_json(
        json.dumps(
            {"site": "s", "kind": case["kind"], "login": [LOGIN], "partitions": {"gpu": partition}}
            | {"software": {"python": {"venv": "/opt/ft"}}}
            | facts.get("cluster", {})
        )
    )
    if desired.get("unit") == "gateway":
        spec = msgspec.convert(GATEWAY | desired.get("spec", {}), GatewaySpec)
        operation, address = "gateway-main-g1-0a1b2c3d", "gateway/main"
    else:
        walltime = None if described.partitions["gpu"].walltime is None else float(described.partitions["gpu"].walltime)
        base = AGENT | {"node": "gpu", "device": partition["device"], "walltime_s": walltime}
        spec = msgspec.convert(base | desired.get("spec", {}), AgentSpec)
        operation, address = "replica-m-0-g1-0a1b2c3d", "replica/m/0"
    unit = NewUnit(desired.get("operation", operation), address, spec, {}, "0123456789abcdef", 7)
    survey = survey_of(facts, scheduler)
    job = job_of(unit, described, "c", "fab", survey, scheduler)
    if desired["action"] == "estimate":
        argv = scheduler.estimate(survey.scheduler, job)
        return {"argv": None if argv is None else list(argv)}
    submission = scheduler.submission(survey.scheduler, job)
    return {"submit": list(submission.argv), "script": submission.script.splitlines()}


@pytest.mark.parametrize("path", CASES, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")))
def test_facts_and_a_wish_give_these_commands(path):
    case = json.loads(path.read_text())
    if "error" in case:
        with pytest.raises(FabrictoolError) as caught:
            commands(case)
        assert caught.value.problems[0].code == case["error"]
        assert case["says"] in str(caught.value)
        return
    assert commands(case) == case["commands"]


def test_there_are_enough_cases_and_none_is_there_twice():
    texts = [json.dumps({k: v for k, v in json.loads(p.read_text()).items() if k != "about"}) for p in CASES]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("path", CASES, ids=lambda path: str(path.relative_to(ROOT).with_suffix("")))
def test_no_command_needs_a_shell_to_be_safe(path):
    """Each submission survives its own quoting, and nothing that a user wrote is outside of quotes."""
    case = json.loads(path.read_text())
    argv = case.get("commands", {}).get("submit")
    if argv:
        assert shlex.split(shlex.join(argv)) == argv
