"""``observe``: evidence in a file, for plans that are made elsewhere."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, OverlayOption, ScenarioOption
from fabrictool.cli.source import Source


def register(app: typer.Typer) -> None:
    app.command("observe")(observe)


def observe(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to save the bundle.")],
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    overlay: OverlayOption = None,
    scenario: ScenarioOption = None,
) -> None:
    """Save what the clusters say, signed by the federation's root: `plan --offline` needs no cluster and no key."""
    from fabrictool.base.files import write_output
    from fabrictool.cli.output import say
    from fabrictool.state.bundle import sign_bundle
    from fabrictool.state.tenantkeys import keys_seen

    source = Source(blueprint, inventory, overlay, scenario)
    with source.fabric() as fabric:
        root = fabric.trust.root()  # says what is missing before clusters are asked
        keys = keys_seen(source.blueprint, os.environ)
        if keys is None:
            say("! tenant keys unavailable; plans from this bundle do not check key changes")
        evidence = fabric.gather(now=time.time(), keys=keys)
    write_output(out, sign_bundle(evidence, root))
    clusters = evidence.clusters
    for name, facts in sorted(clusters.items()):
        if not facts.known:
            say(f"! {name} is unknown: {facts.reason}")
    known = sum(facts.known for facts in clusters.values())
    say(f"saved {out}: {known} of {len(clusters)} clusters, {len(evidence.specs)} living units")
