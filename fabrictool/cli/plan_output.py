"""What ``plan`` leaves behind: text or JSON, a file, pictures, the review rules' verdicts, the exit code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.cli.output import data, print_problems, say
from fabrictool.cli.plan_text import as_document, render
from fabrictool.cli.planning import plan_offline, plan_online, say_what_is_missing
from fabrictool.cli.policies import as_rows, exit_code, verdicts_on

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.cli.planning import BundleFile
    from fabrictool.cli.policies import RuleVerdict
    from fabrictool.cli.solve_watch import SolverWatch
    from fabrictool.cli.source import Source
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


def show_plan(
    source: Source, bundle: BundleFile | None, options: PlanOptions, watch: SolverWatch, output: PlanOutput
) -> int:
    """Plan, online or from a bundle, and show it; returns the exit code."""
    from fabrictool.base.files import write_output
    from fabrictool.domain.plan import encode_plan

    if bundle is not None:
        plan, evidence = plan_offline(source, bundle, options)
    else:
        with source.fabric() as fabric:
            plan, evidence = plan_online(source, fabric, options)
    verdicts = verdicts_on(plan, output.policy, source)
    if output.file is not None:
        write_output(output.file, encode_plan(plan))
    if output.as_json:
        data(as_document(plan, watch.seconds, None if verdicts is None else as_rows(verdicts)))
    else:
        data(render(plan, evidence.observed, verbosity=output.verbosity, explain=output.explain))
    if output.chart or output.plot is not None:
        from fabrictool.cli.plan_plots import draw

        draw(plan, watch.moments, source.inventory, chart=output.chart, path=output.plot)
    code = _ending(plan, verdicts or [], output)
    missing = say_what_is_missing(source, plan, evidence) if bundle is None else 0
    return exit_code(verdicts or []) or missing or code


def _ending(plan: Plan, verdicts: list[RuleVerdict], output: PlanOutput) -> int:
    """What was saved, what review rules say, and what comes next; returns the exit code."""
    if output.file is not None:
        say(f"saved {output.file} (id {plan.id[:8]}, valid while {len(plan.read_set)} facts hold)")
    print_problems(verdict.problem for verdict in verdicts)
    if exit_code(verdicts):
        return exit_code(verdicts)
    if plan.changes and (output.file is not None or not output.as_json):
        say(f"next: fabrictool apply {output.file or ''}".rstrip())
    return 2 if output.detailed and plan.changes else 0
