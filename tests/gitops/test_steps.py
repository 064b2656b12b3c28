"""The steps of examples/gitops, run as the workflow files run them, on a fabric of local processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fabrictool.blueprint.policy import load_policy
from tests.gitops.server import CommentsTestServer

EXAMPLE = Path(__file__).parents[2] / "examples/gitops"
WORKFLOWS = [*sorted((EXAMPLE / ".github/workflows").glob("*.yml")), EXAMPLE / ".gitlab-ci.yml"]


class Repository:
    """The example's files beside a fabric's, and its steps."""

    def __init__(self, bed):
        self.bed, self.folder = bed, bed.folder
        shutil.copytree(EXAMPLE / "steps", self.folder / "steps")
        shutil.copy(EXAMPLE / "policy.yaml", self.folder)
        program = self.folder / "bin/fabrictool"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fabrictool.cli.main "$@"\n')
        program.chmod(0o755)
        self.path = f"{program.parent}:{os.environ['PATH']}"

    def step(self, name, *, code=0, **environment):
        done = subprocess.run(
            [self.folder / f"steps/{name}.sh"], cwd=self.folder, capture_output=True, text=True, timeout=150,
            check=False, stdin=subprocess.DEVNULL, env=self.bed.environment | {"PATH": self.path} | environment,
        )  # fmt: skip
        assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def outside(self, name, **options):
        """Where there are no keys, no state and no secrets."""
        away = {"FABRICTOOL_STATE_DIR": str(self.folder / "elsewhere"), "FT_TEST_KEY": "", "FT_ALPHA_KEY": ""}
        return self.step(name, **away | options)

    def out(self, name):
        return (self.folder / "out" / name).read_text()


@pytest.fixture
def repository(fabric_bed):
    fabric_bed.run("trust", "init")
    found = Repository(fabric_bed)
    shutil.copy(fabric_bed.folder / "state/t/trust/root.crt", fabric_bed.folder)
    return found


@pytest.fixture(params=["github", "gitlab"])
def comments(request):
    server = CommentsTestServer(request.param, "planted-comment-token")
    yield server
    server.close()


@pytest.mark.e2e
@pytest.mark.timeout(280)
def test_from_a_proposal_to_a_fabric_and_back_to_what_has_drifted(repository):
    bed = repository.bed
    repository.step("drift")
    assert "Nothing has drifted" in repository.out("drift.md")
    repository.outside("plan", OBSERVED="out/observation.json")
    assert repository.out("comment.md").startswith("<!-- fabrictool plan t -->\n")
    assert "3 create" in repository.out("comment.md")
    assert not (repository.folder / "elsewhere").exists()
    reviewed = shutil.copy(repository.folder / "out/plan.json", repository.folder / "reviewed.json")
    assert "no reviewed plan" in repository.step("apply", code=5).stderr
    assert bed.units() == {}
    repository.step("apply", REVIEWED=reviewed)
    assert bed.running() == ["gateway/main", "replica/tiny/0", "replica/tiny/1"]
    assert json.loads(repository.out("apply.ndjson").splitlines()[-1])["type"] == "end"
    repository.step("apply")  # nothing to do needs no review
    bed.write(context=128)
    assert "FT4405" in repository.step("apply", REVIEWED=reviewed, code=5).stdout, "merged by another way"
    before = {unit.operation for unit in bed.units().values()}
    bed.write(context=256)
    os.kill(bed.units()["replica/tiny/0", "running"].pid, signal.SIGKILL)
    drift = repository.step("drift", code=2)
    assert "replica/tiny/0" in repository.out("drift.md")
    assert "1 units have drifted" in drift.stdout
    assert {unit.operation for unit in bed.units().values()} == before, "looking changes nothing"
    proposed = repository.outside("plan", OBSERVED="out/observation.json")
    assert "former one was killed" in proposed.stdout
    repository.step("apply", REVIEWED="out/plan.json")
    assert len(bed.running()) == 3


@pytest.mark.e2e
def test_what_the_policy_denies_is_commented_and_not_applied(repository):
    (repository.folder / "policy.yaml").write_text(
        "apiVersion: fabrictool/v1\nkind: Policy\nrules: [{name: few, deny: {max_changes: 1}}]\n"
    )
    repository.step("drift")
    done = repository.outside("plan", code=6)
    assert "FT3002" in done.stderr
    assert "⛔ denied" in repository.out("comment.md")
    assert "FT3002" in repository.step("apply", REVIEWED="out/plan.json", code=6).stderr
    assert repository.bed.units() == {}


@pytest.mark.e2e
def test_a_wrong_proposal_or_a_forged_observation_makes_no_comment(repository):
    repository.step("drift")
    repository.outside("plan")
    text = (repository.folder / "out/observation.json").read_text()
    (repository.folder / "out/observation.json").write_text(text.replace('"known": true', '"known": false', 1))
    assert "FT4402" in repository.outside("plan", code=65).stderr
    assert not (repository.folder / "out/comment.md").exists(), "the former one is gone"
    (repository.folder / "out/observation.json").write_text(text)
    blueprint = repository.folder / "blueprint.yaml"
    blueprint.write_text(blueprint.read_text().replace("replicas:", "replica:"))
    assert "blueprint.yaml:12:5" in repository.outside("plan", code=65).stderr
    assert not (repository.folder / "out/comment.md").exists()


def comment(repository, server, body, **options):
    (repository / "out").mkdir(exist_ok=True)
    (repository / "out/comment.md").write_text(body)
    done = subprocess.run(
        [EXAMPLE / "steps/comment.sh"], cwd=repository, capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": os.environ["PATH"]} | server.environment | options,
    )  # fmt: skip
    assert "planted-comment-token" not in done.stdout + done.stderr
    return done


def test_there_is_one_comment_a_fabric_and_it_is_ours(comments, tmp_path):
    first, second = "<!-- fabrictool plan t -->\nfirst\n", "<!-- fabrictool plan t -->\nsecond\n"
    comments.comments = [("eve", f"{first}not ours"), *[("bob", f"remark {n}") for n in range(99)]]
    assert comment(tmp_path, comments, first).stdout == "commented\n"
    assert comments.comments[-1] == (comments.me, first)
    comments.comments.append(("bob", "and I"))
    assert comment(tmp_path, comments, second).stdout == "changed the comment\n", "though it is on the second page"
    asked = len(comments.asked)
    assert "already" in comment(tmp_path, comments, second).stdout
    assert set(comments.asked[asked:]) == {"GET"}
    assert comment(tmp_path, comments, "<!-- fabrictool plan u -->\nother\n").stdout == "commented\n"
    bodies = [body for author, body in comments.comments if author == comments.me]
    assert bodies == [second, "<!-- fabrictool plan u -->\nother\n"]
    assert comments.comments[0] == ("eve", f"{first}not ours")


def test_without_a_marker_or_rights_nothing_is_commented(comments, tmp_path):
    assert comment(tmp_path, comments, "no marker\n").returncode != 0
    comments.token = "another"
    done = comment(tmp_path, comments, "<!-- fabrictool plan t -->\n", GITHUB_TOKEN="wrong", GITLAB_TOKEN="wrong")
    assert done.returncode != 0
    assert comments.comments == []


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflow_files_are_yaml_and_call_steps_that_are_there(file):
    assert yaml.safe_load(file.read_text())
    called = set(re.findall(r"steps/(\w+)\.sh", file.read_text()))
    assert called
    for name in called:
        step = EXAMPLE / f"steps/{name}.sh"
        assert os.access(step, os.X_OK), name
        subprocess.run(["bash", "-n", step], check=True, timeout=20)


def test_every_step_is_called_by_both_hosts():
    steps = {path.stem for path in (EXAMPLE / "steps").iterdir()}
    texts = [" ".join(path.read_text() for path in WORKFLOWS[:-1]), WORKFLOWS[-1].read_text()]
    for text in texts:
        assert set(re.findall(r"steps/(\w+)\.sh", text)) == steps


def test_pull_requests_of_forks_meet_no_secret_and_no_runner_inside():
    workflow = yaml.safe_load((EXAMPLE / ".github/workflows/plan.yml").read_text())
    text = json.dumps(workflow)
    assert "secrets." not in text
    assert "self-hosted" not in text
    assert "pull_request" in workflow[True], "not pull_request_target, which would run a fork's files with our rights"
    assert set(workflow[True]) == {"pull_request"}


def test_the_policy_is_valid_for_the_loader_and_for_editors():
    import jsonschema

    from fabrictool.blueprint.schema import json_schema

    file = EXAMPLE / "policy.yaml"
    assert len(load_policy(file).policy.rules) == 3
    jsonschema.Draft202012Validator(json_schema("policy")).validate(yaml.safe_load(file.read_text()))
