"""``show``: a saved plan, as text, JSON or a comment; without one, every value of the blueprint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fabrictool.cli.options import (
    BlueprintOption,
    InventoryOption,
    JsonOption,
    OverlayOption,
    PolicyOption,
    ScenarioOption,
)

if TYPE_CHECKING:
    from fabrictool.base.errors import Problem
    from fabrictool.domain.observed import Observed
    from fabrictool.domain.plan import Plan


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("show")(show)


def show(
    plan_file: Annotated[
        Path | None, typer.Argument(metavar="[PLAN]", help="A saved plan; default: the blueprint's values.")
    ] = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    overlay: OverlayOption = None,
    scenario: ScenarioOption = None,
    resolved: Annotated[bool, typer.Option("--resolved", help="Every value after merging, with defaults.")] = True,
    origin: Annotated[bool, typer.Option("--origin", help="Where each value comes from.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Of a plan: one comment for a pull or merge request.")
    ] = False,
    policy: PolicyOption = None,
    as_json: JsonOption = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Of a plan: -v fields, -vv operations.")
    ] = 0,
) -> int:
    """Print a saved plan; without one, every value of the blueprint and the inventory, with --origin its place."""
    if plan_file is None:
        if as_markdown or policy is not None:
            raise typer.BadParameter("--markdown and --policy are for a saved plan")
        _values(blueprint, inventory, overlay, scenario, resolved=resolved, origin=origin, as_json=as_json)
        return 0
    from fabrictool.cli.applying import read_plan
    from fabrictool.cli.output import data, print_problems
    from fabrictool.cli.policies import as_rows, denied, policy_problems, protected_models

    if as_markdown and as_json:
        raise typer.BadParameter("either --markdown or --json")
    plan = read_plan(plan_file)
    problems = policy_problems(policy, plan, lambda: protected_models(blueprint, inventory, overlay, scenario))
    if as_markdown:
        from fabrictool.cli.plan_markdown import markdown

        data(markdown(plan, None if problems is None else as_rows(problems)))
    elif as_json:
        _document(plan, problems)
    else:
        from fabrictool.cli.plan_text import render

        data(f"{render(plan, _as_planned(plan), verbosity=verbose, explain=bool(verbose))}\nid {plan.id}")
    print_problems(problems or ())
    return 6 if denied(problems or ()) else 0


def _document(plan: Plan, problems: list[Problem] | None) -> None:
    import msgspec

    from fabrictool.cli.output import json_data
    from fabrictool.cli.plan_markdown import counts
    from fabrictool.cli.policies import as_rows
    from fabrictool.domain.plan import encode_plan

    document = {
        "format_version": "1",
        "type": "plan",
        "id": plan.id,
        "no_op": not plan.changes,
        "counts": counts(plan.actions),
        "plan": msgspec.json.decode(encode_plan(plan)),
    }
    if problems is not None:
        document["policy"] = as_rows(problems)
    json_data(document)


def _as_planned(plan: Plan) -> Observed:
    """Which clusters had answered, as far as the plan says."""
    from fabrictool.domain.observed import ClusterFacts, Observed

    clusters = {
        fact.removeprefix("cluster/"): value == "known"
        for fact, value in plan.read_set.items()
        if fact.startswith("cluster/")
    }
    return Observed(
        clusters={
            name: ClusterFacts(cluster=name, known=known, reason="" if known else "it did not answer then")
            for name, known in clusters.items()
        }
    )


def _values(
    blueprint: Path | None,
    inventory: Path | None,
    overlay: str | None,
    scenario: str | None,
    *,
    resolved: bool,
    origin: bool,
    as_json: bool,
) -> None:
    from fabrictool.blueprint.resolved import resolved as rows_of
    from fabrictool.cli.fabrics import load
    from fabrictool.cli.output import data, json_data, table

    rows = rows_of(load(blueprint, inventory, overlay=overlay, scenario=scenario))
    if not resolved:
        rows = [row for row in rows if row.origin.file is not None]
    if as_json:
        values = [{"path": row.path, "value": row.value, "origin": str(row.origin) or "default"} for row in rows]
        json_data({"format_version": "1", "type": "values", "values": values})
    elif origin:
        data(table(["PATH", "VALUE", "ORIGIN"], [[r.path, r.value, str(r.origin) or "default"] for r in rows]))
    else:
        data(table(["PATH", "VALUE"], [[row.path, row.value] for row in rows]))
