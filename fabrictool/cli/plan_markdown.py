"""A plan as one comment on a pull or merge request: always short enough, and nothing in it can become markup.

All that comes from a plan stands in ``<code>``, with every character that means something to Markdown or HTML written
as an entity: no link, mention or comment can be made of a name.
"""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from fabrictool.cli.output import seconds_text
from fabrictool.cli.plan_text import SYMBOLS, carbon_text, complaints, group_lines, limit_lines, proof_text, share_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fabrictool.cli.fabric_answers import PolicyRow
    from fabrictool.domain.plan import Action, ModelForecast, Plan

KINDS = ("create", "update", "replace", "delete", "keep", "unknown")
LIMIT = 60_000
"""Characters of a comment; hosts take 65,536 at most."""
_ROOM = {"policy": 8_000, "clusters": 8_000, "forecast": 12_000, "warnings": 6_000}
"""Characters of each section; the actions have what is left."""
_CUT = 300
"""Characters of one name or sentence."""
_CHANGES = 30
"""Changed fields of one action."""
_SPECIAL = frozenset("&<>\"'`*_[](){}|~#!\\$@:")


def marker(fabric: str) -> str:
    """The hidden first line, by which the one comment of a fabric is found again."""
    safe = "".join(
        character for character in fabric if character.isascii() and (character.isalnum() or character in "._")
    )
    return f"<!-- fabrictool plan {safe[:64]} -->"


def markdown(plan: Plan, policy: Sequence[PolicyRow] | None = None) -> str:
    """`policy`: rows of what is denied and warned of; None without a policy file."""
    head = [marker(plan.fabric), f"### {_mark(policy)}{_code(plan.fabric)}: {_summary(plan)}", ""]
    tail = ["", f"Plan {_code(plan.id)}, blueprint {_code(plan.blueprint_digest[:7])}", ""]
    body = [
        *_policy(policy),
        *_table(("cluster", *KINDS), _clusters(plan), "clusters"),
        *_table(("model", "replicas", "TTFT p95", "TPOT p95", "load", "SLO"), _forecast(plan), "forecast"),
        *_totals(plan),
        *_bounded([f"- ⚠️ {_code(text)}" for text in plan.warnings], _ROOM["warnings"], "warnings"),
        "",
    ]
    room = LIMIT - sum(len(line) + 1 for line in (*head, *body, *tail)) - 1
    shown = [action for action in plan.actions if action.kind != "keep"]
    return "\n".join([*head, *body, *_bounded([_details(action) for action in shown], room, "actions"), *tail])


def counts(actions: Iterable[Action]) -> dict[str, int]:
    """How many of each kind."""
    counted = dict.fromkeys(SYMBOLS, 0)
    for action in actions:
        counted[action.kind] += 1
    return counted


def _mark(policy: Sequence[PolicyRow] | None) -> str:
    if any(row.effect == "deny" for row in policy or ()):
        return "⛔ "
    return "⚠️ " if policy else ""


def _summary(plan: Plan) -> str:
    if not plan.changes and not any(action.kind == "unknown" for action in plan.actions):
        return "no changes"
    return ", ".join(f"{count} {kind}" for kind, count in counts(plan.actions).items() if count)


def _policy(policy: Sequence[PolicyRow] | None) -> list[str]:
    if policy is None:
        return []
    if not policy:
        return ["✅ every review rule is kept", ""]
    ordered = sorted(policy, key=lambda row: row.effect != "deny")
    words = {"deny": "⛔ denied", "warn": "⚠️ warned of"}
    lines = [f"- {words[row.effect]}: {_code(row.message)} ({_code(row.place)})" for row in ordered]
    return [*_bounded(lines, _ROOM["policy"], "findings"), ""]


def _clusters(plan: Plan) -> list[str]:
    rows = []
    for cluster in sorted({action.cluster for action in plan.actions}):
        counted = counts(action for action in plan.actions if action.cluster == cluster)
        numbers = [counted[kind] for kind in KINDS]
        rows.append(_row([_code(cluster), *(str(number) if number else "" for number in numbers)]))
    return rows


def _forecast(plan: Plan) -> list[str]:
    return [_row(_model(model)) for model in plan.forecast.models]


def _model(model: ModelForecast) -> list[str]:
    wrong = [*complaints(model), *group_lines(model, lacking=True)]
    slo = "▲ " + _code("; ".join(wrong)) if wrong else model.slo or "–"
    if model.slo and model.served < 1.0:
        slo += f" ({share_text(model.served)} served)"
    elif model.slo and model.replay is not None:
        slo += f" ({share_text(model.replay.attainment)})"
    load = f"{model.utilisation:.0%}" if model.utilisation < 10 else "&gt;999%"
    load += " asked" if model.served < 1.0 else ""
    times = [seconds_text(band.value) for band in (model.ttft_p95_s, model.tpot_p95_s)]
    return [_code(model.model), str(model.replicas), *times, load, slo]


def _totals(plan: Plan) -> list[str]:
    forecast, certificate = plan.forecast, plan.certificate
    words = []
    if forecast.currency:
        words.append(f"cost {forecast.cost_per_hour:.2f} {_code(forecast.currency)}/h")
    if forecast.power_w:
        words.append(f"power {forecast.power_w:.0f} W{carbon_text(forecast, ' · ')}")
    words += map(_code, limit_lines(forecast))
    words.append(f"solver {_code(certificate.solver)}, {_code(proof_text(plan))}")
    return [" · ".join(words), f"Basis: {_code(forecast.basis)}", ""]


def _details(action: Action) -> str:
    head = f"{SYMBOLS[action.kind]} {action.kind} {_code(action.address)} {_code(action.summary)}"
    lines = [_code(action.reason)] if action.reason else []
    lines += [_code(change) for change in action.changes[:_CHANGES]]
    if len(action.changes) > _CHANGES:
        lines.append(f"and {len(action.changes) - _CHANGES} more fields")
    if not lines:
        return f"- {head}"
    return "\n".join([f"<details><summary>{head}</summary>", "", *[f"- {line}" for line in lines], "", "</details>"])


def _table(headings: Sequence[str], rows: Sequence[str], what: str) -> list[str]:
    if not rows:
        return []
    return [
        _row(headings),
        f"|:--{'|--:' * (len(headings) - 1)}|",
        *_bounded(rows, _ROOM[what], f"rows of the {what}"),
        "",
    ]


def _bounded(rows: Sequence[str], room: int, what: str) -> list[str]:
    """As many whole rows as there is room for, and how many are left out."""
    rest = f"\n{len(rows)} more {what} are left out here; `fabrictool show PLAN` shows all"
    kept: list[str] = []
    used = 0
    for index, row in enumerate(rows):
        last = index == len(rows) - 1
        if used + len(row) + 1 + (0 if last else len(rest) + 1) > room:
            return [*kept, rest.replace(str(len(rows)), str(len(rows) - index), 1)]
        kept.append(row)
        used += len(row) + 1
    return kept


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _code(text: str) -> str:
    """Any text as what it is, on one line."""
    cut = text if len(text) <= _CUT else text[: _CUT - 1] + "…"
    return f"<code>{''.join(_entity(character) for character in cut)}</code>" if cut else ""


def _entity(character: str) -> str:
    if unicodedata.category(character)[0] == "C" and character not in "\t\n\r":
        return "\ufffd"  # such as what turns the direction of writing
    if character.isspace():
        return " "
    return f"&#{ord(character)};" if character in _SPECIAL else character
