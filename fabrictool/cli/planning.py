"""Plans for the commands: from the clusters as they are now, or from a bundle."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from fabrictool.base.clock import duration_text
from fabrictool.base.errors import InfeasibleError, UnreachableError, UsageError
from fabrictool.cli.output import print_problems, say
from fabrictool.cli.source import find_blueprint

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fabrictool.base.errors import Problem
    from fabrictool.cli.solve_watch import SearchClock, SolverWatch
    from fabrictool.cli.source import Source
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import Inventory
    from fabrictool.domain.plan import Plan
    from fabrictool.planner.plan import PlanOptions
    from fabrictool.planner.problem import Solution, Solver
    from fabrictool.planner.rehearsal import Rehearsal
    from fabrictool.state.fabric import Fabric

LIKELY_LARGE, TABLES_FIRST = 30, 1_000
"""Models times clusters from which on a search will hardly do without its engine, nor be over before that is there; and
from which on the tables take longer than that does, so that they need both cores first.
"""
PATIENCE_S = 1.0
"""A search that takes longer tells how far it is."""


BUNDLE_BESIDE, ROOT_BESIDE = "observation.json", "root.crt"
"""Beside a blueprint: what `plan --offline` reads when it is told of no other file."""
LAST_DAY = "24h"


@dataclass(frozen=True, slots=True)
class BundleFile:
    """Where the evidence of an offline plan is, and how far it is believed."""

    path: Path
    root: Path | None
    """Certificate of the root that signed it; None: this machine's."""
    max_age: str | None
    """As written; None: of any age."""


BUDGET_S, WORK = 10.0, 6000
"""Without a word of the user: for one who waits, and for a script that wants the same again."""
ENDLESS_S = 1e6


@dataclass(frozen=True, slots=True)
class SearchLimit:
    """Where a search ends."""

    work_s: float
    """As the planner counts it."""
    budget_s: float
    """By the clock."""

    @property
    def as_work_s(self) -> float:
        """Where no clock runs."""
        return min(self.work_s, self.budget_s)


def search_limit(budget_s: float | None, work: int | None) -> SearchLimit:
    if work is None and budget_s is None and sys.stderr.isatty():
        budget_s = BUDGET_S
    if budget_s is not None:
        return SearchLimit(ENDLESS_S, budget_s)
    return SearchLimit((WORK if work is None else work) / 100, math.inf)


def bundle_meant(source: Source, observed: Path | None, root: Path | None, max_age: str | None) -> BundleFile:
    """The bundle that is given, or the one beside the blueprint: that was reviewed with it, and may be old.

    Raises
    ------
    UsageError
        FT9008 neither.
    """
    if observed is not None:
        return BundleFile(observed, root, max_age or LAST_DAY)
    folder = find_blueprint(source.path).parent
    beside = folder / BUNDLE_BESIDE
    if not beside.is_file():
        hint = "give --observed FILE (a bundle of `fabrictool observe`), or --assume-empty, which needs none"
        raise UsageError.of("FT9008", f"no bundle of evidence to plan from: {beside} does not exist", hint=hint)
    theirs = folder / ROOT_BESIDE
    return BundleFile(beside, root or (theirs if theirs.is_file() else None), max_age)


def plan_online(source: Source, fabric: Fabric, options: PlanOptions) -> tuple[Plan, Evidence]:
    """Look at the clusters, plan, and ask the schedulers what they think of it."""
    from fabrictool.applier.outlook import with_outlook
    from fabrictool.clusters.checks.certificates import check_certificates
    from fabrictool.planner.plan import plan
    from fabrictool.state.tenantkeys import keys_seen

    check_certificates(source.inventory)
    now = time.time()
    evidence = fabric.gather(now=now, keys=keys_seen(source.blueprint, os.environ))
    planned = plan(source.blueprint, source.inventory, evidence, options, now=now, warnings=source.loaded.warnings)
    return with_outlook(planned, evidence, fabric.clusters), evidence


def say_what_is_missing(source: Source, plan: Plan, evidence: Evidence | None, *, shown: bool) -> int:
    """Last of all: a plan may be right and yet not be the whole truth; said on stderr, and by the exit code.

    69 when a cluster that the fabric needs did not answer, 3 when a job waits in its queue that cannot start, else 0.
    Of a saved plan, whose `evidence` is gone, what it says itself counts. When the plan was `shown` as text, the reason
    why a cluster is unknown stands there and is not repeated.
    """
    from fabrictool.planner.drift import stuck, unanswered, unanswered_then

    if evidence is None:
        away, waiting = unanswered_then(plan.actions), []
    else:
        pinned = {pin.cluster for model in source.blueprint.models.values() for pin in model.place.pin}
        away = unanswered(evidence, plan.actions, pinned)
        kept = {action.former for action in plan.actions if action.kind == "keep"}
        waiting = [problem for operation, problem in stuck(evidence).items() if operation in kept]
    print_problems([*(map(_without_reason, away) if shown else away), *waiting])
    return UnreachableError.exit_code if away else InfeasibleError.exit_code if waiting else 0


def _without_reason(problem: Problem) -> Problem:
    """Of a cluster that did not answer; the same for all of its units."""
    cluster = (problem.place.thing or "").removeprefix("cluster/")
    return replace(problem, message=f"{cluster} is needed and did not answer")


def plan_offline(source: Source, bundle: BundleFile, options: PlanOptions) -> tuple[Plan, Evidence]:
    """Reaches no cluster, reads no key and no secret."""
    from fabrictool.planner.plan import plan

    evidence, now = _opened(source, bundle), time.time()
    where = f" on {evidence.host}" if evidence.host else ""
    say(f"planned offline from {bundle.path}: {duration_text(max(0.0, now - evidence.at))} old, gathered{where}")
    planned = plan(source.blueprint, source.inventory, evidence, options, now=now, warnings=source.loaded.warnings)
    return planned, evidence.within(source.inventory)


def plan_assumed(source: Source, options: PlanOptions) -> tuple[Plan, Evidence]:
    """Of the files alone: each cluster is supposed to be there as the inventory says, with nothing on it."""
    from fabrictool.planner.plan import plan

    now = time.time()
    evidence = assumed_evidence(source, now)
    planned = plan(source.blueprint, source.inventory, evidence, options, now=now, warnings=source.loaded.warnings)
    return msgspec.structs.replace(planned, assumed=True), evidence


def evidence_of(source: Source, bundle: BundleFile | None, *, assume: bool) -> Evidence:
    """What a plan would be made from."""
    if assume:
        return assumed_evidence(source, time.time())
    if bundle is not None:
        return _opened(source, bundle)
    with source.fabric() as fabric:
        return fabric.gather(now=time.time())


def assumed_evidence(source: Source, now: float) -> Evidence:
    """Of clusters that are there and empty."""
    from fabrictool.domain.evidence import Evidence, KeysSeen
    from fabrictool.domain.observed import ClusterFacts
    from fabrictool.domain.state import State

    enabled = [name for name, cluster in source.inventory.clusters.items() if cluster.enabled]
    return Evidence(
        fabric=source.blueprint.fabric,
        lineage="",
        at=round(now, 3),
        clusters={name: ClusterFacts(cluster=name, known=True) for name in enabled},
        specs={},
        state=State(fabric=source.blueprint.fabric),
        keys=KeysSeen.of(source.blueprint, ""),
    )


def _opened(source: Source, bundle: BundleFile) -> Evidence:
    from fabrictool.base.files import file_error
    from fabrictool.base.units import Duration, UnitError
    from fabrictool.state.bundle import open_bundle

    try:
        oldest = math.inf if bundle.max_age is None else float(Duration.parse(bundle.max_age))
    except UnitError as error:
        raise typer.BadParameter(f"{error.message}: {error.hint}", param_hint="--max-age") from error
    root = bundle.root if bundle.root is not None else source.fabric().trust.folder / "root.crt"
    file = bundle.path
    try:
        data = file.read_bytes()
        file = root
        certificate = file.read_bytes()
    except OSError as error:
        raise file_error(error, file) from error
    return open_bundle(
        data, certificate, fabric=source.blueprint.fabric, now=time.time(), max_age_s=oldest, file=str(bundle.path)
    )


def solver_named(name: str, clock: SearchClock | None = None) -> Solver:
    """`clock` ends it where it can be ended at any step. Raises UsageError FT9001 when there is none."""
    from fabrictool.planner.solvers.exact import ExactSolver

    if name == ExactSolver.name:  # mostly, and the others need not be loaded
        return ExactSolver() if clock is None else ExactSolver(clock.left_s)
    from fabrictool.planner.solvers.registry import SOLVERS

    if name not in SOLVERS:
        raise UsageError.of("FT9001", f"unknown solver {name!r}", hint=f"one of: {', '.join(SOLVERS)}")
    return SOLVERS[name]()


# Wide: what a search is, and what else a plan is asked.
def search_options(
    source: Source, limit: SearchLimit, solver: str, rehearsal: Rehearsal, *, keeps: bool, explains: bool, **asked: Any
) -> tuple[PlanOptions, SolverWatch]:
    """Those of a plan, with the solver's watch; `keeps`: Ctrl-C takes the best so far. `asked`: its other fields.

    Whoever plays small placements begins before the planner is loaded.
    """
    models = source.blueprint.models.values()
    size = len(models) * len(source.inventory.clusters)
    if size <= LIKELY_LARGE:
        rehearsal.begin()
    from fabrictool.cli.solve_watch import SearchClock, SolverWatch
    from fabrictool.planner.highs import prepare
    from fabrictool.planner.plan import PlanOptions
    from fabrictool.planner.solvers.exact import ExactSolver

    replays = len(models) + sum(model.survive is not None for model in models)
    clock = SearchClock(keeps=keeps, budget_s=limit.budget_s, models=replays, explains=explains)
    engine = solver_named(solver, clock)
    by_clock = isinstance(engine, ExactSolver)
    if by_clock and LIKELY_LARGE < size <= TABLES_FIRST:
        prepare()  # while tables are made
    watch = SolverWatch(engine, clock if by_clock else None)
    options = PlanOptions(
        work_s=limit.work_s if by_clock else limit.as_work_s,
        solver=watch,
        progress=search_progress(source.inventory) if keeps else None,
        rehearsal=rehearsal,
        explain_left_s=clock.explaining_left_s,
        **asked,
    )
    return options, watch


def search_progress(inventory: Inventory) -> Callable[[Solution], None]:
    """A line a better placement on a terminal's stderr, once a search takes long enough to wonder."""
    from fabrictool.planner.explaining.wording import valued
    from fabrictool.planner.plan import currency_of
    from fabrictool.planner.stages import TIDYING

    began, currency = time.monotonic(), currency_of(inventory)
    shown = ""

    def show(solution: Solution) -> None:
        nonlocal shown
        passed = time.monotonic() - began
        if not sys.stderr.isatty() or passed < PATIENCE_S:
            return
        stage = solution.stages[-1]
        above = (stage.objective - stage.bound) / max(abs(stage.objective), 1e-9)
        gap = f", gap {above:.2%}" if stage.objective - stage.bound > 1e-4 else ", as good as can be"
        if stage.name in TIDYING and not stage.bound:
            gap = ""  # nobody looked how few there could be
        news = f"{valued(stage.name, stage.objective, currency)}{gap}"
        if news != shown:
            shown = news
            say(f"{passed:4.0f} s  {news}; Ctrl-C takes the best so far")

    return show
