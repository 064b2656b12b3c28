"""``weights lock``, ``plan``, ``stage``, ``verify``, ``list``, ``prune``: models' files, pinned by hash, on sites."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from fabrictool.cli.options import BlueprintOption, InventoryOption, JsonOption, YesOption

ClustersArgument = Annotated[list[str] | None, typer.Argument(help="Names of clusters; default: all that need some.")]
FromOption = Annotated[
    Literal["here", "login", "job"] | None,
    typer.Option(
        "--from",
        show_default="as the inventory says, else login; here for files of this machine",
        help="Who fetches what is missing: this machine, which sends it on, the login node, or a job.",
    ),
]
NameOption = Annotated[str, typer.Option("--name", metavar="NAME", help="Of these weights alone.")]


def register(app: typer.Typer) -> None:
    weights = typer.Typer(help="Models' files: pinned by their hashes, staged on sites.", no_args_is_help=True)
    for name, function in (
        ("lock", lock), ("plan", plan), ("stage", stage), ("verify", verify), ("list", list_), ("prune", prune),
    ):  # fmt: skip
        weights.command(name)(function)
    app.add_typer(weights, name="weights")


def lock(
    name: Annotated[str, typer.Argument(help="As the blueprint names them under `weights`.")],
    source: Annotated[
        str | None,
        typer.Argument(help="File, folder, https://… or hf://ORGANISATION/NAME@REVISION; default: their `source`."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Leave out such files, as 'original/*'; may be repeated."),
    ] = None,
    blueprint: BlueprintOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the list of a model's files and their hashes beside the blueprint, to be pinned and reviewed."""
    from fabrictool.base.errors import UsageError
    from fabrictool.base.files import write_output
    from fabrictool.base.ids import is_name
    from fabrictool.cli.output import data, json_data
    from fabrictool.cli.source import find_blueprint
    from fabrictool.cli.staging import StagingProgress, declared_source, listing_file, path_of
    from fabrictool.clusters.weights.listing import list_folder
    from fabrictool.clusters.weights.sources import lock_remote, remote_source

    if not is_name(name):
        raise UsageError.of("FT9001", f"{name!r} is no name", hint="lower-case letters, digits, . _ -")
    text, progress = source or declared_source(name, blueprint), StagingProgress(f"hashing {name}").octets
    remote = remote_source(text)
    if remote is not None:
        remote, listing = lock_remote(remote, os.environ, progress)
        text = remote.text
    else:
        # What is typed begins where it is typed, what the blueprint says beside it.
        path = path_of(text, Path() if source else find_blueprint(blueprint).parent)
        listing = list_folder(path, progress)
    listing = listing.without(exclude or ())
    file = listing_file(name, blueprint)
    file.parent.mkdir(exist_ok=True)
    write_output(file, listing.document.encode())
    if as_json:
        from fabrictool.cli.answers import WeightsLock

        files = len(listing.files)
        json_data(WeightsLock(name=name, sha256=listing.sha256, source=text, list=str(file), files=files))
        return
    data(f"{file}: {len(listing.files)} file{'s'[: len(listing.files) != 1]}")
    data(f"put this into the blueprint:\n  weights:\n    {name}:\n      source: {text}\n      sha256: {listing.sha256}")


def plan(
    clusters: ClustersArgument = None,
    name: NameOption = "",
    origin: FromOption = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Say what each cluster has of the blueprint's weights, what is missing, where it would be fetched, and whether it
    fits.
    """
    from fabrictool.cli.output import data, json_data, octets_text, table
    from fabrictool.cli.staging import open_depots, outlook_of

    rows = []
    with open_depots(clusters, blueprint, inventory) as (depots, pinned):
        for depot in depots:
            rows += [outlook_of(depot, weights, origin) for weights in pinned if name in ("", weights.name)]
    if as_json:
        from fabrictool.cli.answers import WeightsPlan

        json_data(WeightsPlan(sets=rows))
    else:
        shown = [
            [
                row.cluster,
                row.name,
                row.condition,
                *(octets_text(octets) if row.octets else "?" for octets in (row.octets, row.missing)),
                octets_text(row.free) if row.free else "?",
                row.origin,
                row.source,
            ]
            for row in rows
        ]
        data(table(["CLUSTER", "WEIGHTS", "THERE", "SIZE", "MISSING", "FREE", "FROM", "SOURCE"], shown))
        for row in rows:
            if row.missing and row.free and row.missing > row.free:
                data(f"{row.name} does not fit on {row.cluster}: {octets_text(row.missing - row.free)} are lacking")
    return 1 if any(row.missing > row.free > 0 for row in rows) else 0


def stage(
    clusters: ClustersArgument = None,
    name: NameOption = "",
    origin: FromOption = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch or send what is missing or damaged, and compare it there; broken off, the same command goes on where it
    stopped.
    """
    from fabrictool.cli.answers import StagedRow, WeightsStage
    from fabrictool.cli.output import json_data, say
    from fabrictool.cli.staging import StagingProgress, open_depots, stage_one

    results = []
    with open_depots(clusters, blueprint, inventory) as (depots, pinned):
        for depot in depots:
            for weights in pinned:
                if name not in ("", weights.name):
                    continue
                new = stage_one(depot, weights, origin, StagingProgress(f"{weights.name} to {depot.cluster}"))
                say(f"{weights.name}: {'staged on' if new else 'was on'} {depot.cluster}{'' if new else ' already'}")
                results.append(StagedRow(cluster=depot.cluster, name=weights.name, new=new))
    if as_json:
        json_data(WeightsStage(sets=results))


def verify(
    clusters: ClustersArgument = None,
    name: NameOption = "",
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> int:
    """Hash every staged file on the clusters and say which are not what is listed; 1 when any is not."""
    from dataclasses import asdict

    from fabrictool.cli.answers import VerifiedRow, WeightsVerify
    from fabrictool.cli.output import data, json_data, say
    from fabrictool.cli.staging import open_depots
    from fabrictool.clusters.weights.depot import set_name

    results = []
    with open_depots(clusters, blueprint, inventory) as (depots, pinned):
        for depot in depots:
            names = {set_name(weights.sha256): weights.name for weights in pinned if name in ("", weights.name)}
            say(f"{depot.cluster}: hashing, which may take minutes")
            results += [
                VerifiedRow(cluster=depot.cluster, weights=names[compared.name], **asdict(compared))
                for compared in depot.weights.compare(names, everything=True)
            ]
    if as_json:
        json_data(WeightsVerify(sets=results))
    else:
        for result in results:
            files = f": {', '.join(result.files)}" if result.files else ""
            data(f"{result.weights} on {result.cluster}: {result.condition}{files}")
        if any(result.condition != "whole" for result in results):
            data("`fabrictool weights stage` sends what is missing or damaged")
    return 1 if any(result.condition != "whole" for result in results) else 0


def list_(
    clusters: ClustersArgument = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the sets that lie on clusters, their sizes, and how many units name them."""
    from dataclasses import asdict

    from fabrictool.cli.answers import SetRow, WeightsList
    from fabrictool.cli.output import data, json_data, octets_text, table
    from fabrictool.cli.staging import open_depots
    from fabrictool.clusters.weights.depot import set_name

    rows = []
    with open_depots(clusters, blueprint, inventory) as (depots, pinned):
        names = {set_name(weights.sha256): weights.name for weights in pinned}
        for depot in depots:
            sets, _ = depot.weights.look(depot.units)
            rows += [
                SetRow(cluster=depot.cluster, weights=names.get(staged.name, ""), **asdict(staged)) for staged in sets
            ]
    if as_json:
        json_data(WeightsList(sets=rows))
    elif rows:
        shown = [
            [
                row.cluster,
                row.weights or "-",
                row.name[:19],
                octets_text(row.octets),
                "whole" if row.complete else "part",
                str(row.units),
            ]
            for row in rows
        ]
        data(table(["CLUSTER", "WEIGHTS", "SET", "SIZE", "STAGED", "UNITS"], shown))
    else:
        data("nothing is staged")


def prune(
    clusters: ClustersArgument = None,
    blueprint: BlueprintOption = None,
    inventory: InventoryOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove sets that neither the blueprint nor any unit of this account names, and damaged ones without a unit."""
    from fabrictool.cli.answers import RemovedSet, WeightsPrune
    from fabrictool.cli.applying import ask
    from fabrictool.cli.output import data, json_data, octets_text, say, table
    from fabrictool.cli.staging import open_depots
    from fabrictool.clusters.weights.depot import set_name

    removed = []
    with open_depots(clusters, blueprint, inventory) as (depots, pinned):
        kept = {set_name(weights.sha256) for weights in pinned}
        for depot in depots:
            sets, _ = depot.weights.look(depot.units)
            free = [staged for staged in sets if not staged.units]
            damaged = {
                compared.name
                for compared in depot.weights.compare(
                    [staged.name for staged in free if staged.complete], everything=False
                )
                if compared.condition == "damaged"
            }
            unused = [staged for staged in free if staged.name not in kept or staged.name in damaged]
            if not unused:
                say(f"{depot.cluster}: nothing to remove")
                continue
            if not as_json:
                data(table(["SET", "SIZE"], [[staged.name[:19], octets_text(staged.octets)] for staged in unused]))
            question = f"Remove {len(unused)} set{'s'[: len(unused) != 1]} from {depot.cluster}?"
            ask(question, yes=yes, first="`weights list` lists them")
            depot.weights.remove([staged.name for staged in unused])
            say(f"{depot.cluster}: {octets_text(sum(staged.octets for staged in unused))} freed")
            removed += [RemovedSet(cluster=depot.cluster, name=staged.name, octets=staged.octets) for staged in unused]
    if as_json:
        json_data(WeightsPrune(removed=removed))
