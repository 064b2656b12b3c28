"""A saved plan is carried out as it was reviewed, or not at all."""

import json
import shutil
import subprocess

import pytest

from fabrictool.applier.checks import check_sound
from fabrictool.base.errors import FabrictoolError
from fabrictool.state.planfile import NAMESPACE, encode_file, read_plan
from tests.gitops.plans import action, plan, spec

PLAN = plan(action("create", spec=spec(context=2048), operation="o-g1"))


def code_of(call, *arguments):
    with pytest.raises(FabrictoolError) as error:
        call(*arguments)
    return error.value.problems[0].code


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(encode_file(PLAN))
    return path


def test_a_saved_plan_is_read_as_it_was(saved):
    assert read_plan(saved) == PLAN
    assert json.loads(saved.read_text())["id"] == PLAN.id


@pytest.mark.parametrize(
    ("before", "after"),
    [('"context": 2048', '"context": 4096'), ('"fabric": "f"', '"fabric": "g"'), ('"create"', '"keep"')],
)
def test_an_edited_plan_is_refused(saved, before, after):
    text = saved.read_text()
    assert before in text
    saved.write_text(text.replace(before, after))
    assert code_of(read_plan, saved) == "FT4021"


def test_a_plan_of_another_release_is_not_called_edited(saved):
    """Its id was made of fields that this release may not have, or not have yet."""
    text = saved.read_text().replace('"release": "', '"release": "0.0.').replace('"context": 2048', '"context": 4096')
    saved.write_text(text)
    assert code_of(read_plan, saved) == "FT4006"


def test_a_plan_without_an_id_is_refused(saved):
    document = json.loads(saved.read_text())
    del document["id"]
    saved.write_text(json.dumps(document))
    assert code_of(read_plan, saved) == "FT4006"


def test_a_plan_of_another_fabric_and_one_of_supposed_clusters_are_not_sound():
    assert code_of(check_sound, plan(), "another", {"c"}) == "FT4005"
    assert code_of(check_sound, plan(assumed=True), "f", {"c"}) == "FT4023"


@pytest.fixture
def signed(saved):
    """Signs `saved` with a key of one's own: the file of allowed signers, and a way to sign anew."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("there is no ssh-keygen here")
    keys = [saved.with_name(name) for name in ("reviewer", "stranger")]
    for key in keys:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    signers = saved.with_name("signers")
    signers.write_text(f"reviewer@site {keys[0].with_suffix('.pub').read_text()}")

    def sign(key=0, namespace=NAMESPACE):
        saved.with_name("plan.json.sig").unlink(missing_ok=True)
        argv = ["ssh-keygen", "-q", "-Y", "sign", "-n", namespace, "-f", keys[key], saved]
        subprocess.run(argv, check=True, capture_output=True)
        return signers

    return sign


def test_a_reviewers_signature_lets_a_plan_through(saved, signed):
    assert read_plan(saved, signed()) == PLAN


def test_other_signatures_do_not(saved, signed):
    signers = saved.with_name("signers")
    assert code_of(read_plan, saved, signers) == "FT4022"  # none at all
    assert code_of(read_plan, saved, signed(key=1)) == "FT4022"
    assert code_of(read_plan, saved, signed(namespace="git")) == "FT4022"
    signed()
    saved.write_bytes(encode_file(plan(action("delete", former="o-g1"))))  # with a new and right id
    assert read_plan(saved).id != PLAN.id
    assert code_of(read_plan, saved, signers) == "FT4022"
