"""What one command's output says once: why a step failed, and why a cluster is unknown."""

import pytest

from fabrictool.cli.applying import TextReporter
from fabrictool.cli.plan_text import action_lines, render
from fabrictool.cli.planning import say_what_is_missing
from fabrictool.cli.watching import _detail
from fabrictool.domain.observed import ClusterFacts, Observed
from fabrictool.domain.plan import Action, Certificate, Forecast, Placement, Plan

WHY = "far is unknown: nobody answers"


def unknown(index):
    return Action(kind="unknown", address=f"replica/m/{index}", cluster="far", summary="far  1×a100", reason=WHY)


@pytest.fixture
def plan():
    return Plan(
        fabric="f", lineage="", blueprint_digest="b", read_set={}, actions=(unknown(0), unknown(1)),
        placement=Placement(), forecast=Forecast(models=(), cost_per_hour=0, currency="", power_w=0, basis=""),
        certificate=Certificate(solver="", seed=0, optimal=True, stages=(), tables_sha256=""),
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["failed", "held"])
def test_a_progress_line_leaves_the_reason_to_the_error_that_follows(plan, capsys, kind):
    TextReporter().step(plan.actions[0], kind, "FT5105: why it failed")
    line = capsys.readouterr().err
    assert "replica/m/0" in line
    assert "see below" in line
    assert "FT5105" not in line


def test_why_a_cluster_is_unknown_is_said_once_for_all_its_units(plan):
    assert sum(WHY in line for line in action_lines(plan, 0)) == 1
    seen = Observed(clusters={"far": ClusterFacts(cluster="far", known=False, reason="nobody answers")})
    assert render(plan, seen, verbosity=1).count("nobody answers") == 1


@pytest.mark.parametrize(("shown", "times"), [(True, 0), (False, 1)])
def test_the_error_gives_the_reason_where_no_plan_was_shown(plan, capsys, shown, times):
    assert say_what_is_missing(None, plan, None, shown=shown) == 69
    said = capsys.readouterr().err
    assert said.count("nobody answers") == times
    assert said.count("far is needed and did not answer") == (1 if shown else 0)


def test_status_leaves_the_reason_to_the_line_of_the_cluster():
    assert _detail({"state": "unknown", "detail": "its cluster does not answer"}) == ""
    assert _detail({"state": "missing", "detail": "applied, and not there"}) == "applied, and not there"
