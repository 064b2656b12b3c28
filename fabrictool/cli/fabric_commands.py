"""``plan``, ``apply``, ``reconcile``, ``destroy``, ``status``, ``logs``, ``events``, ``top`` and ``demo``."""

from __future__ import annotations

import math
from contextlib import nullcontext
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
    YesOption,
)

if TYPE_CHECKING:
    from fabrictool.base.errors import Problem
    from fabrictool.domain.observed import Observed
    from fabrictool.domain.plan import Plan
    from fabrictool.planner.problem import Solver


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for function in (plan, apply, reconcile, destroy, status, logs, events, top, demo):
        app.command(function.__name__)(function)


def plan(
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    overlay: OverlayOption = None,
    scenario: ScenarioOption = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Save the plan, for review and `apply PLAN`.")] = None,
    as_json: JsonOption = False,
    detailed_exitcode: Annotated[bool, typer.Option(help="Exit with 2 when there are changes.")] = False,
    explain: Annotated[
        bool, typer.Option(help="Say why, what each rule costs, and what was not chosen; solves again for it.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the solver: same inputs, same seed, same plan.")] = 0,
    solver: Annotated[
        str,
        typer.Option(
            help="exact: proved, or with its gap; cp, cp-uniform: constraint programming; tabu: groups, phases, mixed"
            " pipelines; reschedule: only phases and loads; memp: devices by rate and size, the papers' baseline."
        ),
    ] = "exact",
    time_limit: Annotated[
        float,
        typer.Option(min=0.1, max=86400, help="About how many seconds of work each stage of the solver may take."),
    ] = 60.0,
    verbose: Annotated[int, typer.Option("--verbose", "-v", count=True, help="More: -v fields, -vv operations.")] = 0,
    chart: Annotated[bool, typer.Option(help="Draw who gets which devices in the terminal.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw that, and the search, into FILE.svg or .png.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPRESSION",
            help="Compare with the plan, instead of making one: gpus.DEVICE+=8, gpus.CLUSTER/PARTITION-=8,"
            " rate.MODEL*=1.5, rate.*=2, replicas.MODEL.min=3, trust.MODEL=*, price.CLUSTER/PARTITION*=0.5;"
            " repeatable.",
        ),
    ] = None,
    executor: Annotated[
        str, typer.Option(help="Who tries the what-ifs: here, processes, dask://HOST:PORT; default: here for one.")
    ] = "",
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Processes for the what-ifs; default: one a core.")
    ] = None,
    policy: PolicyOption = None,
    offline: Annotated[bool, typer.Option("--offline", help="Reach no cluster: plan from --observed.")] = False,
    observed_file: Annotated[
        Path | None, typer.Option("--observed", metavar="FILE", help="What `fabrictool observe` saved.")
    ] = None,
    root: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Root certificate that signed it; default: this machine's.")
    ] = None,
    max_age: Annotated[str, typer.Option(help="Refuse an older observation.")] = "24h",
) -> int:
    """Show what would change and what it forecasts; changes nothing."""
    from fabrictool.base.files import write_output
    from fabrictool.cli.applying import solver_named
    from fabrictool.cli.output import data
    from fabrictool.cli.policies import as_rows, policy_problems, protected_models
    from fabrictool.cli.solve_watch import Watch
    from fabrictool.domain.plan import encode_plan

    _refuse("--offline needs --observed FILE, and --observed needs --offline", offline != (observed_file is not None))
    if math.isnan(time_limit):
        raise typer.BadParameter("nan is no number of seconds", param_hint="--time-limit")
    if what_if:
        _refuse(
            "--what-if makes no plan: no --out, --plot, --chart, --explain, --policy, --offline or --detailed-exitcode"
            " with it",
            out or plot or chart or explain or policy or offline or detailed_exitcode,
        )
        from fabrictool.cli.whatif import show_sweep

        return show_sweep(
            what_if, blueprint, inventory, overlay, scenario,
            solver=solver_named(solver), time_limit=time_limit, seed=seed,
            executor=executor, workers=workers, as_json=as_json,
        )  # fmt: skip
    _refuse("--executor and --workers are for --what-if", executor or workers is not None)
    _refuse("--json prints one document: no --chart with it; --plot draws into a file", chart and as_json)
    if plot is not None:
        from fabrictool.cli.plan_plots import drawable

        drawable(plot)
    watch = Watch(solver_named(solver))
    made, observed = _made(
        blueprint, inventory, overlay, scenario, observed_file, root, max_age,
        seed=seed, time_limit=time_limit, solver=watch, explain=explain,
    )  # fmt: skip
    problems = policy_problems(policy, made, lambda: protected_models(blueprint, inventory, overlay, scenario))
    if out is not None:
        write_output(out, encode_plan(made))
    if as_json:
        from fabrictool.cli.plan_text import as_document

        data(as_document(made, watch.seconds, None if problems is None else as_rows(problems)))
    else:
        from fabrictool.cli.plan_text import render

        data(render(made, observed, verbosity=verbose, explain=explain))
    if chart or plot is not None:
        from fabrictool.cli.plan_plots import draw

        draw(made, watch.moments, blueprint, inventory, overlay, scenario, chart=chart, path=plot)
    return _ending(made, problems, out, as_json=as_json, detailed=detailed_exitcode)


def _ending(made: Plan, problems: list[Problem] | None, out: Path | None, *, as_json: bool, detailed: bool) -> int:
    """What was saved, what a policy says, and what comes next; returns the exit code."""
    from fabrictool.cli.output import print_problems, say
    from fabrictool.cli.policies import denied

    if out is not None:
        say(f"saved {out} (id {made.id[:8]}, valid while {len(made.read_set)} facts hold)")
    print_problems(problems or ())
    if denied(problems or ()):
        return 6
    if made.changes and (out is not None or not as_json):
        say(f"next: fabrictool apply {out or ''}".rstrip())
    return 2 if detailed and made.changes else 0


def _made(
    blueprint: Path | None,
    inventory: Path | None,
    overlay: str | None,
    scenario: str | None,
    observed_file: Path | None,
    root: Path | None,
    max_age: str,
    *,
    seed: int,
    time_limit: float,
    solver: Solver,
    explain: bool,
) -> tuple[Plan, Observed]:
    """From the clusters, or from an observation of them."""
    from fabrictool.cli.applying import make_plan
    from fabrictool.cli.observe_command import offline_plan

    if observed_file is None:
        return make_plan(
            blueprint, inventory, overlay, scenario,
            seed=seed, time_limit=time_limit, solver=solver, explain=explain, keep_best=True,
        )  # fmt: skip
    return offline_plan(
        observed_file, root, max_age, blueprint, inventory, overlay, scenario,
        seed=seed, time_limit=time_limit, solver=solver, explain=explain,
    )  # fmt: skip


def _refuse(why: str, given: object) -> None:
    if given:
        raise typer.BadParameter(why)


def apply(
    plan_file: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="A saved plan; default: plan now.")] = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    overlay: OverlayOption = None,
    scenario: ScenarioOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the solver.")] = 0,
    max_delete: Annotated[int | None, typer.Option(min=0, help="Refuse a plan that deletes more units.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for jobs in their queues, or end once they are submitted.")
    ] = True,
    queue_wait: Annotated[
        float, typer.Option(min=0, max=86400 * 7, help="Seconds to wait for a job in its queue.")
    ] = 900.0,
    policy: PolicyOption = None,
    reviewed: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Refuse unless the change is the one of this saved plan.")
    ] = None,
) -> int:
    """Carry a plan out: journalled, safe to repeat, safe to interrupt."""
    from fabrictool.cli.applying import carry_out, confirm, make_plan, read_plan
    from fabrictool.cli.output import data, json_line, say
    from fabrictool.cli.plan_text import action_lines, render
    from fabrictool.cli.policies import check_policy, check_reviewed, protected_models

    if plan_file is None:
        made, observed = make_plan(blueprint, inventory, overlay, scenario, seed=seed)
        if not as_json:
            data(render(made, observed))
    else:
        made = read_plan(plan_file)
        if made.changes and not as_json:
            data("\n".join(action_lines(made, 0)))
    if not made.changes:
        say("nothing to do")
        if as_json:
            json_line({"type": "end", "plan": made.id, "changed": False})
        return 0
    check_policy(policy, made, lambda: protected_models(blueprint, inventory, overlay, scenario), as_json=as_json)
    if reviewed is not None:
        check_reviewed(read_plan(reviewed), made)
    confirm(made, yes=yes, max_delete=max_delete)
    return carry_out(
        made, blueprint, inventory, overlay, scenario, as_json=as_json, queue_wait_s=queue_wait if wait else 0.0
    )


def reconcile(
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    watch: Annotated[bool, typer.Option("--watch/--once", help="Look again and again until Ctrl-C, or once.")] = False,
    interval: Annotated[float, typer.Option(min=1, max=86400, help="Seconds between two looks of --watch.")] = 60.0,
    dry_run: Annotated[bool, typer.Option(help="Say what has drifted and what would heal it; change nothing.")] = False,
    prune: Annotated[bool, typer.Option(help="Stop units of this fabric that nobody asked for, too.")] = False,
    max_delete: Annotated[int, typer.Option(min=0, help="Stop no more units than this in one look.")] = 1,
    as_json: JsonOption = False,
    detailed_exitcode: Annotated[bool, typer.Option(help="Exit with 2 when something has drifted.")] = False,
) -> int:
    """Heal what has drifted from what was applied last: missing replicas, ends of allocations, maintenance."""
    from fabrictool.cli.reconciling import reconcile_fabric

    return reconcile_fabric(
        blueprint, inventory, watch=watch, interval=interval, dry_run=dry_run, prune=prune, max_delete=max_delete,
        as_json=as_json, detailed=detailed_exitcode,
    )  # fmt: skip


def destroy(
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> int:
    """Stop everything of this fabric that runs: replicas drain first, the gateway goes last."""
    from fabrictool.cli.applying import destroy_fabric

    return destroy_fabric(blueprint, inventory, yes=yes, as_json=as_json)


def status(
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    url: Annotated[str, typer.Option(help="Read this gateway or agent instead of the blueprint's.")] = "",
    as_json: JsonOption = False,
    watch: Annotated[bool, typer.Option(help="Again every two seconds until Ctrl-C.")] = False,
) -> int:
    """One look at the fabric: units, replicas, models, drift."""
    from fabrictool.cli.watching import show_status

    return show_status(blueprint, inventory, url, as_json=as_json, watch=watch)


def logs(
    unit: Annotated[str, typer.Argument(help="replica/MODEL/N or gateway/main; `fabrictool status` lists them.")],
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, max=5000, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """The log of a unit and its engine, also after it ended."""
    from fabrictool.cli.watching import show_logs

    show_logs(unit, blueprint, inventory, lines, follow=follow)


def events(
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many of the last events.")] = 50,
) -> None:
    """What happened: steps of apply from the journal, and what the running units saw."""
    from fabrictool.cli.watching import show_events

    show_events(blueprint, inventory, lines, as_json=as_json)


def top(
    url: Annotated[str, typer.Argument(help="URL of a gateway or an agent; default: the blueprint's gateway.")] = "",
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    interval: Annotated[float, typer.Option(min=0.2, max=60, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Live status in the terminal; read-only."""
    from fabrictool.cli.watching import gateway_url, require_tui

    run = require_tui()
    with nullcontext(url) if url else gateway_url(blueprint, inventory) as page:
        run(page, interval)


def demo(
    keep: Annotated[bool, typer.Option(help="Leave the fabric up at the end.")] = False,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
) -> int:
    """The main job on this machine, step by step: plan, apply, an answer, a killed agent, destroy."""
    from fabrictool.cli.demo import run_demo

    return run_demo(blueprint, inventory, keep=keep)
