"""One member of the mesh, whole: its registry, how records travel, who is gone, and what it says itself. Sans I/O.

Inputs are method calls with the time; each returns effects. The same object runs on sockets (`transport/node.py`)
and on the virtual network of the tests.

What a member says of itself gets its version here, above all that is on record: an agent that was started again in the
folder of a former run finds that run's records, and speaks over them instead of being taken for stale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from fabrictool.mesh.detector import AskNeighbour, Detector, Say
from fabrictool.mesh.gossip import (
    Changed,
    Gossip,
    LifeAnswer,
    LifeQuestion,
    LogTail,
    Refused,
    Send,
    Vain,
    decode_message,
    encode,
)
from fabrictool.mesh.holders import Holders, Holds
from fabrictool.mesh.identity import fingerprint
from fabrictool.mesh.records import Lifecycle, NodeBody, RevocationBody, ServiceBody, WitnessBody, seal
from fabrictool.mesh.registry import Registry
from fabrictool.mesh.sites import Sites

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fabrictool.mesh.gossip import Effect as GossipEffect
    from fabrictool.mesh.gossip import Life
    from fabrictool.mesh.identity import IdentityVerifier
    from fabrictool.mesh.records import Body, Envelope, Evidence, Record

BEAT_SECONDS = 1.0
"""Three missed ones close a tunnel: halving it doubles the idle traffic and finds a dead node in half the time."""


HUB_ASKED_OF = 32
"""Agents that are asked for a lost hub: each has another hub, of sixteen perhaps."""
REPEATS_MAX = 60
"""Beats on end in which somebody spoke over us: two processes with one key never stop."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """Effect: our session has left, by a record of a former run, or was revoked; others hear only a new one."""

    reason: str


@dataclass(frozen=True, slots=True)
class TailHeard:
    """Effect: a neighbour of our provider tells how its engine's log ended."""

    peer: bytes
    service: bytes
    text: str


Effect = Send | TailHeard | Changed | Refused | Vain | SessionEnded


class Member:
    """Membership of one session."""

    def __init__(
        self,
        verifier: IdentityVerifier,
        *,
        session: bytes,
        sign: Callable[[bytes], bytes],
        chain: tuple[bytes, ...],
        hub: bool,
    ) -> None:
        self.session = session
        self._sign = sign
        self._chain = chain
        self._hub = hub
        self.registry = Registry(verifier)
        self.gossip = Gossip(self.registry, me=session, hub=hub)
        self.detector = Detector()
        self.sites = Sites()
        self.holders = Holders(session)
        self._federation = verifier.federation
        self._own: dict[bytes, Body] = {}
        """Key → what we said last."""
        self._said_again: set[bytes] = set()
        """Keys that we had to repeat since the last beat."""
        self._contested: set[bytes] = set()
        """Keys to repeat at the next."""
        self._repeats = 0
        """Without a beat in between that needed none."""

    # -- what we say ------------------------------------------------------------------------------------------

    def take(self, envelope: Envelope, *, now: float, wall: float) -> list[Effect]:
        """A signed record that the operator brought, such as a revocation, and not a neighbour."""
        return self._follow(self.gossip.take(envelope, wall=wall), now, wall)

    def publish(self, body: Body, *, wall: float) -> list[Effect]:
        """Sign a record of our own and spread it; its version is ours to choose, whatever `body` has."""
        if isinstance(body, NodeBody):
            body = msgspec.structs.replace(body, certificate=fingerprint(self._chain[0]))
        blank = seal(body, self._sign)
        current = self.registry.get(blank.key)
        if current is not None:
            body = msgspec.structs.replace(body, version=current.body.version + 1)
        self._own[blank.key] = body
        effects = self.gossip.publish(seal(body, self._sign, self._chain), wall=wall)
        self._place(effects)
        return [*effects]

    def renew(self, chain: tuple[bytes, ...], *, wall: float) -> list[Effect]:
        """Our session got another certificate for its key: tell it with our next record, which is due now."""
        self._chain = chain
        node = self._own.get(self.session)
        return self.publish(node, wall=wall) if node is not None else []

    # -- what happens -----------------------------------------------------------------------------------------

    def link_up(self, peer: bytes, *, wall: float, hub: bool = True) -> list[Effect]:
        """A neighbour proved who it is, and whether it is a hub."""
        effects: list[Effect] = [*self.gossip.link_up(peer, hub=hub)]
        if not self._hub:
            return effects
        self.holders.link_up(peer, hub=hub)
        return effects + self._carry_out(self.detector.link_up(peer), wall)

    def link_down(self, peer: bytes, how: Evidence, *, now: float) -> None:
        self.gossip.link_down(peer)
        if self._hub:
            self.holders.link_down(peer)
            self.detector.link_down(peer, how, now)

    def received(self, peer: bytes, payload: bytes, *, now: float, wall: float) -> list[Effect]:
        """A message of the mesh from a neighbour."""
        try:
            message = decode_message(payload)
        except (msgspec.DecodeError, ValueError) as error:
            return [Refused(peer, f"malformed message: {error}")]
        if isinstance(message, LifeQuestion):
            return [Send(peer, encode(LifeAnswer(message.suspect, self._life(message.suspect))))]
        if isinstance(message, LifeAnswer):
            node = self.registry.node(peer)
            hub = node is not None and node.role == "gateway"
            self.detector.answered(peer, message.suspect, message.life, hub=hub)
            return []
        if isinstance(message, LogTail):
            return [TailHeard(peer, message.service, message.text)]
        if isinstance(message, Holds):
            self.holders.heard(peer, message)
            return []
        return self._follow(self.gossip.received(peer, message, wall=wall), now, wall)

    def beat(self, peer: bytes, root: bytes, *, alone: bool = False) -> list[Effect]:
        """The root digest of a neighbour's map came with its heartbeat, and whether it is without a hub."""
        return [*self.gossip.beat(peer, root, alone=alone)]

    def tick(self, *, now: float, wall: float) -> list[Effect]:
        """Once a beat: forget who expired, and look into who is gone."""
        contested, self._contested = self._contested, set()
        self._repeats = self._repeats if self._said_again else 0
        self._said_again = set()
        repeated = [effect for key in sorted(contested) for effect in self._say_again(key, wall)]
        gone = self.registry.forget_expired(wall=wall)
        self.gossip.forget(gone)
        self.sites.forget(gone)
        self.detector.forget(gone)
        if not self._hub:
            return repeated
        ended = [session for session in self.detector.unaccused if not self.registry.lives(session, wall=wall)]
        self.detector.forget(ended)
        held = self.holders.held
        unknown = self.registry.sessions - self.detector.known - held - {self.session}
        self.detector.expected([session for session in unknown if self.registry.lives(session, wall=wall)], now)
        hubs = {body.session for body in self.registry.hubs(wall=wall)} - {self.session}
        return repeated + self._carry_out(
            self.detector.tick(now, BEAT_SECONDS, hubs, lambda s: self._around(s, wall), held), wall
        )

    def retire(self) -> None:
        """A hub that will leave holds no agents any more, as far as other hubs are concerned."""
        self.holders.retire()

    def flush(self) -> Sequence[Send]:
        """What the turn's inputs leave to be sent."""
        news = [Send(hub, encode(message)) for hub, message in self.holders.news()]
        return [*self.gossip.flush(self.holders.others_first), *news]

    # -- internals --------------------------------------------------------------------------------------------

    def _follow(self, effects: list[GossipEffect], now: float, wall: float) -> list[Effect]:
        """Answer to what was said of us, and look into what was said of others."""
        self._place(effects)
        more: list[Effect] = []
        for effect in effects:
            if not isinstance(effect, Changed):
                continue
            body = effect.record.body
            if isinstance(body, RevocationBody):
                own = self.registry.session(self.session)
                if own is not None and self.registry.revoked(own):
                    more.append(SessionEnded("it was revoked"))
            elif body.session == self.session:
                more += self._speak_over(effect.record, wall)
            elif isinstance(body, WitnessBody):
                more += self._heard_of(body, now, wall)
            elif self._hub and isinstance(body, NodeBody) and body.lifecycle < Lifecycle.DOWN:
                more += self._carry_out(self.detector.refuted(body.session, now), wall)
        return [*effects, *more]

    def _place(self, effects: list[GossipEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Changed) and isinstance(effect.record.body, NodeBody):
                self.sites.heard(effect.record.body)

    def _around(self, session: bytes, wall: float) -> set[bytes]:
        """Who may be linked with a session that we lost: of an agent those around it at its site, of a hub agents."""
        node = self.registry.node(session)
        if node is not None and node.role == "gateway":
            return set(self.holders.own[:HUB_ASKED_OF])
        return self.sites.around(session, lambda near: self.registry.lives(near, wall=wall))

    def _life(self, session: bytes) -> Life:
        """A hub tells for those that it is linked with, too: the one that asks may be cut off from them. An agent tells
        only of whom it hears: that it does not is no evidence, for it need not be linked.
        """
        if self._hub:
            return "alive" if session in self.holders.held else self.detector.life(session)
        return "alive" if self.gossip.linked(session) else "never"

    def _speak_over(self, record: Record, wall: float) -> list[Effect]:
        """A record of ours that we did not just publish: a former run with this session wrote it."""
        body = record.body
        ours = self._own.get(record.key)
        if isinstance(body, NodeBody):
            if body.lifecycle is Lifecycle.LEFT:
                return [SessionEnded("a former run with this identity has left")]
            return self._say_again(record.key, wall) if ours is not None else []
        if isinstance(body, ServiceBody) and ours is None and body.lifecycle < Lifecycle.DOWN:
            return self.publish(msgspec.structs.replace(body, lifecycle=Lifecycle.DOWN, note=""), wall=wall)
        return []

    def _say_again(self, key: bytes, wall: float) -> list[Effect]:
        """Once a beat: a hub that accuses us on and on, or a second process with our key, must not set the pace."""
        if key in self._said_again:
            self._contested.add(key)
            return []
        self._said_again.add(key)
        self._repeats += 1
        if self._repeats > REPEATS_MAX:
            reason = "another process uses this identity, or a gateway keeps accusing it"
            return [SessionEnded(reason)] if self._repeats == REPEATS_MAX + 1 else []
        return self.publish(self._own[key], wall=wall)

    def _heard_of(self, witness: WitnessBody, now: float, wall: float) -> list[Effect]:
        if witness.suspect == self.session:
            node, shown = self._own.get(self.session), self.registry.node(self.session)
            newest = shown is not None and witness.seen == shown.version
            return self._say_again(self.session, wall) if witness.suspects and newest and node is not None else []
        if self._hub and witness.suspects:
            self.detector.suspected_elsewhere(witness.suspect, now)
        return []

    def _carry_out(self, effects: list[AskNeighbour | Say], wall: float) -> list[Effect]:
        done: list[Effect] = []
        for effect in effects:
            match effect:
                case AskNeighbour(neighbour, suspect):
                    done.append(Send(neighbour, encode(LifeQuestion(suspect))))
                case Say():
                    done += self._say(effect, wall)
        return done

    def _say(self, say: Say, wall: float) -> list[Effect]:
        node, identity = self.registry.node(say.suspect), self.registry.session(say.suspect)
        if node is None or identity is None or node.lifecycle is Lifecycle.LEFT:
            return []
        body = WitnessBody(
            federation=self._federation,
            session=self.session,
            suspect=say.suspect,
            lifecycle=Lifecycle.JOIN,
            version=1,
            seen=node.version,
            until=identity.not_after,
            suspects=say.suspects,
            votes=say.votes,
            evidence=say.evidence,
        )
        return self.publish(body, wall=wall)
