"""The files that a command is about: named by its options, read once, handed on."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, Problem, UsageError
from fabrictool.base.settings import Settings
from fabrictool.cli.output import print_problems, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.base.errors import Place
    from fabrictool.blueprint import Loaded
    from fabrictool.blueprint.load import Identity
    from fabrictool.domain.blueprint import Blueprint
    from fabrictool.domain.inventory import Inventory
    from fabrictool.state.fabric import Fabric


@dataclass(frozen=True)
class Source:
    """A blueprint with its inventory, overlay and scenario."""

    path: Path | None = None
    """Of the blueprint; None: the one that is meant by default."""
    inventory_path: Path | None = None
    overlay: str | None = None
    scenario: str | None = None
    lenient: bool = False
    """For commands that stop and look: a blueprint with errors in what is served will do."""
    planned: bool = False
    """Whether the loader's warnings stand in a plan that is shown: then they are not said beside it."""

    @cached_property
    def loaded(self) -> Loaded:
        """Read and checked; warnings go to stderr, unless a plan has them."""
        loaded = load_with_traces(find_blueprint(self.path), self.inventory_path, self.overlay, self.scenario)
        if not self.planned:
            print_problems(loaded.warnings)
        return loaded

    @contextmanager
    def warnings_without_a_plan(self) -> Iterator[None]:
        """Where planning fails, there is no plan that would say them."""
        try:
            yield
        except FabrictoolError:
            if self.planned and "loaded" in self.__dict__:
                print_problems(self.loaded.warnings)
            raise

    @property
    def blueprint(self) -> Blueprint:
        return self.loaded.blueprint

    @property
    def inventory(self) -> Inventory:
        return self.loaded.inventory

    def read(self) -> None:
        """Read all now, and say now what is wrong with it."""
        _ = self.identity, self.latency_targets

    @cached_property
    def latency_targets(self) -> dict[str, tuple[float | None, float | None]]:
        """Of the models; none where the blueprint has errors and that does not matter."""
        try:
            return self.blueprint.latency_targets
        except FabrictoolError:
            if not self.lenient:
                raise
            return {}

    @cached_property
    def identity(self) -> Identity:
        """Name, state and inventory; of a blueprint with errors just these are read, and that is said."""
        from fabrictool.base.errors import InvalidInputError
        from fabrictool.blueprint.load import load_identity

        try:
            return self.loaded.identity
        except InvalidInputError as error:
            path = find_blueprint(self.path)
            identity = load_identity(path, inventory_path=self.inventory_path, environment=os.environ)
            errors = f"{len(error.problems)} error{'s' if len(error.problems) > 1 else ''}"
            say(f"{path} has {errors} (`fabrictool validate` lists them); this command does not need the wrong parts")
            return identity

    def inventory_alone(self) -> Inventory:
        """The inventory that is given, else the one that the blueprint names; alone it needs no blueprint."""
        if self.path is not None or self.inventory_path is None:
            return self.inventory
        from fabrictool.blueprint.load import load_inventory

        return load_inventory(self.inventory_path)

    def fabric(self) -> Fabric:
        """Opened under this user's settings; to be used as a context, once a command."""
        from fabrictool.state.fabric import Fabric

        known = self.identity if self.lenient else self.loaded.identity
        return Fabric.open(known.fabric, known.state, known.inventory, Settings.from_environment(), os.environ)


def load_with_traces(path: Path, inventory: Path | None, overlay: str | None, scenario: str | None) -> Loaded:
    """Files as they are read for every command, with what recorded demands and calibrations hold.

    Raises as `blueprint.load`, FT1127 and FT1128.
    """
    from fabrictool.blueprint import load

    loaded = load(path, inventory_path=inventory, overlay=overlay, scenario=scenario, environment=os.environ)
    inventory_read, unused = _calibrated(loaded)
    loaded = replace(loaded, warnings=(*loaded.warnings, *unused, *_builds(loaded)), inventory=inventory_read)
    if all(
        demand is None or (demand.trace is None and demand.quantile is None)
        for model in loaded.blueprint.models.values()
        for demand in (model.demand, *(companion.demand for companion in model.companions.values()))
    ):
        return loaded
    from fabrictool.workload.recorded import with_traces

    def place(model: str) -> Place:
        node, _ = loaded.blueprint_tree.nearest(("models", model, "demand", "trace"))
        return node.place(f"models.{model}.demand.trace")

    return replace(loaded, blueprint=with_traces(loaded.blueprint, path.parent, place))


def _calibrated(loaded: Loaded) -> tuple[Inventory, list[Problem]]:
    """The inventory with what its calibrations hold, and warnings of those that no plan can use.

    Raises InvalidInputError FT1128 for each that is none, and for two of the same device and engine.
    """
    if not loaded.inventory.calibrations:
        return loaded.inventory, []
    from fabrictool.base.errors import InvalidInputError
    from fabrictool.cli.calibration_files import texts_of
    from fabrictool.simulator.calibration import calibrations_in

    devices = {part.device for cluster in loaded.inventory.clusters.values() for part in cluster.partitions.values()}
    texts: list[str] = []
    problems: list[Problem] = []
    seen = set()
    for number, name in enumerate(loaded.inventory.calibrations):
        node, _ = loaded.inventory_tree.nearest(("calibrations", number))
        place = node.place(f"calibrations[{number}]")
        try:
            mine = texts_of(node.source.path.parent / name)
        except FabrictoolError as error:
            problems += [Problem("FT1128", problem.message, place, problem.hint) for problem in error.problems]
            continue
        for calibration in calibrations_in(mine):
            what = f"{calibration.engine} on {calibration.device}, {calibration.scope}"
            if what in seen:
                problems.append(Problem("FT1128", f"two calibrations are of {what}", place, "keep the better one"))
            if calibration.scope != "online" or calibration.device not in devices:
                why = "no plan takes it: it is of single batches, not of a server"
                if calibration.scope == "online":
                    why = "no partition here has this device"
                problems.append(Problem("FT1128", f"{what}: {why}", place, "leave it out", severity="warning"))
            seen.add(what)
        texts += mine
    if any(problem.severity == "error" for problem in problems):
        raise InvalidInputError([problem for problem in problems if problem.severity == "error"])
    return loaded.inventory.with_calibrated(tuple(texts)), problems


def _builds(loaded: Loaded) -> Iterator[Problem]:
    """What is said when gateways would send nothing to nodes that run this installation."""
    builds = loaded.blueprint.trust.builds
    if builds is None:
        return
    from fabrictool.agent.measured import package_folder
    from fabrictool.mesh.attestation import BUILD_FILE, read_build, read_signer

    place = loaded.blueprint_tree.nearest(("trust", "builds"))[0].place("trust.builds")
    hint = "`fabrictool trust sign-build --key FILE` signs it, before it is installed on the nodes"
    try:
        signer = read_build((package_folder() / BUILD_FILE).read_bytes()).signer
        if signer in map(read_signer, builds.signers):
            return
        message = "none of these keys signed this installation: its nodes get no requests"
    except (OSError, FabrictoolError):
        message = "nobody signed this installation: its nodes get no requests"
    yield Problem("FT1235", message, place, hint, severity="warning")


def find_blueprint(given: Path | None) -> Path:
    """The blueprint that is meant: the one given, ``blueprint.yaml``, or the only one in ``blueprints/``."""
    if given is not None:
        return given
    if Path("blueprint.yaml").exists():
        return Path("blueprint.yaml")
    candidates = sorted(Path("blueprints").glob("*.yaml")) if Path("blueprints").is_dir() else []
    if len(candidates) == 1:
        return candidates[0]
    what = f"blueprints/ holds {len(candidates)} files" if candidates else "there is no blueprint.yaml here"
    raise UsageError.of(
        "FT9004", f"no blueprint given, and {what}", hint="give one with -b FILE; `fabrictool init` writes a starter"
    )
