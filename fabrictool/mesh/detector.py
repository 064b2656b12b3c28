"""Who is gone: a hub's evidence of the sessions that it lost, and what it may say of them. Sans I/O.

Routing needs none of this: a gateway stops routing to a session in the turn in which its tunnel is lost. The detector
ends what that leaves behind: a killed session that stays SERVING on every replica until its certificate ends.

1. A tunnel that was *closed* by its end or fell *silent* (three beats) is the first path. The second are the other
   hubs, the third the agents around it at its site: each is asked whether it holds a tunnel to the session. `alive`
   from any of them ends the matter; that an agent holds none is no evidence. Hubs tell unasked whom they hold
   (`mesh.holders`): as long as one does, nobody is asked.
2. A hub that cannot be reached, or does not answer, is *unknown*, and nothing is said: it may hold the tunnel. When it
   has been away for the grace period itself, nobody waits for it any more; unless somebody still hears it, for then we
   are cut off from the hubs, and it is not they who are gone.
3. Suspicion is a witness record; its subject refutes it with a newer version of its own record, and a tunnel that comes
   back withdraws it. A hub whose suspicions were refuted three times in ten minutes keeps silent for ten more.
4. After the grace period the paths are asked once more, and then the hub votes. Who counts the votes is the registry
   (`Registry.evicted`).
5. A hub that was stalled itself, or lost half of its neighbours at once, takes the fault for its own and says nothing;
   nor does one that is linked with nobody while there should be other hubs.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from fabrictool.mesh.gossip import Life
    from fabrictool.mesh.records import Evidence

ANSWER_WITHIN_S = 2.0
"""Without an answer by then a hub is unknown: twice the beat, so that a busy one is not."""
SUSPECT_AFTER_S = 3.0
"""A restart of the network path takes a second or two: raising it delays the news, lowering it makes flapping news."""
GRACE_S = 60.0
"""From the loss to the vote. A stall of ten seconds is survived by far; for routing, who is lost is gone at once."""
STALL_S = 2.0
"""Ticks that come so much late say that this process stood still."""
FROZEN_S = 30.0
MUTED_S = 600.0
EVIDENCE_KEPT = 8
ASK_AGAIN_S = 30.0
"""After answers that prove nothing."""
REFUTATIONS_BEFORE_MUTED = 3
ASKED_IN_A_BEAT = 64
"""Sessions: each costs a question to every hub, and five hundred may vanish at once."""


@dataclass(slots=True)
class _Lost:
    """A session whose tunnel is gone."""

    at: float
    how: Evidence
    ask_at: float
    asked_at: float | None = None
    """Of the question that is open."""
    asked: frozenset[bytes] = frozenset()
    """Nobody else's answer counts."""
    answers: dict[bytes, Life] = field(default_factory=dict)
    heard_at: float = -math.inf
    """When somebody said last that he hears it."""
    suspected: bool = False
    voted: bool = False


@dataclass(frozen=True, slots=True)
class AskNeighbour:
    """Effect: ask a neighbour for its tunnel to a session."""

    neighbour: bytes
    suspect: bytes


@dataclass(frozen=True, slots=True)
class Say:
    """Effect: publish a witness record. Without `suspects` it takes an earlier one back."""

    suspect: bytes
    suspects: bool = False
    votes: bool = False
    evidence: tuple[Evidence, ...] = ()


class Detector:
    """One hub's. Times are monotonic seconds; sessions are ids."""

    def __init__(self) -> None:
        self._linked: set[bytes] = set()
        self._lost: dict[bytes, _Lost] = {}
        self._ticked_at: float | None = None
        self._frozen_until = 0.0
        self._muted_until = 0.0
        self._recent_losses: dict[bytes, float] = {}
        self._refuted_at: deque[float] = deque(maxlen=REFUTATIONS_BEFORE_MUTED)

    @property
    def lost(self) -> dict[bytes, tuple[float, Evidence]]:
        """Sessions without a tunnel → since when, and how it went."""
        return {session: (entry.at, entry.how) for session, entry in self._lost.items()}

    @property
    def known(self) -> set[bytes]:
        """Sessions with a tunnel to us, and those whose tunnel is looked for."""
        return self._linked | self._lost.keys()

    @property
    def unaccused(self) -> list[bytes]:
        """The lost of whom nothing was said that stands."""
        return [session for session, entry in self._lost.items() if not entry.suspected]

    def silent(self, now: float) -> str:
        """Why this hub says nothing of others now; empty when it may."""
        if now < self._frozen_until:
            return "it stood still, is linked with nobody, or lost half of its neighbours at once"
        return "its suspicions were refuted again and again" if now < self._muted_until else ""

    def link_up(self, session: bytes) -> list[AskNeighbour | Say]:
        """A tunnel came, or came back."""
        self._linked.add(session)
        entry = self._lost.pop(session, None)
        return self._withdraw(session, entry) if entry is not None else []

    def link_down(self, session: bytes, how: Evidence, now: float) -> None:
        self._linked.discard(session)
        self._lost[session] = _Lost(now, how, now + SUSPECT_AFTER_S)
        self._recent_losses = {lost: at for lost, at in self._recent_losses.items() if now - at <= SUSPECT_AFTER_S}
        self._recent_losses[session] = now
        before = len(self._linked) + len(self._recent_losses)
        if how == "silent" and before >= 4 and len(self._recent_losses) * 2 >= before:
            self._frozen_until = max(self._frozen_until, now + FROZEN_S)

    def life(self, session: bytes) -> Life:
        """What this hub answers when another asks."""
        lost = self._lost.get(session)
        if session in self._linked:
            return "alive"
        return "gone" if lost is not None and lost.how in ("closed", "silent") else "never"

    def suspected_elsewhere(self, session: bytes, now: float) -> None:
        """Another hub suspects it: look into it too, for one provider's vote is not enough."""
        if session not in self._linked and session not in self._lost:
            self._lost[session] = _Lost(now, "other-hub", now + SUSPECT_AFTER_S)

    def expected(self, sessions: Iterable[bytes], now: float) -> None:
        """They live, by the registry, and so they dial us; who never comes is looked into after the grace period."""
        for session in sorted(sessions):  # the order of a set differs between processes, and an incident must replay
            if session not in self._linked and session not in self._lost:
                self._lost[session] = _Lost(now, "never-came", now + GRACE_S)

    def answered(self, neighbour: bytes, suspect: bytes, life: Life, *, hub: bool = True) -> None:
        """From whoever was asked; of one that is no hub only that it hears the suspect counts."""
        entry = self._lost.get(suspect)
        if entry is not None and entry.asked_at is not None and neighbour in entry.asked:
            entry.answers[neighbour] = life if hub or life == "alive" else "never"

    def refuted(self, session: bytes, now: float) -> list[AskNeighbour | Say]:
        """The suspect spoke: a newer version of its own record came."""
        entry = self._lost.get(session)
        if entry is None or not entry.suspected:
            return []
        if not self._refuted_at or now - self._refuted_at[-1] >= SUSPECT_AFTER_S:
            self._refuted_at.append(now)  # of one interruption there may be many, and it is one mistake
        if len(self._refuted_at) == REFUTATIONS_BEFORE_MUTED and now - self._refuted_at[0] < MUTED_S:
            self._muted_until = now + MUTED_S
            self._refuted_at.clear()
        self._lost[session] = _Lost(now, entry.how, now + GRACE_S)
        return [Say(session)]

    def forget(self, sessions: Iterable[bytes]) -> None:
        """They left, expired or were evicted: there is nothing more to find out."""
        for session in sessions:
            self._lost.pop(session, None)

    def tick(
        self,
        now: float,
        interval: float,
        hubs: Iterable[bytes],
        around: Callable[[bytes], Iterable[bytes]] = lambda _: (),
        held: Collection[bytes] = frozenset(),
    ) -> list[AskNeighbour | Say]:
        """Each beat. `hubs`: the others that have not left, linked or not; `around`: who may be linked to a session;
        `held`: to whom another hub says it has a tunnel.
        """
        stalled = self._ticked_at is not None and now - self._ticked_at > interval + STALL_S
        self._ticked_at = now
        others = set(hubs)
        if stalled or (others and not self._linked):
            self._frozen_until = max(self._frozen_until, now + FROZEN_S)
        if self.silent(now):
            return []
        effects: list[AskNeighbour | Say] = []
        asked = 0
        for session, entry in list(self._lost.items()):
            if session in held:  # what was found out counts from when it no longer is
                effects += self._withdraw(session, entry)
                entry.at, entry.ask_at, entry.asked_at = now, now + SUSPECT_AFTER_S, None
                continue
            if entry.asked_at is None:
                if entry.voted or now < entry.ask_at or asked == ASKED_IN_A_BEAT:
                    continue
                asked += 1
            effects += self._judge(session, entry, others - {session}, around, now)
        return effects

    # Wide: whom it is about, what is known of it, whom to ask, and when.
    def _judge(
        self,
        session: bytes,
        entry: _Lost,
        hubs: set[bytes],
        around: Callable[[bytes], Iterable[bytes]],
        now: float,
    ) -> list[AskNeighbour | Say]:
        """Ask, wait for the answers, and say what follows from them."""
        if entry.asked_at is None:
            entry.asked = frozenset(hubs.union(around(session)) & self._linked)
            entry.asked_at, entry.answers = now, {}
            if entry.asked:
                return [AskNeighbour(neighbour, session) for neighbour in sorted(entry.asked)]
        if now - entry.asked_at < ANSWER_WITHIN_S and not entry.asked & self._linked <= set(entry.answers):
            return []
        entry.asked_at, entry.ask_at = None, now + ASK_AGAIN_S
        if "alive" in entry.answers.values():
            entry.heard_at = now
            return self._withdraw(session, entry)
        if any(self._may_know(hub, now) for hub in hubs - set(entry.answers)):
            return []
        others: list[Evidence] = ["other-hub" for answer in entry.answers.values() if answer == "gone"]
        evidence = tuple([entry.how, *others][:EVIDENCE_KEPT])
        if entry.suspected and now - entry.at >= GRACE_S:
            entry.voted = True
            return [Say(session, suspects=True, votes=True, evidence=evidence)]
        entry.ask_at = max(entry.at + GRACE_S, now + SUSPECT_AFTER_S)
        if entry.suspected:
            return []
        entry.suspected = True
        return [Say(session, suspects=True, evidence=evidence)]

    def _may_know(self, hub: bytes, now: float) -> bool:
        """Whether a hub that did not answer is still waited for."""
        lost = self._lost.get(hub)
        return lost is None or now - max(lost.at, lost.heard_at) < GRACE_S

    @staticmethod
    def _withdraw(session: bytes, entry: _Lost) -> list[AskNeighbour | Say]:
        if not entry.suspected:
            return []
        entry.suspected = entry.voted = False
        return [Say(session)]
