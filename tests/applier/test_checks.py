"""Is a plan fresh? What was updated since is another fact, but for what our own unfinished run did."""

import pytest

from fabrictool.applier.checks import check_fresh
from fabrictool.applier.journal import Entry
from fabrictool.base.errors import StaleError
from fabrictool.domain.observed import ClusterFacts, Observed, ObservedUnit
from fabrictool.domain.plan import Action, Certificate, Forecast, Placement, Plan
from fabrictool.domain.state import State
from fabrictool.planner.readset import unit_facts

UPDATE = Action(kind="update", address="gateway/g", cluster="c", summary="", operation="gateway-g-g1-00000000")


def observed(digest, in_force="current"):
    unit = ObservedUnit(
        address="gateway/g", operation=UPDATE.operation, state="running", spec_digest=digest, in_force=in_force
    )
    return Observed(clusters={"c": ClusterFacts(cluster="c", known=True, units=(unit,))})


def check(seen, *, begun):
    plan = Plan(
        fabric="f",
        lineage="l",
        blueprint_digest="b",
        read_set=unit_facts(observed("1")),
        actions=(UPDATE,),
        placement=Placement(),
        forecast=Forecast(models=(), cost_per_hour=0.0, currency="", power_w=0.0, basis=""),
        certificate=Certificate(solver="", seed=0, optimal=True, stages=(), tables_sha256=""),
    )
    entries = [Entry(at=0.0, plan=plan.id, kind="intent", address="gateway/g", action="update")] if begun else []
    check_fresh(plan, seen, unit_facts(seen), entries, State(lineage="l", serial=1), "l")


def test_a_gateway_that_somebody_else_updated_makes_a_plan_stale():
    check(observed("1"), begun=False)
    with pytest.raises(StaleError, match="unit/gateway/g"):
        check(observed("2"), begun=False)


def test_what_our_own_run_updated_before_a_crash_does_not():
    check(observed("2", in_force="former"), begun=True)
