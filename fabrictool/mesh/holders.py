"""Which hubs have a tunnel to which agent: so that a gateway reaches those that dialled others (a relay). Sans I/O.

A hub tells the hubs that it is linked with which agents' tunnels came and went, in the turn in which they did, and all
of them when two hubs meet. It is no record: it is true for a moment, and only of use to hubs, while their link lasts.
A hub that lies about it can have a dead agent taken for one that lives, as by its answers (`detector.py`); it has
nothing sent anywhere, for whoever is reached by it proves himself end to end.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from fabrictool.mesh.records import Id

HELD_MAX = 20_000
"""Agents of one hub, as far as others believe it."""
HOLDS_SESSIONS = 1000
"""In one message: 16 KB, which a beat may have to wait behind."""


class Holds(msgspec.Struct, frozen=True, array_like=True, tag="h"):
    """Agents whose tunnels to the sender came and went."""

    whole: bool
    """What was said before counts no more."""
    came: Annotated[list[Id], msgspec.Meta(max_length=HOLDS_SESSIONS)]
    gone: Annotated[list[Id], msgspec.Meta(max_length=HOLDS_SESSIONS)]


class Holders:
    """One hub's: its own agents, and what its neighbours said of theirs."""

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._hubs: dict[bytes, set[bytes]] = {}
        """Linked hub → the agents that it holds."""
        self._agents: set[bytes] = set()
        self._held: frozenset[bytes] | None = None
        """All agents that linked hubs hold; None: to be gathered anew."""
        self._others_first: frozenset[bytes] | None = None
        """See `others_first`; None: to be gathered anew."""
        self._changes: dict[bytes, bool] = {}
        """Agent → whether it is linked now, where the others do not know yet."""
        self._untold: list[bytes] = []
        """Hubs that were told nothing."""
        self._retired = False

    def of(self, session: bytes) -> list[bytes]:
        """The linked hubs that say they have a tunnel to this agent, in the order of their ids."""
        return sorted(hub for hub, agents in self._hubs.items() if session in agents)

    @property
    def held(self) -> frozenset[bytes]:
        """Agents that a linked hub holds."""
        if self._held is None:
            self._held = frozenset().union(*self._hubs.values())
        return self._held

    @property
    def own(self) -> list[bytes]:
        """Agents that are linked with us, in the order of their ids."""
        return sorted(self._agents)

    @property
    def others_first(self) -> frozenset[bytes]:
        """Our agents that another hub holds, too, and tells news before we do: whoever has two hubs gets two copies,
        and waits for the first one only. It is the hub whose id is nearest to the agent's, so each has its share.
        """
        if self._others_first is None:
            self._others_first = frozenset(
                agent
                for agent in self._agents & self.held
                if min((self._me, *self.of(agent)), key=lambda hub: _distance(hub, agent)) != self._me
            )
        return self._others_first

    def link_up(self, peer: bytes, *, hub: bool) -> None:
        self._others_first = None
        if hub:
            self._hubs[peer], self._held = set(), None
            self._untold.append(peer)
        elif not self._retired:
            self._agents.add(peer)
            self._changes[peer] = True

    def link_down(self, peer: bytes) -> None:
        self._others_first = None
        if self._hubs.pop(peer, None) is not None:
            self._held = None
            self._untold = [hub for hub in self._untold if hub != peer]
        elif peer in self._agents:
            self._agents.discard(peer)
            self._changes[peer] = False

    def heard(self, hub: bytes, message: Holds) -> None:
        """From a neighbour; one that is no hub holds nobody."""
        agents = self._hubs.get(hub)
        if agents is None:
            return
        self._held = self._others_first = None
        if message.whole:
            agents.clear()
        agents.difference_update(message.gone)
        agents.update(message.came[: max(0, HELD_MAX - len(agents))])

    def retire(self) -> None:
        """Say that we hold nobody, for we are about to leave: requests go another way, and what is open may end."""
        self._retired, self._agents, self._changes = True, set(), {}
        self._untold = [*self._hubs]

    def news(self) -> list[tuple[bytes, Holds]]:
        """Whom to tell what, since the last call."""
        told = []
        if self._hubs and self._changes:
            for message in _messages(self._changes, whole=False):
                told += [(hub, message) for hub in sorted(self._hubs) if hub not in self._untold]
        for hub in self._untold:
            told += [(hub, message) for message in _messages(dict.fromkeys(self._agents, True), whole=True)]
        self._changes, self._untold = {}, []
        return told


def _distance(hub: bytes, agent: bytes) -> int:
    return int.from_bytes(hub) ^ int.from_bytes(agent)


def _messages(changes: dict[bytes, bool], *, whole: bool) -> list[Holds]:
    """Few enough sessions in each; the first may say that it begins anew."""
    sessions = sorted(changes)
    batches = [sessions[at : at + HOLDS_SESSIONS] for at in range(0, len(sessions), HOLDS_SESSIONS)] or [[]]
    return [
        Holds(whole and number == 0, [s for s in batch if changes[s]], [s for s in batch if not changes[s]])
        for number, batch in enumerate(batches)
    ]
