"""Who ``top`` asks, again and again: a URL, hosts that it logs in to, or the fabric's gateway wherever it is now."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from fabrictool.base.aside import begun
from fabrictool.base.errors import FabrictoolError, UnreachableError, UsageError
from fabrictool.cli.output import octets_text
from fabrictool.cli.watching import gateway_url
from fabrictool.status.client import MOST_REDIRECTS, NoFleetError, StatusUnavailableError, fetch, fetch_fleet
from fabrictool.status.documents import AgentStatus, GatewayStatus
from fabrictool.status.sightings import JournalLine, Moved, OperatorView, Sighting, UnitView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from fabrictool.cli.source import Source
    from fabrictool.clusters.hostpages import HostPages
    from fabrictool.status.documents import StatusDocument
    from fabrictool.status.fleet import FleetStatus, LiveDocument

ANSWER_S, WHOLE_ANSWER_S = 3.0, 8.0
"""For each wait of an answer, and for all of it: one that drips in never ends otherwise."""
FLEET_S, OPERATOR_S = 5.0, 15.0
"""Between two looks at the mesh, and at what clusters and journal say: these ask login nodes."""
LOG_LINES = 500
LEAST_FREE = 1 << 20
"""Octets that a journal and the state have room in."""
CLOSE_S = 5.0
"""For connections to end; one that does not is left to end with its process."""


class LiveStatus:
    """Ask by calling it; to be used as a context.

    After a question that was not answered the gateway is looked for anew: it may have been replaced, or the way to it
    through a login node may have been cut. `hosts` are looked at in their order, and before what `source` knows.
    """

    def __init__(self, source: Source | None, url: str, key: str, hosts: Sequence[HostPages] = ()) -> None:
        self._source = source
        self._given = url
        self._key = key
        self._hosts = hosts
        self.url = url
        self.moved: Moved | None = None
        """Why it is not the one before who answers."""
        self._heard = ""
        """Who answered last, in words."""
        self._lost: Moved | None = None
        """Who did not answer since; it is not known yet who does."""
        self._way = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """A connection that is being opened holds nobody up: it ends with this process."""
        with contextlib.suppress(TimeoutError):
            begun(self._close).result(CLOSE_S)

    def _close(self) -> None:
        self._way.close()
        for host in self._hosts:
            host.close()

    def __call__(self) -> LiveDocument:
        """The document, of an agent what it knows of the fleet.

        Raises FT5201 and FT5202, and what looking for the gateway raises.
        """
        try:
            if not self.url:
                self.url = self._found()
            url = self.url
            follow = MOST_REDIRECTS if not self._hosts else 0  # a host's page sends nobody elsewhere
            document = in_time(lambda: fetch(url, timeout_s=ANSWER_S, key=self._key, redirects=follow), url)
            self._hear(_named(document))
            if isinstance(document, AgentStatus):
                with contextlib.suppress(NoFleetError):  # of an earlier release: its own document is all that it has
                    return in_time(lambda: fetch_fleet(url, timeout_s=ANSWER_S, redirects=follow), url)
            return document
        except FabrictoolError as error:
            if self._heard and self._lost is None:
                self._lost = Moved(before=self._heard, since=time.time(), why=error.problems[0].message)
            self._way.close()
            self.url = self._given
            raise

    def _found(self) -> str:
        refusal: FabrictoolError | None = None
        for host in self._hosts:
            try:
                return self._way.enter_context(host.page())
            except FabrictoolError as error:
                refusal = refusal or error
                if not self._heard and self._lost is None:
                    self._lost = Moved(before=host.name, since=time.time(), why=error.problems[0].message)
        if self._source is not None:
            try:
                return self._way.enter_context(gateway_url(self._source))
            except FabrictoolError as error:
                refusal = refusal or error
        raise refusal or UnreachableError.of("FT5202", "nobody was named who could be asked")

    def _hear(self, who: str) -> None:
        if who != self._heard:
            self.moved = self._lost
        self._heard, self._lost = who, None


def _named(document: StatusDocument) -> str:
    if isinstance(document, AgentStatus):
        return f"the agent of {document.replica or document.node}"
    return f"the gateway {document.listen}" if document.listen else f"the hub {document.mesh}"


_T = TypeVar("_T")


def in_time(question: Callable[[], _T], url: str) -> _T:
    """Its answer. Raises FT5201 when it is not there after `WHOLE_ANSWER_S`, and what `question` raises."""
    try:
        return begun(question).result(WHOLE_ANSWER_S)
    except TimeoutError as error:
        message = f"no status from {url}: its answer is not whole after {WHOLE_ANSWER_S:.0f} s"
        raise StatusUnavailableError.of("FT5201", message, thing=url, transient=True) from error


class LiveFeed:
    """Looks for `top`: what `LiveStatus` hears each time, the mesh every few seconds, and, where there is a blueprint,
    what the clusters and the journal say, looked for beside all that. To be used as a context.
    """

    def __init__(self, ask: LiveStatus, source: Source | None) -> None:
        self._ask = ask
        self._source = source
        self._fleet: FleetStatus | None = None
        self._fleet_at = -math.inf
        self._operator: OperatorView | None = None
        self._over = threading.Event()
        self._looked = threading.Event()
        """Whether the operator's side was asked once."""
        self._looking: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._source is not None:
            self._source.read()  # what it has to say it says before the terminal is another's
            self._looking = threading.Thread(target=self._keep_looking, name="operator", daemon=True)
            self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def await_operator(self, seconds: float) -> None:
        """Until clusters and journal have been looked at once, where there is a blueprint; no longer than that."""
        if self._source is not None:
            self._looked.wait(seconds)

    def look(self) -> Sighting:
        try:
            live = self._ask()
        except FabrictoolError as error:
            problem = error.problems[0]
            trouble = f"{problem.message} ({problem.hint})" if problem.hint else problem.message
            return Sighting(
                at=time.time(),
                fleet=self._fleet,
                operator=self._operator,
                trouble=trouble,
                asked=self._ask.url,
                moved=self._ask.moved,
            )
        now = time.time()
        url = self._ask.url
        if isinstance(live, GatewayStatus) and now - self._fleet_at >= FLEET_S:
            self._fleet_at = now
            with contextlib.suppress(FabrictoolError):  # a page for clients shows nothing of the mesh
                self._fleet = in_time(lambda: fetch_fleet(url, timeout_s=ANSWER_S), url)
        return Sighting(at=now, live=live, fleet=self._fleet, operator=self._operator, asked=url, moved=self._ask.moved)

    def log(self, address: str) -> list[str]:
        """Raises FT9005 for what does not run, and what the cluster raises."""
        if self._source is None:
            raise UsageError.of(
                "FT9005", "logs come from the clusters: start `top` beside the blueprint, without a URL"
            )
        with self._source.fabric() as fabric:
            for cluster, unit in fabric.observe().running().values():
                if unit.address == address:
                    return fabric.clusters[cluster].log_tail(unit.operation, LOG_LINES)
        raise UsageError.of("FT9005", f"{address} does not run; `fabrictool logs {address}` has its last log")

    def _keep_looking(self) -> None:
        while not self._over.is_set():
            try:
                self._operator = operator_view(self._source) if self._source is not None else None
            except FabrictoolError as error:  # it is tried again; what was seen before stays
                self._failed(error.problems[0].message)
            except Exception as error:  # noqa: BLE001 - a thread that dies says nothing: the screen would age without a word
                self._failed(f"{type(error).__name__}: {error}")
            self._looked.set()
            self._over.wait(OPERATOR_S)

    def _failed(self, why: str) -> None:
        before = self._operator or OperatorView(at=time.time())
        self._operator = msgspec.structs.replace(before, trouble=why)


def operator_view(source: Source) -> OperatorView:
    """What only this side knows; raises what looking at the clusters raises."""
    from fabrictool.applier.journal import history
    from fabrictool.state.overview import overview_of

    now = time.time()
    with source.fabric() as fabric:
        overview = overview_of(fabric, source.identity.digest, now=now, patient=False)
        entries = history(fabric.folder.journal)
    last = entries[-1].plan if entries else ""
    known = UnitView.__struct_fields__
    return OperatorView(
        at=now,
        units=[UnitView(**{name: unit[name] for name in known if name in unit}) for unit in overview.units],
        unknown=overview.unknown,
        drift=overview.drift,
        warnings=[*overview.warnings, *_full_disk(fabric.folder.path)],
        journal=[
            JournalLine(at=e.at, plan=e.plan, kind=e.kind, address=e.address, action=e.action, text=e.text)
            for e in entries
            if e.plan == last
        ],
        targets=source.latency_targets,
        forecasts=dict(overview.forecast),
    )


def _full_disk(folder: Path) -> list[str]:
    """Nothing can be applied then, and nothing else shows it before somebody needs it."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return []
    free = room.f_bavail * room.f_frsize
    return (
        [f"{octets_text(free)} free where the state is ({folder}): no apply can write there"]
        if free < LEAST_FREE
        else []
    )


def key_of(reference: str) -> str:
    """The key behind ``secret://…``; "" without one. A key itself is refused: other users of this machine see it.

    Raises
    ------
    FabrictoolError
        FT9001 no reference, FT14xx it cannot be had.
    """
    from fabrictool.base.units import UnitError
    from fabrictool.blueprint.secrets import resolve
    from fabrictool.domain.secrets import SecretRef

    if not reference:
        return ""
    try:
        return resolve(SecretRef.parse(reference), os.environ)
    except UnitError as error:
        raise UsageError.of("FT9001", "--key takes a reference, not the key", hint="--key secret://env/NAME") from error
