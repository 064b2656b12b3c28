"""From files to a checked `Blueprint` and `Inventory`: read, merge, fill in, validate, refer.

Each phase collects all its problems before it fails: YAML, composition, schema, references.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from fabrictool.base.errors import InvalidInputError, Place, Problem
from fabrictool.blueprint.architecture_check import ArchitectureCheck
from fabrictool.blueprint.complaints import in_order, meant, problems_of
from fabrictool.blueprint.merge import join, lay_over, with_defaults
from fabrictool.blueprint.reader import read
from fabrictool.blueprint.references import check
from fabrictool.blueprint.tree import YamlNode, describe, dotted
from fabrictool.blueprint.variables import fill
from fabrictool.domain.architectures import Architecture, ModelId  # noqa: TC001 - pydantic reads the annotation
from fabrictool.domain.blueprint import Blueprint
from fabrictool.domain.inventory import Inventory
from fabrictool.domain.plan import inputs_digest
from fabrictool.domain.quantities import Document, Name
from fabrictool.domain.statebackend import StateBackend  # noqa: TC001 - pydantic reads the annotation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.catalog import ModelArchitecture

API_VERSION = "fabrictool/v1"
HEAD = ("apiVersion", "kind")
_D = TypeVar("_D", bound=Document)


@dataclass(frozen=True, slots=True)
class ReadFile:
    """A file that the result depends on."""

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Which fabric it is, where its state is, and what it may run on: all that stopping it and looking at it need."""

    fabric: str
    state: StateBackend | None
    inventory: Inventory
    digest: str
    """Of the blueprint with its inventory; of one with errors, of its file."""


@dataclass(frozen=True)
class Loaded:
    """A checked blueprint with its inventory, and where every value came from."""

    blueprint: Blueprint
    inventory: Inventory
    blueprint_tree: YamlNode
    inventory_tree: YamlNode
    files: tuple[ReadFile, ...]
    """In the order of reading: blueprint, parts, overlay, inventory."""
    variables: tuple[str, ...]
    """Environment variables that were filled in, sorted."""
    warnings: tuple[Problem, ...]

    @property
    def digest(self) -> str:
        """What a plan of them relies on."""
        return inputs_digest(self.blueprint, self.inventory)

    @property
    def identity(self) -> Identity:
        return Identity(self.blueprint.fabric, self.blueprint.state, self.inventory, self.digest)


def load(
    blueprint_path: Path,
    *,
    inventory_path: Path | None = None,
    overlay: str | None = None,
    scenario: str | None = None,
    environment: Mapping[str, str],
) -> Loaded:
    """Load a blueprint with all it names.

    `inventory_path` overrides the blueprint's ``inventory``; `overlay` names ``overlays/NAME.yaml`` beside the
    blueprint; `scenario` one of the blueprint's ``scenarios``.

    Raises
    ------
    InvalidInputError
        With all problems of the first phase that has any: FT10xx, FT13xx, FT11xx, FT12xx.
    """
    return _Loading(environment).load(blueprint_path, inventory_path, overlay, scenario)


def load_identity(
    blueprint_path: Path, *, inventory_path: Path | None = None, environment: Mapping[str, str]
) -> Identity:
    """Of a blueprint whose models, tenants or rules may be wrong; raises InvalidInputError when what is read is."""
    return _Loading(environment).identity(blueprint_path, inventory_path)


def load_inventory(path: Path) -> Inventory:
    """An inventory by itself, without includes and variables; raises InvalidInputError with all its problems."""
    root = read(path, str(path))
    try:
        return Inventory.model_validate(root.data())
    except ValidationError as error:
        raise InvalidInputError(problems_of(error, root, Inventory)) from error


def load_architectures(path: Path, *, environment: Mapping[str, str]) -> dict[str, ModelArchitecture]:
    """The models that a part or a blueprint describes itself, by id, whatever else it holds.

    Raises InvalidInputError with the problems of what is read, FT1102 where no model is described.
    """
    return _Loading(environment).architectures(path)


class _Described(Document):
    """The key under which models are described."""

    architectures: dict[ModelId, Architecture]


class _Named(Document):
    """The keys that say which fabric it is."""

    fabric: Name
    state: StateBackend | None = None


class _Loading:
    """One call of `load`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._problems: list[Problem] = []
        self._files: list[ReadFile] = []
        self._variables: set[str] = set()
        self._templates = False

    def load(self, path: Path, inventory_path: Path | None, overlay: str | None, scenario: str | None) -> Loaded:
        root = self._read_blueprint(path)
        if root is not None and overlay is not None:
            root = self._with_overlay(root, path, overlay)
        root, inventory = self._with_inventory(root, inventory_path)
        if scenario is not None:
            root, inventory = self._with_scenario(root, inventory, scenario)
        root = with_defaults(self._finish(root))
        inventory = self._finish(inventory)
        self._fail_if_any()
        blueprint = self._validate(Blueprint, root)
        checked = self._validate(Inventory, inventory)
        if blueprint is None or checked is None:
            raise self._failure()
        findings = check(blueprint, checked, root, inventory)
        self._problems.extend(problem for problem in findings if problem.severity == "error")
        self._fail_if_any()
        warnings = tuple(in_order(problem for problem in findings if problem.severity == "warning"))
        return Loaded(blueprint, checked, root, inventory, tuple(self._files), tuple(sorted(self._variables)), warnings)

    def identity(self, path: Path, inventory_path: Path | None) -> Identity:
        """Of the blueprint's own file alone: parts and overlays name no fabric."""
        root, inventory = self._with_inventory(self._read(path, "Blueprint"), inventory_path)
        named = {key: node for key in ("fabric", "state") if (node := root.child(key)) is not None}
        head = self._finish(root.like(named))
        inventory = self._finish(inventory)
        self._fail_if_any()
        which, checked = self._validate(_Named, head), self._validate(Inventory, inventory)
        if which is None or checked is None:
            raise self._failure()
        return Identity(which.fabric, which.state, checked, root.source.sha256)

    def architectures(self, path: Path) -> dict[str, ModelArchitecture]:
        root = self._read(path, "Part", "Blueprint")
        if root is None:
            raise self._failure()
        listed = root.child("architectures")
        if listed is None or not listed.value:
            top = root.source.place(root.line, root.column)
            hint = "`fabrictool catalogue add config.json` writes a file that does"
            raise InvalidInputError(
                (Problem("FT1102", "the file describes no model under `architectures`", top, hint),)
            )
        head = self._finish(root.like({"architectures": listed}))
        self._fail_if_any()
        described = self._validate(_Described, head)
        if described is None:
            raise self._failure()
        self._problems.extend(ArchitectureCheck(described.architectures, head).run())
        self._fail_if_any()
        return {name: entry.catalogued(name) for name, entry in described.architectures.items()}

    def _with_inventory(self, root: YamlNode | None, path: Path | None) -> tuple[YamlNode, YamlNode]:
        """The blueprint, and the inventory at `path` or where the blueprint says; raises with all problems so far."""
        if path is None and root is not None:
            path = self._named_inventory(root)
        inventory = self._read(path, "Inventory") if path is not None else None
        if root is None or inventory is None or self._problems:
            raise self._failure()
        return root, inventory

    # -- reading ----------------------------------------------------------------------------------------------

    def _read(self, path: Path, *kinds: str) -> YamlNode | None:
        """One file, checked for its version and kind; None after noting its problems."""
        try:
            node = read(path, os.path.normpath(path))
        except InvalidInputError as error:
            self._problems.extend(error.problems)
            return None
        self._files.append(ReadFile(path, node.source.sha256))
        self._templates = self._templates or "${" in node.source.content
        before = len(self._problems)
        self._check_head(node, kinds)
        return node if len(self._problems) == before else None

    def _check_head(self, node: YamlNode, kinds: tuple[str, ...]) -> None:
        version = node.child("apiVersion")
        top = node.source.place(node.line, node.column)
        if version is None:
            hint = f"begin with `apiVersion: {API_VERSION}`"
            self._problems.append(Problem("FT1108", "the document lacks `apiVersion`", top, hint))
        elif version.value != API_VERSION:
            message = f"version `{version.written}` cannot be read by this release"
            hint = f"this release reads {API_VERSION}"
            self._problems.append(Problem("FT1109", message, version.place("apiVersion"), hint))
        kind = node.child("kind")
        if kind is None:
            self._problems.append(Problem("FT1108", "the document lacks `kind`", top, f"add `kind: {kinds[0]}`"))
        elif kind.value not in kinds:
            written = f"`{kind.written}`" if kind.written else describe(kind.value)
            message = f"this is {written}, expected {' or '.join(f'`{k}`' for k in kinds)}"
            mend = "is this the right file?" if kind.value in ("Blueprint", "Inventory", "Part") else None
            self._problems.append(Problem("FT1126", message, kind.place("kind"), mend))

    def _read_blueprint(self, path: Path) -> YamlNode | None:
        """The blueprint and its included parts, which may include more."""
        root = self._read(path, "Blueprint")
        if root is None:
            return None
        waiting = self._includes(root)
        seen = {Path(os.path.normpath(path))}
        while waiting:
            node, part_path = waiting.pop(0)
            if part_path in seen:
                place = node.place("include")
                message = f"`{node.written}` is included twice, or includes itself"
                self._problems.append(Problem("FT1302", message, place, "include each file once"))
                continue
            seen.add(part_path)
            if not _is_file(part_path):
                message = f"no such file: {part_path}"
                hint = "paths are relative to the file that includes"
                self._problems.append(Problem("FT1301", message, node.place("include"), hint))
                continue
            part = self._read(part_path, "Part")
            if part is None:
                continue
            waiting.extend(self._includes(part))
            root = join(root, part, self._problems, skip=(*HEAD, "include"))
        return root

    def _includes(self, node: YamlNode) -> list[tuple[YamlNode, Path]]:
        listed = node.child("include")
        if listed is None or not isinstance(listed.value, list):
            return []
        folder = node.source.path.parent
        return [
            (entry, Path(os.path.normpath(folder / entry.value)))
            for entry in listed.value
            if isinstance(entry.value, str) and "\0" not in entry.value
        ]

    def _with_overlay(self, root: YamlNode, path: Path, overlay: str) -> YamlNode:
        folder = path.parent / "overlays"
        file = folder / f"{overlay}.yaml"
        if "/" in overlay or "\0" in overlay or not _is_file(file):
            there = [entry.stem for entry in folder.glob("*.yaml")] if folder.is_dir() else []
            message = f"there is no overlay `{overlay}` in {folder}"
            self._problems.append(Problem("FT1304", message, Place(file=str(file)), meant(overlay, there, "overlays")))
            return root
        change = self._read(file, "Part")
        return root if change is None else lay_over(root, change, self._problems, skip=HEAD)

    def _named_inventory(self, root: YamlNode) -> Path | None:
        named = root.child("inventory")
        if named is None:
            hint = "add `inventory: ../inventory/NAME.yaml`, or use --inventory"
            place = root.source.place(root.line, root.column)
            self._problems.append(Problem("FT1307", "the blueprint names no inventory", place, hint))
            return None
        value = named.value
        if not isinstance(value, str) or not value or "\0" in value:
            message = f"inventory: expected a path, found {describe(value)}"
            self._problems.append(Problem("FT1103", message, named.place("inventory"), None))
            return None
        path = Path(os.path.normpath(named.source.path.parent / value))
        if not _is_file(path):
            message = f"no such inventory: {path}"
            hint = "paths are relative to the file that names them"
            self._problems.append(Problem("FT1308", message, named.place("inventory"), hint))
            return None
        return path

    # -- composing --------------------------------------------------------------------------------------------

    def _with_scenario(self, root: YamlNode, inventory: YamlNode, name: str) -> tuple[YamlNode, YamlNode]:
        """The named changes on both documents; ``inventory`` inside a scenario maps clusters to changes."""
        every = root.child("scenarios")
        change = every.child(name) if every is not None else None
        if change is None or not isinstance(change.value, dict):
            known = every.value if every is not None and isinstance(every.value, dict) else {}
            place = every.key_place("scenarios") if every is not None else Place(file=root.source.name)
            message = f"there is no scenario `{name}`"
            self._problems.append(Problem("FT1305", message, place, meant(name, known, "scenarios")))
            return root, inventory
        root = lay_over(root, change, self._problems, skip=("inventory", *HEAD))
        clusters = change.child("inventory")
        if clusters is not None:
            inventory = lay_over(inventory, clusters.like({"clusters": clusters}), self._problems)
        return root, inventory

    def _finish(self, root: YamlNode) -> YamlNode:
        """Variables filled in and empty values refused; scenarios are left alone, null deletes there."""
        scenarios = root.child("scenarios")
        if isinstance(root.value, dict) and scenarios is not None:
            root = root.like({k: v for k, v in root.value.items() if k != "scenarios"})
        if self._templates:
            root = fill(root, self._environment, self._variables, self._problems)
        for path, node in root.leaves():
            if node.value is None:
                hint = "write a value, or leave the key out for the default"
                message = f"`{dotted(path)}` has no value"
                self._problems.append(Problem("FT1125", message, node.place(dotted(path)), hint))
        if scenarios is not None and isinstance(root.value, dict):
            root = root.like({**root.value, "scenarios": scenarios})
        return root

    def _validate(self, model: type[_D], root: YamlNode) -> _D | None:
        try:
            return model.model_validate(root.data())
        except ValidationError as error:
            self._problems.extend(problems_of(error, root, model))
            return None

    def _fail_if_any(self) -> None:
        if self._problems:
            raise self._failure()

    def _failure(self) -> InvalidInputError:
        """With all problems so far; where a tree or a document is missing there is one."""
        return InvalidInputError(in_order(self._problems))


def _is_file(path: Path) -> bool:
    """Also for names that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
