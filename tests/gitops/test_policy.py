"""Rules over a plan: which limits are not kept, and where they were written."""

import calendar
import textwrap

import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.blueprint.policy import load_policy
from fabrictool.domain.policy import ReviewPolicy
from fabrictool.planner.policy import evaluate
from tests.gitops.plans import action, forecast, plan, replica, spec

WEDNESDAY_10 = calendar.timegm((2026, 3, 4, 10, 0, 0))


def findings(limits, made, *, protected=(), now=WEDNESDAY_10, effect="deny"):
    rules = ({"name": "r", effect: limits},)
    policy = ReviewPolicy.model_validate({"apiVersion": "fabrictool/v1", "kind": "Policy", "rules": rules})
    return [(each.effect, each.limit, each.text) for each in evaluate(policy, made, protected=protected, now=now)]


def limits_broken(limits, made, **options):
    return [limit for _, limit, _ in findings(limits, made, **options)]


BUSY = plan(
    action("create", "m/2"), action("replace", "m/1", former="o"), action("delete", "m/0", former="o"),
    action("keep", "k/0"), action("unknown", "k/1"),
    models=[forecast("m"), forecast("k")],
)  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "broken"),
    [
        ({"max_changes": 3}, False),
        ({"max_changes": 2}, True),
        ({"max_deletes": 1}, False),
        ({"max_deletes": 0}, True),
        ({"max_replaces": 1}, False),
        ({"max_replaces": 0}, True),
        ({"min_replicas_after": {"m": 2}}, False),
        ({"min_replicas_after": {"m": 3}}, True),
        ({"min_replicas_after": {"k": 2}}, False),  # what is out of sight is there
        ({"min_replicas_after": {"*": 2}}, False),
        ({"min_replicas_after": {"*": 3, "m": 1, "k": 1}}, False),  # a name wins over the star
        ({"min_replicas_after": {"other": 1}}, True),
        ({"keep": ("k",)}, False),
        ({"keep": ("m",)}, True),
        ({"keep": ("*",)}, True),
        ({"places_forbidden": ("c/other", "d")}, False),
        ({"places_forbidden": ("c/n",)}, True),
        ({"places_forbidden": ("c",)}, True),
    ],
)
def test_counts_models_and_places(limits, broken):
    assert bool(limits_broken(limits, BUSY)) is broken


def test_protected_models_are_those_of_the_blueprint():
    assert limits_broken({"keep_protected": True}, BUSY) == []
    assert limits_broken({"keep_protected": True}, BUSY, protected=["m"]) == ["keep_protected"]
    assert limits_broken({"keep_protected": False}, BUSY, protected=["m"]) == []


def test_the_end_of_what_a_replacement_left_is_no_loss():
    left = plan(action("keep", "m/0", former="new"), action("delete", "m/0", former="old"))
    assert limits_broken({"keep": ("m",), "min_replicas_after": {"m": 1}}, left) == []
    assert limits_broken({"max_deletes": 0}, left) == ["max_deletes"]


def test_providers_of_the_placement_and_of_what_is_started():
    made = plan(replicas=[replica("m/0", "alpha"), replica("k/0", "beta")])
    assert limits_broken({"providers_allowed": {"m": ("alpha",)}}, made) == []
    assert limits_broken({"providers_allowed": {"*": ("alpha",)}}, made) == ["providers_allowed"]
    assert limits_broken({"providers_allowed": {"*": ("alpha",), "k": ("beta",)}}, made) == []
    assert limits_broken({"providers_forbidden": {"m": ("beta",)}}, made) == []
    assert limits_broken({"providers_forbidden": {"*": ("beta",)}}, made) == ["providers_forbidden"]
    hidden = plan(action("create", spec=spec(provider="gamma")), replicas=[replica("m/0", "alpha")])
    assert limits_broken({"providers_allowed": {"m": ("alpha",)}}, hidden) == ["providers_allowed"]


@pytest.mark.parametrize(
    ("cost", "currency", "broken"), [(12.0, "CHF", False), (12.01, "CHF", True), (1.0, "EUR", True), (0.0, "", True)]
)
def test_cost(cost, currency, broken):
    found = findings({"max_cost_per_hour": "12 CHF/h"}, plan(cost=cost, currency=currency))
    assert bool(found) is broken, "what is not known is not below the limit"


def test_slo():
    made = plan(models=[forecast("m", misses=["TTFT p95 3 s above 1 s"]), forecast("k")])
    assert limits_broken({"slo_met": ("k",)}, made) == []
    ((effect, _, text),) = findings({"slo_met": ("*",)}, made, effect="warn")
    assert effect == "warn"
    assert "3 s above 1 s" in text


def test_an_slo_that_is_not_shown_to_be_met_is_not_met():
    made = plan(models=[forecast("m", slo="undecided", undecided=("TTFT within 1s: …",)), forecast("k", slo="meets")])
    assert limits_broken({"slo_met": ("k",)}, made) == []
    ((_, _, text),) = findings({"slo_met": ("*",)}, made)
    assert text == "m is not shown to meet its SLO, the replay leaves it undecided: TTFT within 1s: …"


@pytest.mark.parametrize(
    ("at", "inside"),
    [
        ((2026, 3, 4, 7, 59, 59), False),
        ((2026, 3, 4, 8, 0, 0), True),
        ((2026, 3, 4, 17, 59, 59), True),
        ((2026, 3, 4, 18, 0, 0), False),
        ((2026, 3, 7, 10, 0, 0), False),  # a Saturday
    ],
)
def test_hours(at, inside):
    hours = {"hours": {"days": ("mon", "wed"), "begin": "08:00", "end": "18:00"}}
    assert (limits_broken(hours, BUSY, now=calendar.timegm(at)) == []) is inside
    assert limits_broken(hours, plan(action("keep")), now=calendar.timegm(at)) == []


@pytest.mark.parametrize(
    ("day", "hour", "inside"), [(4, 23, True), (5, 3, True), (5, 6, False), (5, 23, False), (4, 3, False)]
)
def test_a_night_belongs_to_the_day_on_which_it_begins(day, hour, inside):
    hours = {"hours": {"days": ("wed",), "begin": "22:00", "end": "06:00"}}
    assert (limits_broken(hours, BUSY, now=calendar.timegm((2026, 3, day, hour, 0, 0))) == []) is inside


def test_every_limit_has_a_check_and_only_given_ones_are_looked_at():
    from fabrictool.domain.policy import Limits
    from fabrictool.planner.policy import _CHECKS

    assert set(_CHECKS) == set(Limits.model_fields)
    assert limits_broken({"max_changes": 100}, BUSY) == []


def write(tmp_path, text):
    file = tmp_path / "policy.yaml"
    file.write_text("apiVersion: fabrictool/v1\nkind: Policy\n" + textwrap.dedent(text))
    return file


def test_a_finding_has_the_place_of_its_limit(tmp_path):
    file = write(
        tmp_path,
        """\
        rules:
          - name: small
            warn: {max_changes: 5}
          - name: careful
            deny:
              max_changes: 9
              max_deletes: 0
        """,
    )
    loaded = load_policy(file)
    (found,) = evaluate(loaded.policy, BUSY, protected=(), now=0.0)
    place = loaded.place(found.index, found.effect, found.limit)
    assert (found.rule, place.line, place.column) == ("careful", 9, 7)
    assert place.source_line == "      max_deletes: 0"


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("rules: []\n", "FT1107", 3),
        ("rules:\n  - name: r\n", "FT3004", 4),
        ("rules:\n  - {name: r, deny: {}}\n", "FT3004", 4),
        ("rules:\n  - {name: r, deny: {max_deletes: 1}, warn: {max_deletes: 0}}\n", "FT3004", 4),
        ("rules:\n  - {name: r, deny: {max_delete: 1}}\n", "FT1101", 4),
        ("rules:\n  - {name: r, deny: {max_deletes: -1}}\n", "FT1105", 4),
        ("rules:\n  - {name: r, deny: {max_cost_per_hour: 12}}\n", "FT1110", 4),
        ('rules:\n  - {name: r, deny: {hours: {begin: "8:00", end: "18:00"}}}\n', "FT3004", 4),
        ("rules:\n  - {name: r, deny: {places_forbidden: [a/b/c]}}\n", "FT3004", 4),
        ("rules:\n  - {name: r, deny: {max_deletes: 1}}\n  - {name: r, deny: {max_deletes: 1}}\n", "FT3004", 3),
        ("rules: [\n", "FT1003", 4),
    ],
)
def test_a_wrong_policy_says_where(tmp_path, text, code, line):
    with pytest.raises(InvalidInputError) as error:
        load_policy(write(tmp_path, text))
    problem = error.value.problems[0]
    assert (problem.code, problem.place.line) == (code, line), problem.render()
    assert problem.place.file.endswith("policy.yaml")


def test_a_near_miss_is_named(tmp_path):
    with pytest.raises(InvalidInputError) as error:
        load_policy(write(tmp_path, "rules:\n  - {name: r, deny: {max_delete: 1}}\n"))
    assert "max_deletes" in error.value.problems[0].hint
