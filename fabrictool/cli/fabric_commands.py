"""``plan``, ``apply``, ``reconcile``, ``destroy`` and ``demo``."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fabrictool.cli import completing
from fabrictool.cli.options import (
    AtOption,
    BlueprintOption,
    HorizonOption,
    ImproveOption,
    InventoryOption,
    JsonOption,
    OverlayOption,
    PolicyOption,
    ScenarioOption,
    StepOption,
    YesOption,
    refuse,
    seconds,
)
from fabrictool.cli.source import Source

MOVE_LIMITED = ("exact", "cp", "cp-uniform")


class DemoName(StrEnum):
    """What there is to show."""

    FABRIC = "fabric"
    ELASTIC = "elastic"


def register(app: typer.Typer) -> None:
    for function in (plan, apply, reconcile, destroy, demo):
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
        bool, typer.Option(help="Say why, what each rule costs, and what was not chosen; this solves again.")
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="The solver's seed: the same inputs and seed give the same plan.")
    ] = 0,
    solver: Annotated[
        str,
        typer.Option(
            help="exact: proved, or with its gap; cp, cp-uniform: constraint programming; tabu: groups, phases, mixed"
            " pipelines; reschedule: only phases and loads; memp: devices by rate and size, the papers' baseline."
        ),
    ] = "exact",
    budget: Annotated[
        float | None,
        typer.Option(
            parser=seconds(0.1, 86400),
            metavar="DURATION",
            help="How long the command may take; the plan says at which work its search ended. Default: 10s at a"
            " terminal, else --work 6000.",
        ),
    ] = None,
    work: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="End the search at so much work, about a hundredth of a second of one core each: with the N of a plan"
            " the same plan again, on any machine.",
        ),
    ] = None,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Show more: -v fields, -vv operations.")
    ] = 0,
    chart: Annotated[bool, typer.Option(help="Draw in the terminal which model gets which devices.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw that, and the progress of the search, into FILE.svg or FILE.png."),
    ] = None,
    render: Annotated[
        bool, typer.Option("--render", help="Also print each job as the scheduler would be given it.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EXPRESSION",
            help="Compare with the plan, instead of making one: gpus.DEVICE+=8, gpus.CLUSTER/PARTITION-=8,"
            " rate.MODEL*=1.5, rate.*=2, replicas.MODEL.min=3, survive.MODEL=node, trust.MODEL=*,"
            " price.CLUSTER/PARTITION*=0.5; repeatable.",
        ),
    ] = None,
    pareto: Annotated[
        str | None,
        typer.Option(
            metavar="CRITERIA",
            help="Show what each costs in terms of the others, instead of making a plan: two or three of cost, energy,"
            " carbon and one of latency, slo (load that misses it), such as cost,slo.",
        ),
    ] = None,
    horizon: HorizonOption = None,
    step: StepOption = None,
    at: AtOption = None,
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            metavar="QUESTION",
            autocompletion=completing.whys,
            help='Also say why a model does not stand somewhere: "MODEL on DEVICE" or MODEL@CLUSTER/PARTITION;'
            " repeatable.",
        ),
    ] = None,
    max_moves: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Let the placement start and stop at most N replicas of what runs, and serve as well as that allows.",
        ),
    ] = None,
    improve: ImproveOption = False,
    executor: Annotated[
        str,
        typer.Option(help="Where the what-ifs are tried: here, processes, dask://HOST:PORT; default: here for one."),
    ] = "",
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Processes for the what-ifs; default: one per core.")
    ] = None,
    node_loss: Annotated[
        bool,
        typer.Option(
            "--node-loss", help="Also say which consumer groups would get no answer if any one node were lost."
        ),
    ] = False,
    policy: PolicyOption = None,
    assume_empty: Annotated[
        bool,
        typer.Option(
            "--assume-empty",
            help="Contact no cluster: assume that every one is there and empty. The plan cannot be applied.",
        ),
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Contact no cluster: plan from a bundle.")] = False,
    observed_file: Annotated[
        Path | None,
        typer.Option(
            "--observed",
            metavar="FILE",
            help="The bundle that `fabrictool observe` saved; default: observation.json beside the blueprint.",
        ),
    ] = None,
    root: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Root certificate that signed it; default: this machine's, for the default bundle root.crt beside it.",
        ),
    ] = None,
    max_age: Annotated[
        str | None, typer.Option(help="Refuse an older bundle; default: 24h, and none for the default bundle.")
    ] = None,
) -> int:
    """Show what would change and what it forecasts; changes nothing."""
    from fabrictool.cli.planning import bundle_meant, evidence_of, search_limit, search_options
    from fabrictool.planner.rehearsal import Rehearsal

    refuse("either --budget or --work", budget is not None and work is not None)
    limit = search_limit(budget, work)
    refuse("--observed, --root and --max-age need --offline", (observed_file or root or max_age) and not offline)
    refuse("either --offline or --assume-empty", offline and assume_empty)
    source = Source(blueprint, inventory, overlay, scenario, planned=not (what_if or pareto or horizon))
    refuse("--step and --at need --horizon", (step or at) and not horizon)
    meant = bundle_meant(source, observed_file, root, max_age) if offline else None
    seen = partial(evidence_of, source, meant, assume=assume_empty)
    of_a_plan = (
        *(out, plot, chart, render, explain, why_not, policy, detailed_exitcode),
        *(max_moves is not None, improve, node_loss),
    )
    if pareto is not None or horizon is not None:
        name = "--pareto" if pareto is not None else "--horizon"
        refuse(
            f"{name} makes no plan: no --what-if, --out, --plot, --chart, --render, --explain, --why-not, --policy,"
            " --solver, --max-moves, --improve, --node-loss or --detailed-exitcode with it",
            what_if or any(of_a_plan) or solver != "exact",
        )
        refuse("either --pareto or --horizon", pareto is not None and horizon is not None)
        if horizon is not None:
            from fabrictool.cli.horizon import Span, show_horizon

            return show_horizon(source, seen, limit, seed, Span.of(horizon, step, at), as_json=as_json)
        from fabrictool.cli.pareto import show_front

        return show_front(pareto or "", source, seen, limit, seed, as_json=as_json)
    if what_if:
        refuse(
            "--what-if makes no plan: no --out, --plot, --chart, --render, --explain, --why-not, --policy, --max-moves,"
            " --improve, --node-loss or --detailed-exitcode with it",
            any(of_a_plan),
        )
        from fabrictool.cli.planning import solver_named
        from fabrictool.cli.whatif import SweepOptions, show_sweep

        sweep = SweepOptions(solver_named(solver), limit.as_work_s, seed, executor, workers)
        return show_sweep(what_if, source, seen, sweep, as_json=as_json)
    refuse("--executor and --workers are for --what-if", executor or workers is not None)
    refuse("--max-moves is kept by --solver exact and cp alone", max_moves is not None and solver not in MOVE_LIMITED)
    refuse("--json prints one document: no --chart with it; --plot draws into a file", chart and as_json)
    refuse(
        "--render asks the login nodes: no --offline or --assume-empty with it", render and (offline or assume_empty)
    )
    refuse("--json prints one document: no --render with it; `show PLAN --scripts --json`", render and as_json)
    if plot is not None:
        from fabrictool.cli.plan_plots import drawable

        drawable(plot)
    explains = explain or bool(why_not)
    with Rehearsal() as rehearsal:
        options, watch = search_options(
            source,
            limit,
            solver,
            rehearsal,
            keeps=meant is None,
            explains=explains,
            seed=seed,
            explain=explain,
            max_moves=max_moves,
            improve=improve or solver != "exact",
            node_loss=node_loss,
            why_not=tuple(why_not or ()),
        )
        from fabrictool.cli.plan_output import PlanOutput, show_plan

        output = PlanOutput(
            out,
            policy,
            chart,
            plot,
            explains,
            verbose,
            as_json,
            detailed_exitcode,
            assume_empty,
            render=render,
        )
        return show_plan(source, meant, options, watch, output)


def apply(
    plan_file: Annotated[Path | None, typer.Argument(metavar="PLAN", help="A saved plan; default: plan now.")] = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    overlay: OverlayOption = None,
    scenario: ScenarioOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
    seed: Annotated[int, typer.Option(min=0, help="The solver's seed.")] = 0,
    improve: ImproveOption = False,
    max_delete: Annotated[int | None, typer.Option(min=0, help="Refuse a plan that deletes more units.")] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait for jobs in their queues, or end once they are submitted.")
    ] = True,
    queue_wait: Annotated[
        float,
        typer.Option(
            parser=seconds(0, 7 * 86400),
            metavar="DURATION",
            show_default="15m",
            help="How long to wait for jobs in their queues.",
        ),
    ] = 900.0,
    stage: Annotated[bool, typer.Option(help="Stage weights that are missing first, as `weights stage` does.")] = False,
    policy: PolicyOption = None,
    reviewed: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Refuse unless the changes are those of this saved plan.")
    ] = None,
    signers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Refuse a PLAN that nobody of FILE (ssh-keygen's allowed signers) signed."),
    ] = None,
) -> int:
    """Carry a plan out: journalled, safe to repeat, safe to interrupt."""
    from fabrictool.cli.applying import begin_stream, carry_out, confirm
    from fabrictool.cli.output import data
    from fabrictool.cli.plan_text import action_lines, render
    from fabrictool.cli.planning import plan_online, say_what_is_missing
    from fabrictool.cli.policies import check_policy, check_reviewed
    from fabrictool.cli.staging import stage_for
    from fabrictool.planner.plan import PlanOptions
    from fabrictool.state.planfile import read_plan

    source = Source(blueprint, inventory, overlay, scenario, planned=plan_file is None)
    refuse("--signers is for a saved PLAN or --reviewed", signers and not (plan_file or reviewed))
    refuse("--improve searches, and a saved plan is carried out as it is", improve and (plan_file or reviewed))
    saved = None if plan_file is None else read_plan(plan_file, None if reviewed else signers)
    judged = None if reviewed is None else read_plan(reviewed, signers)
    begin_stream(as_json=as_json)
    if saved is not None and saved.changes and not as_json:
        data("\n".join(action_lines(saved, 0)))
    with source.fabric() as fabric:
        plan, evidence = saved, None
        if plan is None:
            with source.warnings_without_a_plan():
                # What is compared with a plan is searched for as long as that was.
                options = PlanOptions(seed, improve=improve)
                if judged is not None:
                    options = PlanOptions(seed, judged.certificate.work / 100, improve=judged.unchanged is not True)
                plan, evidence = plan_online(source, fabric, options)
            if not as_json:
                data(render(plan, evidence.observed))
        if plan.changes:
            check_policy(plan, policy, source, as_json=as_json)
            if judged is not None:
                check_reviewed(judged, plan)
            confirm(plan, yes=yes, max_delete=max_delete)
        if stage:
            stage_for(plan, blueprint, inventory)
        code = carry_out(plan, source, fabric, as_json=as_json, queue_wait_s=queue_wait if wait else 0.0)
        shown = not as_json and (evidence is not None or bool(plan.changes))
        return say_what_is_missing(source, plan, evidence, shown=shown) or code


def reconcile(
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    watch: Annotated[bool, typer.Option("--watch/--once", help="Look again and again until Ctrl-C, or once.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            parser=seconds(1, 86400),
            metavar="DURATION",
            show_default="60s; 10s while replicas wait for somebody to ask for them",
            help="Time between two looks of --watch.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what has drifted and what would heal it; change nothing.")] = False,
    prune: Annotated[bool, typer.Option(help="Also stop units of this fabric that nobody asked for.")] = False,
    max_delete: Annotated[int, typer.Option(min=0, help="Stop no more units than this in one look.")] = 1,
    as_json: JsonOption = False,
    detailed_exitcode: Annotated[bool, typer.Option(help="Exit with 2 when something has drifted.")] = False,
) -> int:
    """Heal what has drifted from what was applied last: missing replicas, ends of allocations, maintenance."""
    from fabrictool.cli.reconciling import ReconcileOptions, reconcile_fabric

    options = ReconcileOptions(watch, interval, dry_run, prune, max_delete, as_json, detailed_exitcode)
    return reconcile_fabric(Source(blueprint, inventory), options)


def destroy(
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> int:
    """Stop everything of this fabric that runs: replicas drain first, the gateway goes last."""
    from fabrictool.cli.applying import destroy_fabric

    return destroy_fabric(Source(blueprint, inventory, lenient=True), yes=yes, as_json=as_json)


def demo(
    what: Annotated[
        DemoName, typer.Argument(help="fabric: the main job. elastic: models that share a node, replicas that merge.")
    ] = DemoName.FABRIC,
    keep: Annotated[bool, typer.Option(help="Leave the fabric up at the end.")] = False,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
) -> int:
    """The main job on this machine, step by step: plan, apply, an answer, a killed agent, destroy.

    With `elastic`, in about a minute: three models share this node, then two replicas merge and split in a burst.
    """
    if what is DemoName.ELASTIC:
        from fabrictool.cli.elastic_demo import run_elastic_demo

        return run_elastic_demo()
    from fabrictool.cli.demo import run_demo

    return run_demo(Source(blueprint, inventory), keep=keep)
