"""Whom ``mesh`` asks: a unit at a URL, or the units of the fabric that can be reached from here, gateways first."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.cli.fabric_answers import Convergence, ViewRow
from fabrictool.cli.output import data, json_data, table
from fabrictool.state.fleetpages import ReachedUnit, reached_units
from fabrictool.status.client import fetch_fleet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fabrictool.cli.source import Source
    from fabrictool.status.fleet import FleetStatus

ASK_S = 3.0
ASKED_AT_ONCE = 16
AGAIN_S = 2.0
"""A record crosses a fabric in a fraction of a second: who differs twice is not just late."""


@contextlib.contextmanager
def mesh_page(source: Source) -> Iterator[str]:
    """Status address of a unit of the fabric that shows the mesh: a gateway, or an agent when no gateway does.

    Raises
    ------
    FabrictoolError
        FT5204 when there is nobody to ask, else what the first said instead.
    """
    refusal: FabrictoolError | None = None
    with _reachable(source) as units:
        for unit in [unit for unit in units if unit.url]:
            try:
                fetch_fleet(unit.url, timeout_s=ASK_S)
            except FabrictoolError as error:
                refusal = refusal or error
                continue
            yield unit.url
            return
    raise refusal or _nobody()


class LiveFleet:
    """Ask by calling it; to be used as a context. After a question without an answer somebody else is looked for."""

    def __init__(self, source: Source, url: str) -> None:
        self._source = source
        self._given = self._url = url
        self._way = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._way.close()

    @property
    def url(self) -> str:
        """Of whom is asked; looks for somebody first where none is known."""
        if not self._url:
            self._url = self._way.enter_context(mesh_page(self._source))
        return self._url

    def __call__(self) -> FleetStatus:
        """The fleet; raises what `fetch_fleet` and `mesh_page` raise."""
        try:
            return fetch_fleet(self.url, timeout_s=ASK_S)
        except FabrictoolError:
            self._way.close()
            self._url = self._given
            raise


def _nobody() -> FabrictoolError:
    return UnreachableError.of(
        "FT5204", "no unit of this fabric can be asked from here", hint="`fabrictool status`, or give --url"
    )


@contextlib.contextmanager
def _reachable(source: Source) -> Iterator[list[ReachedUnit]]:
    """Units that run, gateways first; ways through login nodes stay open inside."""
    with source.fabric() as fabric, contextlib.ExitStack() as ways:
        yield list(reached_units(fabric.clusters, fabric.observe(), ways))


@dataclass(frozen=True, slots=True)
class ConvergenceLook:
    """What the units said at about one time."""

    views: dict[str, FleetStatus]
    """By the unit's name."""
    silent: dict[str, str]
    """Unit → why it said nothing."""

    @property
    def agreed(self) -> bool:
        return len({view.root for view in self.views.values()}) < 2

    @property
    def differing(self) -> list[str]:
        """Units that hold something else than most; of equal halves, than the first."""
        roots = [view.root for view in self.views.values()]
        common = max(roots, key=roots.count, default="")
        return [name for name, view in self.views.items() if view.root != common]


def show_convergence(source: Source, urls: Sequence[str], *, as_json: bool) -> int:
    """Ask all at once; when they differ, once more. 1 when they differ then, too."""
    with contextlib.nullcontext([ReachedUnit(url, url) for url in urls]) if urls else _reachable(source) as units:
        look = _look(units)
        looks = 1
        if not look.agreed:
            time.sleep(AGAIN_S)
            look, looks = _look(units), 2
    if not look.views:
        raise _nobody()
    if as_json:
        json_data(_convergence_document(look, looks))
    else:
        data("\n".join(_convergence_lines(look, looks)))
    return 0 if look.agreed else 1


def _look(units: Sequence[ReachedUnit]) -> ConvergenceLook:
    def answer(unit: ReachedUnit) -> FleetStatus | str:
        if not unit.url:
            return "its pages cannot be reached from here"
        try:
            return fetch_fleet(unit.url, timeout_s=ASK_S)
        except FabrictoolError as error:
            return error.problems[0].message

    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        answers = dict(zip([unit.name for unit in units], pool.map(answer, units), strict=True))
    silent = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    return ConvergenceLook({name: answer for name, answer in answers.items() if not isinstance(answer, str)}, silent)


def _convergence_document(look: ConvergenceLook, looks: int) -> Convergence:
    views = [
        ViewRow(unit=name, session=v.session, role=v.role, at=v.at, root=v.root, records=v.records)
        for name, v in look.views.items()
    ]
    return Convergence(agreed=look.agreed, looks=looks, views=views, differing=look.differing, silent=look.silent)


def _convergence_lines(look: ConvergenceLook, looks: int) -> list[str]:
    rows = [[name, v.role, v.session[:8], str(v.records), v.root[:8]] for name, v in look.views.items()]
    count = len(look.views)
    if look.agreed and count == 1:
        verdict = "Only one answers, so there is nothing to compare"
    elif look.agreed:
        verdict = f"All {count} that answer hold the same records" + (
            " now; at a first look they did not" * (looks > 1)
        )
    else:
        verdict = f"{len(look.differing)} of {count} differ, in two looks {AGAIN_S:g} s apart; since when is unknown"
    lines = [verdict, "", table(["UNIT", "ROLE", "SESSION", "RECORDS", "ROOT"], rows)]
    lines += [f"! {name} differs" for name in look.differing]
    return lines + [f"? {name}: {why}" for name, why in look.silent.items()]
