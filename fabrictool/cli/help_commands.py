"""``explain``, ``doctor`` and ``version``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fabrictool.cli import completing
from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption, seconds
from fabrictool.cli.source import Source

if TYPE_CHECKING:
    from fabrictool.clusters.checks.result import Check


def register(app: typer.Typer) -> None:
    app.command("explain")(explain)
    app.command("doctor")(doctor)
    app.command("version")(version)


def explain(
    thing: Annotated[
        str,
        typer.Argument(
            metavar="THING",
            help="A code such as FT1203; a key of a file, such as models.slo or inventory.clusters; or a decision:"
            ' model/NAME, "MODEL on DEVICE" or MODEL@CLUSTER/PARTITION.',
            autocompletion=completing.explained,
        ),
    ],
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    assume_empty: Annotated[
        bool, typer.Option("--assume-empty", help="Of a decision: contact no cluster, as `plan --assume-empty`.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what an error code or a key of a file means, offline; or why a model stands where it stands."""
    from fabrictool.cli.explaining import explain_thing

    explain_thing(thing, Source(blueprint, inventory), assume=assume_empty, as_json=as_json)


def doctor(
    cluster: Annotated[
        str | None,
        typer.Argument(
            help="Check this cluster over SSH; default: this machine and the fabric.",
            autocompletion=completing.clusters,
        ),
    ] = None,
    clusters: Annotated[
        bool, typer.Option("--clusters", help="Also check every enabled cluster behind a login node.")
    ] = False,
    no_jobs: Annotated[bool, typer.Option("--no-jobs", help="Submit no short job to a cluster.")] = False,
    partition: Annotated[str, typer.Option(help="Where the job runs; default: one with an idle node.")] = "",
    wait: Annotated[
        float,
        typer.Option(
            parser=seconds(1, 86400),
            metavar="DURATION",
            show_default="60s",
            help="How long its job may wait in the queue.",
        ),
    ] = 60.0,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check this machine and the fabric: versions, folders, trust, ports, models, engines, clusters.

    With CLUSTER or --clusters: login, clock, folder, scheduler, environment, and what a node sees, in a job of at most
    two minutes that is always cancelled. Exit 1 when something is bad.
    """
    from fabrictool.cli.output import data, json_data, paint

    source = Source(blueprint, inventory)

    def show(check: Check) -> None:
        if as_json:
            return
        kind = "error" if not check.good else "warning" if check.warning else "good"
        mark = paint({"error": "FAIL", "warning": "note", "good": "ok  "}[kind], kind)
        hint = f"\n      hint: {check.hint}" if kind != "good" and check.hint else ""
        data(f"{mark}  {check.name:<22} {check.text}{hint}")

    checks = []
    if cluster is None:
        checks = _here(source)
        for check in checks:
            show(check)
    if cluster is not None or clusters:
        from fabrictool.clusters.checks.site import SiteCheckup, check_clusters

        sites = source.inventory_alone()
        alone = source.path is None and source.inventory_path is not None
        hubs = () if alone else tuple(gateway.hub for gateway in source.blueprint.every_gateway.values())
        enabled = [name for name, described in sites.clusters.items() if described.enabled and described.login]
        names = [cluster] if cluster is not None else enabled
        checkup = SiteCheckup(not no_jobs, partition, wait, hubs)
        checks = [*checks, *check_clusters(sites, names, checkup, show)]
    if as_json:
        from fabrictool.cli.answers import CheckRow, Checks

        rows = [
            CheckRow(
                name=check.name,
                good=check.good,
                warning=check.warning,
                text=check.text,
                hint="" if check.good and not check.warning else check.hint,
            )
            for check in checks
        ]
        json_data(Checks(checks=rows))
    return 0 if all(check.good for check in checks) else 1


def _here(source: Source) -> list[Check]:
    """This machine, and the fabric if its blueprint loads."""
    from fabrictool.base.errors import FabrictoolError
    from fabrictool.base.settings import Settings
    from fabrictool.clusters.checks.result import failed
    from fabrictool.state.checkup import fabric_checks, machine_checks

    checks = machine_checks(Settings.from_environment())
    try:
        loaded = source.loaded
    except FabrictoolError as error:
        return [*checks, *[failed("blueprint", problem) for problem in error.problems]]
    with source.fabric() as fabric:
        return [*checks, *fabric_checks(fabric, loaded)]


def version() -> None:
    """Print the version of this release."""
    from fabrictool import __version__
    from fabrictool.cli.output import data

    data(__version__)
