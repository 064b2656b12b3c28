"""The status pages of the units on one machine, reached through its SSH server: no port of theirs is open."""

from __future__ import annotations

import contextlib
import json
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fabrictool.base.aside import begun
from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.clusters.schedulers import shell
from fabrictool.status.client import StatusUnavailableError, fetch
from fabrictool.status.documents import GatewayStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fabrictool.clusters.connections.protocol import Connection

ASK_S = 3.0
WHOLE_S = 6.0
"""Until a page's answer is whole, however little of it comes at a time."""
LOOK_S = 20.0
"""For the list of pages, and then for those on it."""
WHOLE = "@end"
_LINE = re.compile(r"([^/\t]+)/([^/\t]+)(?:\t(.*))?")


@dataclass(frozen=True, slots=True)
class HostPage:
    """A unit that was started on the machine, or whose folder lies there because machines share it."""

    fabric: str
    operation: str
    port: int | None
    """On the machine's loopback; None: the unit was started on another one."""

    @property
    def is_gateway(self) -> bool:
        return self.operation.startswith("gateway-")


class HostPages:
    """Of a machine that several login nodes may lead to; to be closed."""

    def __init__(
        self, name: str, connect: Callable[[], Sequence[Connection]], *, folder: str = ".fabrictool", fabric: str = ""
    ) -> None:
        """`connect` gives its login nodes, tried in order; `fabric`: the one that is meant, "" where any is."""
        self.name = name
        self._connect = connect
        self._folder, self._fabric = folder, fabric
        self._opened: Sequence[Connection] = ()

    @contextlib.contextmanager
    def page(self) -> Iterator[str]:
        """URL of a status page that answers, while the context lasts: a gateway's where there is one.

        Raises
        ------
        FabrictoolError
            FT5207 there is none, FT5208 they are of several fabrics; else what connecting raises.
        """
        self._opened = self._opened or self._connect()
        connection, pages = self._look()
        answering: list[tuple[int, HostPage]] = []
        until = time.monotonic() + LOOK_S
        for page in sorted((page for page in pages if page.port is not None), key=lambda page: not page.is_gateway):
            if time.monotonic() > until:
                break
            with _way(connection, page) as url:
                rank = _rank(url, page.fabric)
            answering += [] if rank is None else [(rank, page)]
            if rank == 0 and self._fabric:
                break
        if not answering:
            raise self._nobody(pages)
        fabrics = sorted({page.fabric for _, page in answering})
        if len(fabrics) > 1:
            message = f"units of several fabrics run on {self.name}: {', '.join(fabrics)}"
            raise UnreachableError.of("FT5208", message, hint="name the blueprint of the one that you mean with -b")
        with _way(connection, min(answering, key=lambda pair: pair[0])[1]) as url:
            yield url

    def close(self) -> None:
        for connection in self._opened:
            connection.close()

    def _look(self) -> tuple[Connection, list[HostPage]]:
        argv = ["sh", "-c", shell.program("pages"), "ft-pages", self._folder, self._fabric or "-"]
        refusal: FabrictoolError | None = None
        for connection in self._opened:
            try:
                done = connection.run(argv, timeout_s=LOOK_S)
            except FabrictoolError as error:
                refusal = refusal or error
                continue
            text = done.stdout.decode(errors="replace")
            if text.rstrip().endswith(WHOLE):
                return connection, read_pages(text)
            message = f"what {self.name} says of its units is not whole"
            refusal = refusal or UnreachableError.of("FT5207", message, thing=f"host/{self.name}", transient=True)
        raise refusal or UnreachableError.of("FT5207", f"{self.name} has no login node")

    def _nobody(self, pages: Sequence[HostPage]) -> FabrictoolError:
        of = f" of {self._fabric}" if self._fabric else ""
        if not pages:
            message = f"no unit{of} was started on {self.name}"
        elif all(page.port is None for page in pages):
            message = f"the {len(pages)} units{of} that {self.name} knows run on other machines"
        else:
            message = f"none of the units{of} on {self.name} answers"
        return UnreachableError.of("FT5207", message, thing=f"host/{self.name}", transient=True)


def read_pages(text: str) -> list[HostPage]:
    """Lines that are none, as of a cut answer or of a chatty start-up file, are passed over."""
    matches = (_LINE.fullmatch(line) for line in text.splitlines())
    return [HostPage(match[1], match[2], _port(match[3] or "")) for match in matches if match]


def _port(process: str) -> int | None:
    try:
        written = json.loads(process)
        return urlsplit(str(written["status"])).port
    except (ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _way(connection: Connection, page: HostPage) -> Iterator[str]:
    with connection.forward("127.0.0.1", page.port or 0) as (host, port):
        yield f"http://{host}:{port}/status"


def _rank(url: str, fabric: str) -> int | None:
    """0 a gateway that clients use, 1 a hub or an agent; None: it does not answer, or is another's by now."""
    try:
        document = begun(lambda: fetch(url, timeout_s=ASK_S, redirects=0)).result(WHOLE_S)
    except (StatusUnavailableError, TimeoutError):
        return None
    if document.fabric != fabric:
        return None
    return 0 if isinstance(document, GatewayStatus) and document.listen else 1
