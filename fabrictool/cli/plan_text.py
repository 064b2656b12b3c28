"""A plan as a person reads it: what changes, what is forecast, what it costs; fits 80 columns where names allow."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.clock import duration_text, minute_text
from fabrictool.base.units import Duration
from fabrictool.cli.fabric_answers import PlanAnswer, TimedCertificate
from fabrictool.cli.output import seconds_text, table, terminal_columns
from fabrictool.planner.explaining.wording import told
from fabrictool.planner.stages import NOUNS
from fabrictool.state.planfile import plan_document

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.cli.fabric_answers import PolicyRow
    from fabrictool.domain.observed import Observed
    from fabrictool.domain.plan import Action, Band, Certificate, Forecast, ModelForecast, Outlook, Plan, StartTime

SYMBOLS = {"create": "+", "update": "~", "replace": "~", "delete": "-", "keep": "=", "unknown": "?"}

UNCHANGED = "nothing has changed since the last apply, so the placement stays as it is (--improve searches for better)"


def render(plan: Plan, observed: Observed, *, verbosity: int = 0, explain: bool = False) -> str:
    """The default view; `verbosity` 1 adds kept units and changed fields, 2 the operations."""
    known = sum(facts.known for facts in observed.clusters.values())
    seen = "no cluster was asked" if plan.assumed else f"observed {known} of {len(observed.clusters)} clusters"
    lines = [f"Fabric {plan.fabric}   blueprint {plan.blueprint_digest[:7]}   {seen}"]
    if plan.assumed:
        lines.append("! every cluster is assumed to be there and empty; this plan cannot be applied")
    for name, facts in sorted(observed.clusters.items()):
        if not facts.known:
            lines += folded(f"! {name} is unknown: {facts.reason}")
            lines.append("  nothing on it will be touched")
    lines += [line for warning in plan.warnings for line in folded(f"! {warning}")]
    lines.append("")
    unknown = frozenset(name for name, facts in observed.clusters.items() if not facts.known)
    lines += action_lines(plan, verbosity, unknown)
    lines += [line for text in _moves_lines(plan) for line in folded(text)]
    lines += folded(UNCHANGED) if plan.unchanged is True and not plan.certificate.optimal else []
    lines += ["", *_forecast_lines(plan)]
    if explain:
        lines += ["", "Why:", *[line for reason in plan.reasons for line in folded(f"  · {reason}", "    ")]]
    lines += ["", _verdict(plan)]
    return "\n".join(lines)


def as_document(plan: Plan, seconds: float, policy: Sequence[PolicyRow] | None = None) -> str:
    """The saved plan's JSON, and what the search took: no part of the plan, which is the same on any machine.

    `policy`: what a policy denies and warns of; None when none was asked.
    """
    saved = plan_document(plan)
    certificate = TimedCertificate(**msgspec.structs.asdict(plan.certificate), seconds=round(seconds, 3))
    head = PlanAnswer(id=plan.id, release=saved["release"], certificate=certificate)
    if policy is not None:
        head = msgspec.structs.replace(head, policy=list(policy))
    document = saved | msgspec.to_builtins(head)
    return msgspec.json.format(msgspec.json.encode(document, order="sorted"), indent=1).decode()


def action_lines(plan: Plan, verbosity: int, told: frozenset[str] = frozenset()) -> list[str]:
    """What would be done, an action a line; `verbosity` as for `render`.

    Why a cluster is unknown is said once, and not of those whose trouble was `told` before.
    """
    shown = [a for a in plan.actions if a.kind != "keep" or verbosity]
    kept = len(plan.actions) - len(shown)
    width = max((len(a.address) for a in shown), default=0)
    edge, lines = terminal_columns(), []
    outlooks = {outlook.address: _outlook_lines(outlook) for outlook in plan.outlook}
    starts = {start.address: [_start_line(start)] for start in plan.starts}
    for action in shown:
        lines += _within(f"  {SYMBOLS[action.kind]} {action.kind:<7} {action.address:<{width}}", action.summary, edge)
        if action.kind == "unknown":
            lines += [f"            {action.reason}"] if action.reason and action.cluster not in told else []
            told |= {action.cluster}
        elif action.reason and (verbosity or action.kind in ("delete", "create") or not action.changes):
            lines.append(f"            {action.reason}")
        lines += [
            f"            {text}" for text in (*outlooks.get(action.address, ()), *starts.get(action.address, ()))
        ]
        if verbosity:
            lines += [f"            {change}" for change in action.changes]
        elif action.changes:
            lines.append(f"            {_first_changes(action)}")
        if verbosity > 1 and action.operation:
            lines.append(f"            operation {action.operation}")
    if kept:
        lines.append(f"  = keep    {kept} unit{'s' if kept > 1 else ''}   (show: -v)")
    return lines or ["  nothing is running and nothing is requested"]


def _moves_lines(plan: Plan) -> list[str]:
    """What of the running replicas changes places or number, what that takes, and what for."""
    its = plan.moves
    if isinstance(its, msgspec.UnsetType):
        return []
    loading = f" ({duration_text(its.loading_s)} of loading, {its.devices} device{'s'[: its.devices != 1]})"
    parts = [f"{its.starts} to start{loading}"] if its.starts else []
    parts += [f"{its.stops} to stop"] if its.stops else []
    return [f"  moves: {', '.join(parts)}" + (f"; {its.otherwise}" if its.otherwise else "")]


def folded(sentence: str, indent: str = "  ") -> list[str]:
    """Over several lines between words, on a terminal; a file has no edge."""
    edge = terminal_columns()
    if edge is None or len(sentence) <= edge:
        return [sentence]
    return textwrap.wrap(
        sentence, edge, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )


def _within(head: str, summary: str, edge: int | None) -> list[str]:
    """On one line, or on two where a terminal is too narrow; a file has no edge."""
    whole = f"{head}  {summary}"
    return [whole] if edge is None or len(whole) <= edge else [head.rstrip(), f"            {summary}"]


def _outlook_lines(outlook: Outlook) -> list[str]:
    words = [outlook.queue] if outlook.queue else []
    if outlook.starts_at is not None:
        words.append(f"would start {minute_text(outlook.starts_at)}")
    if outlook.walltime_s is not None:
        end = f", until {minute_text(outlook.ends_at)}" if outlook.ends_at is not None else ""
        words.append(f"walltime {outlook.walltime_s / 3600:.1f} h{end}")
    return ["; ".join(words), *([f"window: {outlook.window}"] if outlook.window else [])]


def _start_line(start: StartTime) -> str:
    where = f"loader {start.loader}" if start.alike else "by other loaders or elsewhere"
    number = f"{start.starts} start{'s'[: start.starts != 1]}"
    return f"should serve after {start.median_s:.3g} s, as measured ({number}, {where})"


def _first_changes(action: Action) -> str:
    more = len(action.changes) - 2
    return "; ".join(action.changes[:2]) + (f" (+{more}: -v)" if more > 0 else "")


def _forecast_lines(plan: Plan) -> list[str]:
    forecast = plan.forecast
    headings = ("forecast", "TTFT p95 (band)", "TPOT p95 (band)", "load", "SLO (replayed)")
    lines = table(headings, [_model_cells(model) for model in forecast.models]).splitlines()
    lines += [
        line for model in forecast.models for text in complaints(model) for line in folded(f"  ▲ {model.model}: {text}")
    ]
    for model in forecast.models:
        lines += [line for text in (*group_lines(model), *loss_lines(model)) for line in folded(f"  {text}", "    ")]
    lines += [line for model in forecast.models if model.variants for line in folded(f"  {_variants(model)}")]
    lines += [line for model in forecast.models if model.spared for line in folded(f"  {_spared(model)}", "    ")]
    lines += [line for model in forecast.models if model.demand for line in folded(f"  {_windows(model)}", "    ")]
    lines += [line for text in _at_once(forecast) for line in folded(f"  {text}")]
    cost = f"{forecast.cost_per_hour:.2f} {forecast.currency}/h" if forecast.currency else "no prices in the inventory"
    power = f"{forecast.power_w:.0f} W" if forecast.power_w else "no power figures"
    lines.append(f"cost {cost}   power {power}{carbon_text(forecast, '   ')}")
    lines += [line for text in limit_lines(forecast) for line in folded(text)]
    lines.append(f"basis: {forecast.basis}")
    certificate = plan.certificate
    word = proof_text(plan)
    lines += folded(f"solver {certificate.solver}: {word}, seed {certificate.seed}, work {certificate.work}", "  ")
    lines += [
        line
        for stage in certificate.stages
        if not isinstance(stage.spared, msgspec.UnsetType)
        for line in folded(f"{NOUNS[stage.name]} {stage.spared:.1%} above what more moves would reach: not worth them")
    ]
    return lines


def carbon_text(forecast: Forecast, before: str) -> str:
    """What is emitted, where that is known."""
    grams = forecast.carbon_g_per_hour
    return "" if isinstance(grams, msgspec.UnsetType) else f"{before}carbon {grams / 1000.0:.3g} kg CO2e/h"


def proof_text(plan: Plan) -> str:
    """What is proved of it; what stays as it was applied was not searched, and only its first plan says that."""
    if plan.unchanged is True and not plan.certificate.optimal:
        return "not searched again, as nothing has changed since it was applied"
    gap = gap_text(plan.certificate, plan.forecast.currency)
    return f"optimal ({gap})" if plan.certificate.optimal else gap


def gap_text(certificate: Certificate, currency: str) -> str:
    """How far from proved it is: against what was asked, and against what the replay left of it."""
    name, gap = certificate.stage, "no gap"
    if certificate.gap:
        reached, best = (told(name, value, currency) for value in (certificate.objective, certificate.bound))
        gap = f"gap {certificate.gap:.2%} in {name} ({reached}, and no less than {best} can be)"
    if not (certificate.lessons and certificate.gap):
        return gap
    rest = f"{certificate.gap_with_lessons:.2%}" if certificate.gap_with_lessons else "none"
    return f"{gap} before the replay's lessons, {rest} with them"


def _model_cells(model: ModelForecast) -> tuple[str, ...]:
    slo: str = model.slo or "–"
    if model.slo and model.served < 1.0:
        slo += f" ({share_text(model.served)} served)"
    elif model.slo and model.replay is not None:
        slo += f" ({share_text(model.replay.attainment)})"
    load = f"{model.utilisation:.0%}" if model.utilisation < 10 else ">999%"
    load += " asked" if model.served < 1.0 else ""
    return model.model, _band(model.ttft_p95_s), _band(model.tpot_p95_s), load, slo


def _variants(model: ModelForecast) -> str:
    """Which of a model's variants do how much."""
    of_each = () if isinstance(model.variants, msgspec.UnsetType) else model.variants
    loaded = any(its.share for its in of_each)
    parts = [
        f"{its.replicas} as {its.variant}" + (f" ({its.share:.0%} of its load)" if loaded else "") for its in of_each
    ]
    return f"{model.model}: {', '.join(parts)}"


def _spared(model: ModelForecast) -> str:
    """What of the forecast's error band the targets are met in."""
    if isinstance(model.spared, msgspec.UnsetType):
        return ""
    ttft, tpot, e2e = (f"{factor:.3g}" for factor in model.spared)
    return f"{model.model}: judged as if it took longer than forecast: TTFT {ttft}, TPOT {tpot} and E2E {e2e} times"


def _windows(model: ModelForecast) -> str:
    """What quantile of its demand is planned for, and in how many windows the placement holds."""
    its = model.demand
    if isinstance(its, msgspec.UnsetType):
        return ""
    between = f" ({its.low:.3g}–{its.high:.3g})" if its.low < its.high else ""
    of_what = "of its trace" if its.counted else "by its chance"
    rate = f"{model.model}: planned for {its.planned:.3g} req/s{between}, mean {its.mean:.3g}"
    windows = f"{its.quantile * 100:g}% of {Duration(its.window_s)} windows {of_what} ask for no more"
    lost = f", {its.unserved:.2g} req/s unserved in the mean" if its.unserved else ""
    held = (
        f"within the SLO in {share_text(its.held)} of them"
        if model.slo
        else f"served in {share_text(its.served)} of them"
    )
    return f"{rate}: {windows}; {held}{lost}"


def _at_once(forecast: Forecast) -> list[str]:
    """In how many windows all models that are planned for a quantile hold."""
    if isinstance(forecast.held_together, msgspec.UnsetType):
        return []
    within = " within their SLOs" if any(model.slo for model in forecast.models if model.demand) else ""
    wanted = forecast.wanted_together
    asked = "" if isinstance(wanted, msgspec.UnsetType) else f", planned for {share_text(wanted)}"
    return [f"these models at once: served{within} in {share_text(forecast.held_together)} of windows{asked}"]


def complaints(model: ModelForecast) -> list[str]:
    """What is not as it was asked for, who says so where two opinions differ, and why nothing more was done."""
    lines = [*([model.unserved] if model.unserved else []), *model.misses]
    lines += [f"undecided: {text}" for text in model.undecided]
    survival = model.survival
    if survival is not None and survival.worst:
        left = f"only {share_text(survival.served)} of the demand is" if survival.served else "nothing is"
        lines.append(f"it does not survive the loss of any {survival.loss}: without {survival.worst} {left} served")
    after = None if survival is None else survival.replay
    if after and after.slo in ("misses", "undecided"):
        doubt = "undecided: " if after.slo == "undecided" else ""
        lines += [f"{doubt}without {after.without} {text}" for text in after.misses]
    if model.overruled:
        lines.append(f"the closed form says {model.overruled}; the replay is trusted")
    return [*lines, *([f"because {model.why}"] if model.why else [])]


def limit_lines(forecast: Forecast) -> list[str]:
    """How much of each limit is used."""
    return [
        f"limit {use.name}: {_amount(use.used)} of {_amount(use.most)} {use.unit} ({use.whose or 'the whole fabric'})"
        for use in (() if isinstance(forecast.limits, msgspec.UnsetType) else forecast.limits)
    ]


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == round(value) else f"{value:.4g}"


def group_lines(model: ModelForecast, *, lacking: bool = False) -> list[str]:
    """Of a model whose demand is divided by consumer group: who gets what of it, and from how many replicas; of the
    `lacking` alone where only these are asked for.
    """
    lines = []
    for group in () if isinstance(model.groups, msgspec.UnsetType) else model.groups:
        who = f"group {group.group}" if group.group else "everybody else"
        got = "all served" if group.served >= 1 else f"only {share_text(group.served)} of that served"
        got += f", {_dealt_out(group.sent)}" if group.sent else ""
        few = "" if group.replicas == model.replicas else f"of {model.replicas} "
        may = f"{group.replicas} {few}replica{'s'[: model.replicas != 1]} may answer"
        kind = None if model.survival is None else model.survival.loss
        lost = "" if group.left is None or kind is None else f", {group.left} after any {kind} is lost"
        lacks = group.served < 1 or not group.replicas
        if lacks or not lacking:
            mark = "▲ " if lacks and not lacking else ""
            lines.append(f"{mark}{model.model} for {who} ({group.share * 100:.3g}%): {got}; {may}{lost}")
    return lines


def _dealt_out(sent: Mapping[str, float]) -> str:
    """``by south``, or ``70% by south, 30% by north``: most of it first."""
    ordered = sorted(sent.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{share * 100:.3g}% by {place}" if len(sent) > 1 else f"by {place}" for place, share in ordered)


def loss_lines(model: ModelForecast) -> list[str]:
    """Of a model that is to survive a loss, and does: what the rest is shown to keep."""
    survival = model.survival
    after = None if survival is None or survival.worst else survival.replay
    if not after or after.slo != "meets":
        return []
    left = f"{share_text(after.attainment)} of requests within the SLO in the replay"
    return [f"{model.model} without {after.without}, its worst loss: {left}"]


def share_text(share: float) -> str:
    """Rounded down: what lacks something is never 100 %."""
    return f"{math.floor(share * 100 + 1e-9)}%"


def _band(band: Band) -> str:
    """``640 ms (560–760)``: its edges in the unit of the value."""
    if band.value < 0.9995:
        return f"{seconds_text(band.value)} ({band.low * 1000:.0f}–{band.high * 1000:.0f})"
    return f"{seconds_text(band.value)} ({band.low:.2g}–{band.high:.2g})"


def _verdict(plan: Plan) -> str:
    counts = {kind: sum(a.kind == kind for a in plan.actions) for kind in SYMBOLS}
    words = [f"{counts['create']} create"]
    if counts["update"]:
        words.append(f"{counts['update']} update")
    words += [f"{counts['replace']} replace", f"{counts['delete']} delete"]
    words.append(f"{counts['keep']} keep")
    if counts["unknown"]:
        words.append(f"{counts['unknown']} unknown")
    text = ", ".join(words)
    return f"Plan: {text}." if plan.changes else f"No changes. Plan: {text}."
