"""Who of one site are each other's neighbours: its agents on a ring, by session. Pure.

Each keeps a link with the next two. So two neighbouring agents may die at once and the rest still hang together, a node
holds four links whatever the site's size, and every replica knows whom to ask for a session: those around it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import islice
from typing import TYPE_CHECKING

from fabrictool.mesh.records import Lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fabrictool.mesh.records import NodeBody

SITE_LINKS = 2
"""That an agent dials; as many others dial it. Higher: more may die at once, more beats; at 1 two deaths part it."""


class Sites:
    """The agents that can be dialled, by provider and site."""

    def __init__(self) -> None:
        self._rings: dict[tuple[str, str], list[bytes]] = {}
        self._site_of: dict[bytes, tuple[str, str]] = {}

    def heard(self, body: NodeBody) -> None:
        """A node record is new in the map."""
        reachable = body.role == "agent" and body.addresses and body.lifecycle < Lifecycle.DOWN
        site = (body.provider, body.site)
        if reachable and self._site_of.get(body.session) == site:
            return
        self.forget([body.session])
        if reachable:
            self._site_of[body.session] = site
            insort(self._rings.setdefault(site, []), body.session)

    def forget(self, sessions: Iterable[bytes]) -> None:
        for session in sessions:
            site = self._site_of.pop(session, None)
            if site is not None:
                ring = self._rings[site]
                del ring[bisect_left(ring, session)]
                if not ring:
                    del self._rings[site]

    def behind(self, session: bytes) -> Iterator[bytes]:
        """The others of its site, the next one first."""
        ring = self._rings.get(self._site_of.get(session, ("", "")), [])
        begin = bisect_right(ring, session)
        return (ring[(begin + step) % len(ring)] for step in range(len(ring) - 1))

    def around(self, session: bytes, lives: Callable[[bytes], bool]) -> set[bytes]:
        """Those that hold links with it, if all of them can be reached; who died without a word stays on the ring."""
        ring = self._rings.get(self._site_of.get(session, ("", "")), [])
        at = bisect_left(ring, session)
        ahead = (ring[(at + step) % len(ring)] for step in range(1, len(ring)))
        before = (ring[at - step] for step in range(1, len(ring)))
        return {near for way in (ahead, before) for near in islice(filter(lives, way), SITE_LINKS)}
