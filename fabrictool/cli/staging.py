"""What the ``weights`` commands work on: the pinned lists beside a blueprint, and each cluster's folder."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import InvalidInputError, UsageError
from fabrictool.base.files import file_error
from fabrictool.base.settings import Settings
from fabrictool.cli.source import Source, find_blueprint
from fabrictool.clusters.connections.factory import connect_login
from fabrictool.clusters.weights.depot import ThisMachine, WeightsDepot, set_name
from fabrictool.clusters.weights.listing import files_of, parse_listing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabrictool.clusters.weights.listing import WeightsListing
    from fabrictool.domain.inventory import Inventory


@dataclass(frozen=True, slots=True)
class PinnedWeights:
    """An entry of a blueprint's `weights`, and where it was written."""

    name: str
    sha256: str
    source: Path
    listing_file: Path

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


def listing_file(name: str, blueprint: Path | None) -> Path:
    """Where the list of weights of that name lies."""
    return find_blueprint(blueprint).parent / "weights" / f"{name}.sha256"


def declared_source(name: str, blueprint: Path | None) -> Path:
    """Raises FT9001 when the blueprint has no such weights."""
    known = Source(blueprint).blueprint.weights
    if name not in known:
        hint = f"one of {', '.join(sorted(known))}" if known else f"fabrictool weights lock {name} FOLDER"
        raise UsageError.of("FT9001", f"the blueprint has no weights {name!r}", hint=hint)
    return find_blueprint(blueprint).parent / Path(known[name].source).expanduser()


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
        PinnedWeights(name, weights.sha256, folder / Path(weights.source).expanduser(), listing_file(name, blueprint))
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
    if described.here:
        units = Settings.from_environment().state_path / fabric / "clusters"
        return ClusterDepot(name, WeightsDepot(name, described.weights, ThisMachine()), str(units))
    connection = open_.enter_context(connect_login(described.login[0]))
    return ClusterDepot(name, WeightsDepot(name, described.weights, connection), f"{described.folder}/units")


def outlook_of(depot: ClusterDepot, weights: PinnedWeights) -> dict[str, Any]:
    """What a cluster has of one set: condition, octets in all, octets that would be sent, free octets."""
    listing, paths = paths_of(weights)
    octets = sum(paths[file.name].stat().st_size for file in listing.files)
    (compared,) = depot.weights.compare([set_name(weights.sha256)], everything=False)
    sets, free = depot.weights.look(depot.units)
    there = next((staged.octets for staged in sets if staged.name == compared.name and not staged.complete), 0)
    missing = {"whole": 0, "partial": max(0, octets - there)}.get(compared.condition, octets)
    return {
        "cluster": depot.cluster, "name": weights.name, "condition": compared.condition, "octets": octets,
        "missing": missing, "free": free,
    }  # fmt: skip


def check_room(outlook: dict[str, Any]) -> None:
    """Raises FT5603 when it does not fit, before anything is sent."""
    if outlook["missing"] > outlook["free"] > 0:
        message = f"{outlook['name']} needs {outlook['missing'] >> 20} MiB on {outlook['cluster']}, and"
        hint = "make room there, or `fabrictool weights prune`"
        raise InvalidInputError.of("FT5603", f"{message} {outlook['free'] >> 20} MiB are free", hint=hint)


def paths_of(weights: PinnedWeights) -> tuple[WeightsListing, dict[str, Path]]:
    """The list, and where its files are here; raises FT5601, FT5602, FT5606, FT4301."""
    listing = weights.listing()
    try:
        paths = files_of(weights.source)
    except OSError as error:
        raise file_error(error, weights.source) from error
    if absent := [file.name for file in listing.files if file.name not in paths]:
        message = f"{weights.name} has no file {absent[0]} here"
        raise InvalidInputError.of("FT5602", message, file=str(weights.source))
    return listing, paths
