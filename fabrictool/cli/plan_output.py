"""What ``plan`` leaves behind: text or JSON, a file, pictures, the review rules' verdicts, the exit code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.applier.checks import unstartable
from fabrictool.applier.outlook import scripts_of
from fabrictool.base.errors import UnreachableError
from fabrictool.cli.output import json_text, print_problems, say
from fabrictool.cli.paging import page
from fabrictool.cli.plan_text import as_document, render
from fabrictool.cli.planning import plan_assumed, plan_offline, plan_online, say_what_is_missing
from fabrictool.cli.policies import as_rows, exit_code, verdicts_on

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.cli.planning import BundleFile
    from fabrictool.cli.policies import RuleVerdict
    from fabrictool.cli.solve_watch import SolverWatch
    from fabrictool.cli.source import Source
    from fabrictool.clusters.protocol import JobScript
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.plan import Plan
    from fabrictool.planner.plan import PlanOptions


@dataclass(frozen=True, slots=True)
class PlanOutput:
    """What the command line asks for."""

    file: Path | None
    policy: Path | None
    chart: bool
    plot: Path | None
    explain: bool
    verbosity: int
    as_json: bool
    detailed: bool
    assume: bool
    """Whether no cluster is asked."""
    render: bool = False
    """Whether jobs are printed, too."""


def show_plan(
    source: Source, bundle: BundleFile | None, options: PlanOptions, watch: SolverWatch, output: PlanOutput
) -> int:
    """Plan, online or from a bundle, and show it; returns the exit code."""
    from fabrictool.base.files import check_output, write_output
    from fabrictool.state.planfile import encode_file

    if output.file is not None:
        check_output(output.file)  # before a search that takes minutes
    with source.warnings_without_a_plan():
        plan, evidence, scripts = _planned(source, bundle, options, output)
    verdicts = verdicts_on(plan, output.policy, source)
    if output.file is not None:
        write_output(output.file, encode_file(plan))
    if output.as_json:
        json_text(as_document(plan, watch.seconds, None if verdicts is None else as_rows(verdicts)))
    else:
        page(render(plan, evidence.observed, verbosity=output.verbosity, explain=output.explain))
    if output.chart or output.plot is not None:
        from fabrictool.cli.plan_plots import draw

        draw(plan, watch.moments, source.inventory, chart=output.chart, path=output.plot)
    if output.render:
        from fabrictool.cli.job_scripts import show_scripts

        show_scripts(scripts, as_json=False)
    code = _ending(plan, verdicts or [], output, offline=bundle is not None)
    seen = bundle is None and not output.assume
    missing = say_what_is_missing(source, plan, evidence, shown=not output.as_json) if seen else 0
    return exit_code(verdicts or []) or missing or code


def _planned(
    source: Source, bundle: BundleFile | None, options: PlanOptions, output: PlanOutput
) -> tuple[Plan, Evidence, list[JobScript]]:
    """The plan, what it was made from and, where they are wanted, its jobs, by one look at the clusters."""
    if output.assume:
        return *plan_assumed(source, options), []
    if bundle is not None:
        return *plan_offline(source, bundle, options), []
    with source.fabric() as fabric:
        try:
            plan, evidence = plan_online(source, fabric, options)
            scripts = scripts_of(plan, fabric.clusters, evidence.state.serial + 1) if output.render else []
        except UnreachableError as error:
            *others, last = error.problems
            hint = f"{last.hint or 'try again'}; `fabrictool plan --assume-empty` plans without a cluster"
            raise UnreachableError([*others, replace(last, hint=hint)]) from error
    return plan, evidence, scripts


def _ending(plan: Plan, verdicts: list[RuleVerdict], output: PlanOutput, *, offline: bool) -> int:
    """What was saved, what review rules say, and what comes next; returns the exit code."""
    if output.file is not None:
        facts = f"apply refuses it if any of {len(plan.read_set)} recorded facts changes"
        say(f"saved {output.file} (id {plan.id[:8]}; {'it cannot be applied' if plan.assumed else facts})")
    print_problems(verdict.problem for verdict in verdicts)
    if exit_code(verdicts):
        return exit_code(verdicts)
    refusal = unstartable(plan)
    if plan.assumed:
        say("no cluster was asked; next: fabrictool plan, where the clusters can be reached")
    elif plan.changes and refusal is not None:
        say(f"apply refuses this plan: {refusal.code} {refusal.message}; {refusal.hint}")
    elif plan.changes and (output.file is not None or not output.as_json):
        where = " (where the clusters can be reached)" if offline else ""
        say(f"next: fabrictool apply {output.file or ''}".rstrip() + where)
    return 2 if output.detailed and plan.changes else 0
