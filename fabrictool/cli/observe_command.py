"""``observe``, and plans that are made from what it saw."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, OverlayOption, ScenarioOption

if TYPE_CHECKING:
    from fabrictool.domain.observed import Observed
    from fabrictool.domain.plan import Plan
    from fabrictool.planner.problem import Solver


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("observe")(observe)


def observe(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to save the observation.")],
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    overlay: OverlayOption = None,
    scenario: ScenarioOption = None,
) -> None:
    """Save what the clusters say, signed by the federation's root: `plan --offline` needs no cluster and no key."""
    from fabrictool.applier.bundle import sign_bundle, take_bundle
    from fabrictool.applier.tenantkeys import tenant_keys
    from fabrictool.base.errors import FabrictoolError
    from fabrictool.base.files import write_output
    from fabrictool.cli.fabrics import load, open_fabric
    from fabrictool.cli.output import say

    loaded = load(blueprint, inventory, overlay=overlay, scenario=scenario)
    fabric = open_fabric(loaded)
    root = fabric.trust.root()  # says what is missing before clusters are asked
    try:
        found = tenant_keys(loaded.blueprint, os.environ)
        keys: str | None = found.digest if found is not None else ""
    except FabrictoolError:
        keys = None
        say("! the tenants' keys cannot be had here: plans from this observation take them as unchanged")
    bundle, observed = take_bundle(fabric, loaded.blueprint, keys, now=time.time())
    write_output(out, sign_bundle(bundle, root))
    for name, facts in sorted(observed.clusters.items()):
        if not facts.known:
            say(f"! {name} is unknown: {facts.reason}")
    known = sum(facts.known for facts in observed.clusters.values())
    say(f"saved {out}: {known} of {len(observed.clusters)} clusters, {len(bundle.specs)} units that live")


def offline_plan(
    bundle_file: Path,
    root_file: Path | None,
    max_age: str,
    blueprint: Path | None,
    inventory: Path | None,
    overlay: str | None,
    scenario: str | None,
    *,
    seed: int,
    time_limit: float,
    solver: Solver,
    explain: bool,
) -> tuple[Plan, Observed]:
    """A plan from an observation; reaches no cluster, reads no key and no secret."""
    from fabrictool.applier.bundle import fabric_seen, keys_seen, open_bundle
    from fabrictool.applier.planning import plan_fabric
    from fabrictool.base.files import file_error
    from fabrictool.base.units import Duration, UnitError
    from fabrictool.cli.fabrics import load, open_fabric
    from fabrictool.cli.output import duration, say

    try:
        oldest = float(Duration.parse(max_age))
    except UnitError as error:
        raise typer.BadParameter(f"{error.message}: {error.hint}", param_hint="--max-age") from error
    loaded = load(blueprint, inventory, overlay=overlay, scenario=scenario)
    root = root_file if root_file is not None else open_fabric(loaded).trust.folder / "root.crt"
    try:
        file = bundle_file
        data = bundle_file.read_bytes()
        file = root
        certificate = root.read_bytes()
    except OSError as error:
        raise file_error(error, file) from error
    now = time.time()
    bundle = open_bundle(
        data, certificate, fabric=loaded.blueprint.fabric, now=now, max_age_s=oldest, file=str(bundle_file)
    )
    say(f"planned from an observation that is {duration(max(0.0, now - bundle.at))} old")
    return plan_fabric(
        fabric_seen(bundle, loaded.inventory),
        loaded,
        seed=seed,
        now=now,
        time_limit_s=time_limit,
        solver=solver,
        keys=keys_seen(bundle, loaded),
        explain=explain,
    )
