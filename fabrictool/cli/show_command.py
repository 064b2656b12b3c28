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
from fabrictool.cli.source import Source

if TYPE_CHECKING:
    from fabrictool.cli.policies import RuleVerdict
    from fabrictool.domain.observed import Observed
    from fabrictool.domain.plan import Plan


def register(app: typer.Typer) -> None:
    app.command("show")(show)


def show(
    plan_file: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="A saved plan; default: the blueprint's values.")
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
    scripts: Annotated[
        bool,
        typer.Option("--scripts", help="Of a plan: each job as the scheduler would be given it; asks the login nodes."),
    ] = False,
    policy: PolicyOption = None,
    as_json: JsonOption = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Of a plan: -v fields, -vv operations.")
    ] = 0,
) -> int:
    """Print a saved plan; without one, every value of the blueprint and the inventory, with --origin its place."""
    source = Source(blueprint, inventory, overlay, scenario)
    if plan_file is None:
        if as_markdown or scripts or policy is not None:
            raise typer.BadParameter("--markdown, --scripts and --policy are for a saved plan")
        _values(source, resolved=resolved, origin=origin, as_json=as_json)
        return 0
    from fabrictool.cli.output import data, print_problems
    from fabrictool.cli.policies import as_rows, exit_code, verdicts_on
    from fabrictool.state.planfile import read_plan

    if as_markdown and (as_json or scripts):
        raise typer.BadParameter("either --markdown, or --json or --scripts")
    if scripts and policy is not None:
        raise typer.BadParameter("--scripts judges nothing: no --policy with it")
    plan = read_plan(plan_file)
    if scripts:
        from fabrictool.applier.outlook import scripts_of
        from fabrictool.cli.job_scripts import show_scripts

        with source.fabric() as fabric:
            scripts_there = scripts_of(plan, fabric.clusters, fabric.folder.read_state().serial + 1)
        show_scripts(scripts_there, as_json=as_json)
        return 0
    verdicts = verdicts_on(plan, policy, source)
    if as_markdown:
        from fabrictool.cli.plan_markdown import markdown

        data(markdown(plan, None if verdicts is None else as_rows(verdicts)))
    elif as_json:
        _document(plan, verdicts)
    else:
        from fabrictool.cli.paging import page
        from fabrictool.cli.plan_text import render

        page(f"{render(plan, _as_planned(plan), verbosity=verbose, explain=bool(verbose))}\nid {plan.id}")
    print_problems(verdict.problem for verdict in verdicts or ())
    return exit_code(verdicts or ())


def _document(plan: Plan, verdicts: list[RuleVerdict] | None) -> None:
    import json

    import msgspec

    from fabrictool.cli.fabric_answers import SavedPlan, WrittenPlan
    from fabrictool.cli.output import json_text
    from fabrictool.cli.plan_markdown import counts
    from fabrictool.cli.policies import as_rows
    from fabrictool.state.planfile import plan_document

    saved = plan_document(plan)
    head = SavedPlan(
        id=plan.id,
        no_op=not plan.changes,
        counts=counts(plan.actions),
        plan=WrittenPlan(id=plan.id, release=saved["release"]),
        policy=msgspec.UNSET if verdicts is None else as_rows(verdicts),
    )
    json_text(json.dumps(msgspec.to_builtins(head) | {"plan": saved}, indent=1, ensure_ascii=False))


def _as_planned(plan: Plan) -> Observed:
    """Which clusters had answered, as far as the plan says."""
    from fabrictool.domain.observed import ClusterFacts, Observed

    clusters = {
        fact.removeprefix("cluster/"): value != "unknown"
        for fact, value in plan.read_set.items()
        if fact.startswith("cluster/")
    }
    return Observed(
        clusters={
            name: ClusterFacts(cluster=name, known=known, reason="" if known else "it did not answer then")
            for name, known in clusters.items()
        }
    )


def _values(source: Source, *, resolved: bool, origin: bool, as_json: bool) -> None:
    from fabrictool.blueprint.resolved import resolved as rows_of
    from fabrictool.cli.output import json_data, table
    from fabrictool.cli.paging import page

    rows = rows_of(source.loaded)
    if not resolved:
        rows = [row for row in rows if row.origin.file is not None]
    if as_json:
        from fabrictool.cli.answers import ValueRow, Values

        values = [ValueRow(path=row.path, value=row.value, origin=str(row.origin) or "default") for row in rows]
        json_data(Values(values=values))
    elif origin:
        page(table(["PATH", "VALUE", "ORIGIN"], [[r.path, r.value, str(r.origin) or "default"] for r in rows]))
    else:
        page(table(["PATH", "VALUE"], [[row.path, row.value] for row in rows]))
