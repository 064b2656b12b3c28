"""What the ``weights`` commands work on: the pinned lists beside a blueprint, and each cluster's folder."""

from __future__ import annotations

import os
import posixpath
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fabrictool.base.errors import InvalidInputError, UsageError
from fabrictool.base.files import file_error
from fabrictool.base.settings import Settings
from fabrictool.cli.answers import WeightsOutlook
from fabrictool.cli.output import octets_text, say
from fabrictool.cli.source import Source, find_blueprint
from fabrictool.clusters.connections.factory import connect_login
from fabrictool.clusters.kinds import scheduler_of
from fabrictool.clusters.weights.depot import ThisMachine, WeightsDepot, set_name
from fabrictool.clusters.weights.fetch import HUB
from fabrictool.clusters.weights.fetching import FetchAtLogin, FetchHere, FetchInJob
from fabrictool.clusters.weights.listing import files_of, parse_listing
from fabrictool.clusters.weights.sources import remote_source
from fabrictool.domain.specs import AgentSpec
from fabrictool.engines.artifacts import resolve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabrictool.clusters.connections.protocol import Connection
    from fabrictool.clusters.weights.fetching import FetchReport
    from fabrictool.clusters.weights.listing import WeightsListing
    from fabrictool.clusters.weights.sources import RemoteSource
    from fabrictool.domain.inventory import ClusterSpec, Inventory
    from fabrictool.domain.plan import Plan

Origin = Literal["here", "login", "job"]
"""Where files are fetched: by this machine, a login node, or a job."""


@dataclass(frozen=True, slots=True)
class PinnedWeights:
    """An entry of a blueprint's `weights`, and where it was written."""

    name: str
    sha256: str
    source: str
    """As the blueprint says it."""
    folder: Path
    """Of the blueprint."""
    listing_file: Path

    @property
    def remote(self) -> RemoteSource | None:
        """None: its files lie on this machine."""
        return remote_source(self.source)

    @property
    def path(self) -> Path:
        """On this machine; raises FT7011, FT7012."""
        return path_of(self.source, self.folder)

    def listing(self) -> WeightsListing:
        """The list as it was reviewed; raises FT5601, FT5606."""
        try:
            text = self.listing_file.read_text()
        except FileNotFoundError:
            text = ""
        except OSError as error:
            raise file_error(error, self.listing_file) from error
        listing = parse_listing(text, str(self.listing_file)) if text else None
        if listing is None or listing.sha256 != self.sha256:
            what = "is not there" if listing is None else f"has the hash {listing.sha256[:12]}…"
            message = f"{self.listing_file} {what}, and the blueprint pins {self.sha256[:12]}… for {self.name}"
            raise InvalidInputError.of("FT5606", message, hint=f"fabrictool weights lock {self.name}")
        return listing


@dataclass(frozen=True, slots=True)
class ClusterDepot:
    """One cluster's folder for weights."""

    cluster: str
    weights: WeightsDepot
    units: str
    """Folder of its units."""
    described: ClusterSpec
    connection: Connection | None
    """None: it is this machine."""


def listing_file(name: str, blueprint: Path | None) -> Path:
    """Where the list of weights of that name lies."""
    return find_blueprint(blueprint).parent / "weights" / f"{name}.sha256"


def declared_source(name: str, blueprint: Path | None) -> str:
    """Raises FT9001 when the blueprint has no such weights."""
    known = Source(blueprint).blueprint.weights
    if name not in known:
        hint = f"one of {', '.join(sorted(known))}" if known else f"fabrictool weights lock {name} SOURCE"
        raise UsageError.of("FT9001", f"the blueprint has no weights {name!r}", hint=hint)
    return known[name].source


def path_of(source: str, folder: Path) -> Path:
    """Of what lies on this machine; relative ones begin at `folder`. Raises FT7011, FT7012."""
    if source.startswith("pypi://"):
        return Path(resolve(source))
    return folder / Path(source).expanduser()


@contextmanager
def open_depots(
    clusters: Sequence[str] | None, blueprint: Path | None, inventory: Path | None
) -> Iterator[tuple[list[ClusterDepot], list[PinnedWeights]]]:
    """The named clusters' folders, else those of all enabled clusters that have one; and what the blueprint pins.

    Raises
    ------
    UsageError
        FT5341 there is no such cluster. InvalidInputError FT5607 it has no folder for weights.
    """
    source = Source(blueprint, inventory)
    folder = find_blueprint(blueprint).parent
    pinned = [
        PinnedWeights(name, weights.sha256, weights.source, folder, listing_file(name, blueprint))
        for name, weights in sorted(source.blueprint.weights.items())
    ]
    described = source.inventory.clusters
    names = clusters or [name for name, cluster in described.items() if cluster.weights is not None and cluster.enabled]
    with ExitStack() as open_:
        yield [_depot(name, source.inventory, source.blueprint.fabric, open_) for name in names], pinned


def _depot(name: str, inventory: Inventory, fabric: str, open_: ExitStack) -> ClusterDepot:
    described = inventory.clusters.get(name)
    if described is None:
        known = ", ".join(sorted(inventory.clusters))
        raise UsageError.of("FT5341", f"the inventory has no cluster `{name}`", hint=f"clusters: {known}")
    if described.weights is None or not (described.here or described.login):
        message = f"no weights can be staged on {name}: "
        why = "it has no `weights` folder" if described.weights is None else "it has no login node"
        raise InvalidInputError.of("FT5607", message + why, thing=f"cluster/{name}")
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    if described.here:
        units = Settings.from_environment().state_path / fabric / "clusters"
        here = WeightsDepot(name, described.weights, ThisMachine(), endpoint)
        return ClusterDepot(name, here, str(units), described, None)
    connection = open_.enter_context(connect_login(described.login[0]))
    there = WeightsDepot(name, described.weights, connection, endpoint)
    return ClusterDepot(name, there, f"{described.folder}/units", described, connection)


def origin_of(depot: ClusterDepot, weights: PinnedWeights, wanted: Origin | None) -> Origin:
    """Where they are fetched: as the command says, else as the inventory does. Raises FT5610 where that cannot be."""
    if weights.remote is None:
        if wanted not in (None, "here"):
            message = f"{weights.name} lies on this machine ({weights.source}), and is sent from here alone"
            raise UsageError.of("FT5610", message, hint="leave out --from, or name a hub's repository as its source")
        return "here"
    origin = wanted or depot.described.weights_from or "login"
    if origin == "job" and depot.connection is None:
        message = f"{depot.cluster} is this machine, and has no jobs"
        raise UsageError.of("FT5610", message, hint="--from login fetches straight into its folder")
    return origin


def outlook_of(depot: ClusterDepot, weights: PinnedWeights, wanted: Origin | None = None) -> WeightsOutlook:
    """What a cluster has of one set, and where what is missing would be fetched."""
    if weights.remote is not None:
        octets = weights.listing().octets or 0
    else:
        listing, paths = paths_of(weights)
        octets = sum(paths[file.name].stat().st_size for file in listing.files)
    (compared,) = depot.weights.compare([set_name(weights.sha256)], everything=False)
    sets, free = depot.weights.look(depot.units)
    there = next((staged.octets for staged in sets if staged.name == compared.name and not staged.complete), 0)
    missing = {"whole": 0, "partial": max(0, octets - there)}.get(compared.condition, octets)
    return WeightsOutlook(
        cluster=depot.cluster,
        name=weights.name,
        condition=compared.condition,
        octets=octets,
        missing=missing,
        free=free,
        source=weights.source,
        origin=origin_of(depot, weights, wanted),
    )


def check_room(outlook: WeightsOutlook) -> None:
    """Raises FT5603 when it does not fit, before anything is sent."""
    if outlook.missing > outlook.free > 0:
        message = f"{outlook.name} needs {outlook.missing >> 20} MiB on {outlook.cluster}, and"
        hint = "make room there, or `fabrictool weights prune`"
        raise InvalidInputError.of("FT5603", f"{message} {outlook.free >> 20} MiB are free", hint=hint)


def stage_one(depot: ClusterDepot, weights: PinnedWeights, wanted: Origin | None, progress: StagingProgress) -> bool:
    """Whether it was not there already; raises as `WeightsDepot.fetch`, FT5610."""
    check_room(outlook_of(depot, weights, wanted))
    remote, origin = weights.remote, origin_of(depot, weights, wanted)
    if remote is None:
        listing, paths = paths_of(weights)
        return depot.weights.stage(listing, paths, progress.octets)
    listing = weights.listing()
    if depot.connection is None:
        return depot.weights.fetch(listing, remote, FetchHere(), progress.told)
    if origin == "here":
        paths = _fetched_here(weights, listing, remote, progress)
        return depot.weights.stage(listing, paths, progress.octets)
    kind = FetchInJob if origin == "job" else FetchAtLogin
    way = kind(depot.cluster, depot.described, depot.connection, scheduler_of(depot.described.kind))
    return depot.weights.fetch(listing, remote, way, progress.told)


def _fetched_here(
    weights: PinnedWeights, listing: WeightsListing, remote: RemoteSource, progress: StagingProgress
) -> dict[str, Path]:
    """Name → path in this user's cache, where the whole set is kept for the next cluster."""
    folder = Settings.from_environment().cache_path / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    cache = WeightsDepot("this machine", str(folder), ThisMachine(), os.environ.get("HF_ENDPOINT") or HUB)
    cache.fetch(listing, remote, FetchHere(), progress.told)
    return {file.name: folder / set_name(weights.sha256) / file.name for file in listing.files}


def stage_for(plan: Plan, blueprint: Path | None, inventory: Path | None) -> None:
    """Stage what the replicas that a plan starts wait for; says what that is. Raises as `stage_one`."""
    needed: dict[str, set[str]] = {}
    for action in plan.changes:
        if isinstance(action.spec, AgentSpec):
            names = {posixpath.basename(staged) for staged in action.spec.staged_sets}
            needed.setdefault(action.spec.cluster, set()).update(names)
    clusters = sorted(cluster for cluster, names in needed.items() if names)
    if not clusters:
        return
    with open_depots(clusters, blueprint, inventory) as (depots, pinned):
        for depot in depots:
            compared = depot.weights.compare(needed[depot.cluster], everything=False)
            lacking = {staged.name for staged in compared if staged.condition != "whole"}
            for weights in pinned:
                if set_name(weights.sha256) in lacking:
                    say(f"replicas on {depot.cluster} wait for weights {weights.name}: staging them first")
                    stage_one(depot, weights, None, StagingProgress(f"{weights.name} to {depot.cluster}"))
                    say(f"{weights.name}: staged on {depot.cluster}")


class StagingProgress:
    """Says every few seconds how far it is, and what it waits for."""

    def __init__(self, what: str) -> None:
        self._what, self._text = what, ""
        self._begun = self._last = time.monotonic()
        self._first: int | None = None

    def octets(self, done: int, total: int) -> None:
        """Of which those before the first call cost no time."""
        now = time.monotonic()
        self._first = done if self._first is None else self._first
        if now - self._last < (1.0 if sys.stderr.isatty() else 10.0):
            return
        self._last = now
        rate = (done - self._first) / max(0.001, now - self._begun)
        left = f", {(total - done) / rate:.0f} s to go" if rate > 0 and total > done else ""
        of = f" of {octets_text(total)} ({100 * done // total} %)" if total else ""
        say(f"{self._what}: {octets_text(done)}{of}{left}")

    def told(self, told: FetchReport) -> None:
        """By a program that fetches; what it waits for is said once."""
        if told.state == "fetching":
            self._text = ""
            self.octets(told.done, told.total)
            return
        words = {
            "queued": f"{told.text} waits or has just begun",
            "waiting": told.text,
            "hashing": "all is there; comparing it with the list, which may take minutes",
        }
        text = words.get(told.state, "")
        if text and text != self._text:
            say(f"{self._what}: {text}")
        self._text = text


def paths_of(weights: PinnedWeights) -> tuple[WeightsListing, dict[str, Path]]:
    """The list, and where its files are here; raises FT5601, FT5602, FT5606, FT4301."""
    listing = weights.listing()
    try:
        paths = files_of(weights.path)
    except OSError as error:
        raise file_error(error, weights.path) from error
    if absent := [file.name for file in listing.files if file.name not in paths]:
        message = f"{weights.name} has no file {absent[0]} here"
        raise InvalidInputError.of("FT5602", message, file=str(weights.path))
    return listing, paths
