"""The replica that keeps the most headroom before its latency targets if it takes the request. Pure.

Shadow validation (LLM-Mesh, §5.3): the next steps of a replica's engine are played with the request in it, by what its
own streams took lately, and the smallest slack of any token, of the new request or of one that is open already, is its
headroom. A request that is late anyway counts for nobody: it would make a replica look hopeless for ever.

What is known of a replica: seconds to the first token over the prompt tokens in front of it, and seconds for each
further one over the requests that it had. It begins with what the replica measured before it served (`steps`), worth a
few streams, and is learned from its own streams from then on. One that measured nothing, and of which too little was
seen, or nothing lately, goes by the other policy, so that somebody tries it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from fabrictool.catalog import accelerators
from fabrictool.routing.protocol import ANY_REQUEST, LOST, Candidate, StreamTarget

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from fabrictool.domain.steps import MeasuredSteps
    from fabrictool.routing.protocol import PolicyMeans, RequestOutcome, RoutedRequest, RoutingPolicy

C = TypeVar("C", bound=Candidate)

OVER = 1.1
"""Steps are thought to take so much longer than they did: an estimate that is right is late half of the time."""
DRAWN = 4
"""Candidates that are played for a request; more cost more than they bring (see `PowerOfTwoPolicy`)."""
KNOWN = 8.0
"""Streams, forgetting counted, from which on a replica is known."""
FORGET = 0.97
"""What a sample's share is worth at each next one: the last 33 are most of it."""
STALE_S = 60.0
"""Without a stream for so long it is tried again."""
KEPT = 4096
"""Replicas of which something is kept."""
ENOUGH = 2
"""Decode steps after the last prompt was read."""


@dataclass(slots=True)
class Line:
    """y ≈ a + b x with b ≥ 0, from samples that are forgotten by and by."""

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def learn(self, x: float, y: float) -> None:
        self.count = self.count * FORGET + 1.0
        self.x = self.x * FORGET + x
        self.y = self.y * FORGET + y
        self.xx = self.xx * FORGET + x * x
        self.xy = self.xy * FORGET + x * y

    def begin(self, points: Iterable[tuple[float, float]]) -> None:
        """With these alone, which together count as much as `KNOWN` samples."""
        self.count = self.x = self.y = self.xx = self.xy = 0.0
        for x, y in points:
            self.learn(x, y)
        share = KNOWN / self.count
        self.count, self.x, self.y, self.xx, self.xy = (
            share * total for total in (self.count, self.x, self.y, self.xx, self.xy)
        )

    def at(self, x: float) -> float:
        base, slope = self.base_and_slope()
        return base + slope * x

    def base_and_slope(self) -> tuple[float, float]:
        """Where all samples had about the same x: their mean, and no slope."""
        if not self.count:
            return 0.0, 0.0
        spread = self.xx * self.count - self.x * self.x
        slope = (self.xy * self.count - self.x * self.y) / spread if spread > 1e-9 * self.xx * self.count else 0.0
        slope = min(max(0.0, slope), self.y / self.x if self.x else math.inf)  # through or above the origin
        return max(0.0, (self.y - slope * self.x) / self.count), slope


@dataclass(slots=True)
class _Open:
    """A request that a replica works on."""

    began: float
    prompt: int
    ahead: int
    """Prompt tokens to be read until its own are: others', and its own."""
    first_at: float
    """When its first token is due by what is known."""
    batch: int
    """Requests in the replica, with it."""
    deadline: float
    """Of its first token."""
    tpot_s: float


@dataclass(slots=True)
class _Learned:
    """What is known of a replica."""

    prefill: Line = field(default_factory=Line)
    decode: Line = field(default_factory=Line)
    heard_at: float = -math.inf
    open: dict[Hashable, _Open] = field(default_factory=dict)

    def begin(self, steps: MeasuredSteps, now: float) -> None:
        """As it was measured: nothing was seen of it for long, or ever."""
        self.prefill.begin(steps.of_prompts())
        self.decode.begin(steps.of_batches())
        self.heard_at = now

    def known(self, now: float) -> bool:
        return min(self.prefill.count, self.decode.count) >= KNOWN and now - self.heard_at < STALE_S

    def foreign(self, candidate: Candidate) -> int:
        """Requests in it of which only the number is known."""
        return max(0, int(candidate.load) - len(self.open))

    def headroom(self, tokens: int, target: StreamTarget, foreign: int, now: float) -> float:
        """Seconds: the smallest slack of any token of the next steps if a prompt of `tokens` comes; `foreign` more
        requests are in it of which only that is known.
        """
        waiting = [(now + target.ttft_s, tokens, target.tpot_s)]
        due, running = math.inf, foreign
        tpot = target.tpot_s
        tokens_s = 1.0 / max(1e-6, self.decode.at(len(self.open)))
        for request in self.open.values():  # plain arithmetic: this is most of what a choice costs
            its_tpot = request.tpot_s
            tpot = min(tpot, its_tpot)
            if now < request.first_at:
                waiting.append((request.deadline, request.prompt, its_tpot))
                continue
            running += 1
            next_due = request.deadline + its_tpot * (int((now - request.first_at) * tokens_s) + 1)
            if now < next_due < due:
                due = next_due
        waiting.sort()
        base, slope = self.prefill.base_and_slope()
        at, slack = now, math.inf
        for deadline, prompt, its_tpot in waiting:
            at += OVER * (base + slope * prompt)
            if deadline > now:  # not late already
                slack = min(slack, deadline - at, due - at)
                due = min(due, deadline + its_tpot)
            running += 1
        for _ in range(ENOUGH):
            at += OVER * self.decode.at(running)
            slack = min(slack, due - at)
            due += tpot
        return slack

    def in_time(self, tokens: int, target: StreamTarget, foreign: int, now: float) -> bool:
        """Whether it keeps its targets, and all that is there keeps theirs."""
        return self.headroom(tokens, target, foreign, now) > 0 and self.keeps_pace(target, foreign)

    def keeps_pace(self, target: StreamTarget, foreign: int) -> bool:
        """Whether with one request more each still gets its tokens as fast as it wants them (case 3): a stream that
        began early has headroom to lose, and would lose it all.
        """
        tpot = min((request.tpot_s for request in self.open.values()), default=math.inf)
        return OVER * self.decode.at(len(self.open) + foreign + 1) <= min(tpot, target.tpot_s)


class HeadroomPolicy:
    """See the module's docstring."""

    name = "slo-headroom"
    learns = True

    def __init__(self, means: PolicyMeans, other: RoutingPolicy) -> None:
        """`other` chooses where too little is known; one that does not learn."""
        self._rng = means.rng
        self._targets = means.targets
        self._other = other
        self._learned: OrderedDict[Candidate, _Learned] = OrderedDict()

    def pick(self, candidates: Sequence[C], request: RoutedRequest = ANY_REQUEST, now: float = 0.0) -> C:
        if len(candidates) == 1:
            return candidates[0]
        drawn = self._rng.sample(candidates, min(DRAWN, len(candidates)))  # shuffled: the first of equal ones is taken
        best, most = None, -math.inf
        for candidate in drawn:
            headroom = self._headroom(candidate, request, now)
            if headroom is None:
                return self._other.pick(drawn, request, now)
            if best is None or headroom > most:
                best, most = candidate, headroom
        return best if best is not None else drawn[0]

    def _headroom(self, candidate: Candidate, request: RoutedRequest, now: float) -> float | None:
        """Seconds that it would keep with the request; None: too little is known of it."""
        learned = self._known(candidate, now)
        if learned is None:
            return None
        target = self._targets.get(request.model, _DEFAULT)
        return learned.headroom(request.prompt_tokens, target, learned.foreign(candidate), now)

    # -- ShadowPlay, for making room -------------------------------------------------------------------------

    def target_of(self, model: str) -> StreamTarget:
        return self._targets.get(model, _DEFAULT)

    def late(self, candidates: Sequence[Candidate], request: RoutedRequest, now: float) -> bool:
        target = self.target_of(request.model)

        def late_there(candidate: Candidate) -> bool:
            learned = self._known(candidate, now)
            foreign = 0 if learned is None else learned.foreign(candidate)
            return learned is not None and not learned.in_time(request.prompt_tokens, target, foreign, now)

        return all(map(late_there, candidates))

    def in_time_without(self, candidate: Candidate, request: RoutedRequest, stream: Hashable, now: float) -> bool:
        learned, target = self._known(candidate, now), self.target_of(request.model)
        if learned is None or stream not in learned.open:
            return False
        foreign = learned.foreign(candidate)
        its = learned.open.pop(stream)
        try:
            return learned.in_time(request.prompt_tokens, target, foreign, now)
        finally:
            learned.open[stream] = its

    def in_time_there(self, candidate: Candidate, model: str, tokens: int, due: float, now: float) -> bool:
        learned = self._known(candidate, now)
        target = StreamTarget(due - now, self.target_of(model).tpot_s)
        return learned is not None and learned.in_time(tokens, target, learned.foreign(candidate), now)

    # -- internals --------------------------------------------------------------------------------------------

    def _known(self, candidate: Candidate, now: float) -> _Learned | None:
        learned = self._learned.get(candidate)
        if learned is not None and learned.known(now):
            return learned
        steps = candidate.steps
        if steps is None:
            return None
        if learned is None:
            learned = self._of(candidate)
        learned.begin(steps, now)
        return learned

    def _of(self, candidate: Candidate) -> _Learned:
        """What there is of it, as the one that was asked for last; those that nobody asks for are forgotten."""
        learned = self._learned.pop(candidate, None) or _Learned()
        self._learned[candidate] = learned
        while len(self._learned) > KEPT and not next(iter(self._learned.values())).open:
            self._learned.popitem(last=False)
        return learned

    def on_request_start(self, candidate: Candidate, request: RoutedRequest, now: float) -> None:
        learned = self._of(candidate)
        target = self._targets.get(request.model, _DEFAULT)
        ahead = request.prompt_tokens + sum(its.prompt for its in learned.open.values() if now < its.first_at)
        learned.open[request.id] = _Open(
            now,
            request.prompt_tokens,
            ahead,
            now + OVER * learned.prefill.at(ahead),
            len(learned.open) + 1,
            now + target.ttft_s,
            target.tpot_s,
        )

    def on_request_end(self, candidate: Candidate, request: RoutedRequest, outcome: RequestOutcome = LOST) -> None:
        learned = self._learned.get(candidate)
        began = learned.open.pop(request.id, None) if learned is not None else None
        if learned is None or began is None or outcome.ttft_s is None:
            return
        learned.heard_at = max(learned.heard_at, began.began + outcome.ttft_s)
        learned.prefill.learn(began.ahead, outcome.ttft_s)
        if outcome.tpot_s is not None:
            learned.decode.learn((began.batch + len(learned.open) + 1) / 2, outcome.tpot_s)


class PackingPolicy(HeadroomPolicy):
    """As few replicas as keep the targets, so that the others fall idle and can end: processors before other devices,
    then the one with most requests (LLM-Mesh, sections 7.2 and 8.1).

    Of whom too little is known is tried when nobody else keeps the targets; a processor that has nothing to do also
    before other devices.
    """

    name = "slo-packing"

    def pick(self, candidates: Sequence[C], request: RoutedRequest = ANY_REQUEST, now: float = 0.0) -> C:
        if len(candidates) == 1:
            return candidates[0]
        best, most, unknown = None, -math.inf, list[C]()
        for _, candidate in sorted(((self._rank(c, now), c) for c in candidates), key=itemgetter(0)):
            headroom = self._headroom(candidate, request, now)
            if headroom is None:
                if not candidate.load and _is_processor(candidate):
                    return candidate
                unknown.append(candidate)
            elif headroom > 0 and self._keeps_pace(candidate, request):
                return candidate
            elif best is None or headroom > most:
                best, most = candidate, headroom
        if unknown:
            latest = max(unknown, key=self._heard_at)
            return latest if latest.load < KNOWN else self._other.pick(unknown, request, now)
        return best if best is not None else candidates[0]

    def _heard_at(self, candidate: Candidate) -> float:
        """Where all have been silent for long, the one that served last goes on, and the others stay idle."""
        learned = self._learned.get(candidate)
        return learned.heard_at if learned is not None else -math.inf

    def _rank(self, candidate: Candidate, now: float) -> tuple[bool, float, bool]:
        """Processors first, then the fullest, of equal ones those that are known."""
        return not _is_processor(candidate), -candidate.load, self._known(candidate, now) is None

    def _keeps_pace(self, candidate: Candidate, request: RoutedRequest) -> bool:
        learned = self._learned[candidate]
        return learned.keeps_pace(self._targets.get(request.model, _DEFAULT), learned.foreign(candidate))


def _is_processor(candidate: Candidate) -> bool:
    described = accelerators().get(candidate.device)
    return described is not None and described.kind == "cpu"


_DEFAULT = StreamTarget()
