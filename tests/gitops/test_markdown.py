"""The comment: complete, never too long, and no name in it becomes markup."""

import html
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabrictool.cli.fabric_answers import PolicyRow
from fabrictool.cli.plan_markdown import LIMIT, markdown, marker
from tests.gitops.plans import action, forecast, plan

HOSTILE = "x](http://evil) <img src=a> | `c` *b* @team #12 --> <!-- \u202e :smile: &amp; ~~s~~ \\"


def text_of(line):
    """What a reader sees."""
    return html.unescape(re.sub(r"</?(code|details|summary)>", "", line))


def test_a_plan_as_a_comment():
    made = plan(
        action("create", "m/2", reason="the former one ended"), action("replace", "m/1", changes=("tp: 1 → 2",)),
        action("delete", "m/0", cluster="d"), action("keep", "m/3"),
        models=[forecast("m", misses=["TTFT p95 3 s above 1 s"])], cost=3.5, currency="CHF", warnings=("beware",),
    )  # fmt: skip
    text = markdown(made, [PolicyRow(effect="warn", rule="r", message="r: too many", place="policy.yaml:3:1")])
    lines = text.splitlines()
    assert lines[0] == marker("f") == "<!-- fabrictool plan f -->"
    assert text_of(lines[1]) == "### ⚠️ f: 1 create, 1 replace, 1 delete, 1 keep"
    seen = text_of(text)
    assert "| c | 1 |  | 1 |  | 1 |  |" in seen
    assert "| d |  |  |  | 1 |  |  |" in seen
    assert "- tp: 1 → 2" in seen
    assert "- the former one ended" in seen
    assert "replica/m/3" not in seen, "what stays is counted and not listed"
    assert "▲ TTFT p95 3 s above 1 s" in seen
    assert "cost 3.50 CHF/h" in seen
    assert "- ⚠️ beware" in seen
    assert "⚠️ warned of: r: too many (policy.yaml:3:1)" in seen
    assert f"Plan {made.id}" in seen


def test_no_changes_denials_and_kept_policies_are_seen_at_once():
    assert "f: no changes" in text_of(markdown(plan(action("keep"))))
    assert "every review rule is kept" in markdown(plan(), [])
    assert "policy" not in markdown(plan())
    denied = markdown(plan(action("create")), [PolicyRow(effect="deny", rule="r", message="r: no", place="p:1:1")])
    assert text_of(denied.splitlines()[1]).startswith("### ⛔ f")


def test_nothing_in_a_plan_becomes_markup():
    made = plan(
        action("create", HOSTILE + "/0", cluster=HOSTILE, summary=HOSTILE, reason=HOSTILE, changes=(HOSTILE,)),
        models=[forecast(HOSTILE, misses=[HOSTILE])], warnings=(HOSTILE, "two\nlines"), fabric=HOSTILE,
    )  # fmt: skip
    text = markdown(made, [PolicyRow(effect="deny", rule="r", message=HOSTILE, place=HOSTILE)])
    assert text.count("<!--") == text.count("-->") == 1
    assert set(re.findall(r"</?(\w+)", text)) == {"code", "details", "summary"}
    assert "\u202e" not in text
    for content in re.findall(r"<code>(.*?)</code>", text, re.DOTALL):
        assert not set(re.sub(r"&#\d+;", "", content)) & set("<>&`*_[]|@#~\\\n")
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert [{row.count("|") for row in table.splitlines()} for table in tables] == [{8}, {7}]
    assert "two lines" in text


@pytest.mark.parametrize("count", [1, 100, 2000])
def test_it_is_never_too_long_and_says_how_much_is_left_out(count):
    actions = [
        action("create", f"m{i}/0", cluster=f"c{i}", summary="<" * 400, changes=("&" * 400,) * 50) for i in range(count)
    ]
    made = plan(
        *actions, models=[forecast(f"m{i}", misses=["<" * 200]) for i in range(count)],
        warnings=tuple("@" * 500 for _ in range(count)),
    )  # fmt: skip
    text = markdown(made, [PolicyRow(effect="deny", rule="r", message="*" * 400, place="p:1:1")] * count)
    assert len(text) < LIMIT
    assert text.splitlines()[-1].startswith("Plan ")
    shown = len(re.findall("<details>", text))
    assert shown == text.count("</details>")
    left = re.findall(r"^(\d+) more (.*) are left out", text, re.MULTILINE)
    if count > 1:
        assert {what for _, what in left} == {
            "findings", "rows of the clusters", "rows of the forecast", "warnings", "actions"
        } - ({"rows of the clusters"} if count == 100 else set())  # fmt: skip
        assert {what: int(n) for n, what in left}["actions"] == count - shown


@settings(max_examples=60)
@given(st.text(max_size=80), st.integers(0, 40))
def test_any_name(name, count):
    made = plan(*[action("create", f"{name}/{i}", summary=name, reason=name) for i in range(count)], warnings=(name,))
    text = markdown(made)
    assert len(text) < LIMIT
    assert set(re.findall(r"</?(\w+)", text)) <= {"code", "details", "summary"}
    assert len(text.splitlines()[0]) < 100
