"""Which of the candidates: the routing policies that come with fabrictool, and how the one of a name is made.

Synchronous, without I/O, with their random source as an argument. Others are installed: see `routing.plugins`.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from typing import TYPE_CHECKING, Final, TypeVar

from fabrictool.base.errors import InvalidInputError
from fabrictool.base.plugins import ROUTING_POLICIES as PLUGINS
from fabrictool.base.plugins import plugin_names
from fabrictool.routing.dealing import part_of, weights_for
from fabrictool.routing.headroom import HeadroomPolicy, PackingPolicy
from fabrictool.routing.plugins import plugged_in
from fabrictool.routing.protocol import ANY_REQUEST, LOST, Candidate, PolicyMeans, StreamTarget

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from fabrictool.routing.protocol import RequestOutcome, RoutedRequest, RoutingPolicy

C = TypeVar("C", bound=Candidate)

GOLDEN: Final = 0.6180339887498949
CREDITS_KEPT: Final = 4096
"""Candidates, of all models and of those that are gone, whose turns are remembered."""
ANSWER_TOKENS: Final = 256.0
"""What an answer is thought to cost before any was seen."""
MEMORY: Final = 0.95
"""Of a moving mean, at each sample."""


class Deaf:
    """A policy that hears nothing of what became of its choices."""

    learns = False

    def on_request_start(self, candidate: Candidate, request: RoutedRequest, now: float) -> None:
        """Never called: it does not learn."""

    def on_request_end(self, candidate: Candidate, request: RoutedRequest, outcome: RequestOutcome = LOST) -> None:
        """Never called: it does not learn."""


class RandomPolicy(Deaf):
    """Uniform over the candidates, by the group's weight when weights differ (paper 001, §3.4's default)."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def pick(self, candidates: Sequence[C], request: RoutedRequest = ANY_REQUEST, now: float = 0.0) -> C:
        return self.rng.choices(candidates, weights=weights_for(candidates, part_of(candidates, request.group)))[0]


class RoundRobinPolicy(Deaf):
    """One after the other, over all models together; a candidate that comes or goes shifts the turn by one.

    Where weights differ, each has turns in proportion to the group's weight there.
    """

    name = "round-robin"

    def __init__(self) -> None:
        self.turn = 0

    def pick(self, candidates: Sequence[C], request: RoutedRequest = ANY_REQUEST, now: float = 0.0) -> C:
        turn, self.turn = self.turn, self.turn + 1
        weights = weights_for(candidates, part_of(candidates, request.group))
        if min(weights) == max(weights):
            return candidates[turn % len(candidates)]
        # Multiples of the golden ratio lie evenly in [0, 1): each soon has had its share, without a memory.
        sums = list(itertools.accumulate(weights))
        return candidates[min(bisect(sums, turn * GOLDEN % 1.0 * sums[-1]), len(candidates) - 1)]


class WeightedPolicy(Deaf):
    """The plan's split, to the request: each candidate gains its weight at each turn, and who is chosen pays for all.

    nginx's smooth weighted round robin: of weights 5, 1 and 1 the first has 5 of any 7 turns, never more than 3 on
    end. It looks at no load: what the planner counted on is what happens. Each group that has weights of its own has
    turns of its own.
    """

    name = "weighted"

    def __init__(self) -> None:
        self.credits: dict[str | None, dict[Candidate, float]] = {}
        """By `part_of` the candidates: of each what it gained and did not pay."""

    def pick(self, candidates: Sequence[C], request: RoutedRequest = ANY_REQUEST, now: float = 0.0) -> C:
        part = part_of(candidates, request.group)
        credit = self.credits.setdefault(part, {})
        chosen, most, total = candidates[0], -math.inf, 0.0
        for candidate, weight in zip(candidates, weights_for(candidates, part), strict=True):
            total += weight
            credit[candidate] = gained = credit.get(candidate, 0.0) + weight
            if weight and gained > most:  # one without has none to pay with, whatever is left to it from before
                chosen, most = candidate, gained
        credit[chosen] -= total
        if len(credit) > max(CREDITS_KEPT, 2 * len(candidates)):
            self.credits[part] = {candidate: credit[candidate] for candidate in candidates}
        return chosen


class LeastLoadedPolicy(Deaf):
    """The smallest load for its weight, with the request on it; equal ones are drawn at random, so that idle replicas
    share the work, and the request counts so that of idle ones the one with the largest weight is taken.
    """

    name = "least-loaded"

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def pick(self, candidates: Sequence[C], request: RoutedRequest = ANY_REQUEST, now: float = 0.0) -> C:
        if len(candidates) == 1:
            return candidates[0]
        least, idlest = math.inf, list[C]()
        for candidate in candidates:
            load = (candidate.load + 1.0) / candidate.weight
            if load < least:
                least, idlest = load, [candidate]
            elif load == least:
                idlest.append(candidate)
        return idlest[0] if len(idlest) == 1 else self.rng.choice(idlest)


class PowerOfTwoPolicy:
    """Of two drawn at random the one with the least work for its weight (Mitzenmacher, 2001): the same cost for ten
    replicas and for ten thousand, and gateways that know little of each other do not all run to the same idle one.

    Work is counted in tokens: what the prompts of open requests hold, and what answers took lately. Requests of other
    gateways, of which only the number is known, count as middling ones.
    """

    name = "power-of-two"
    learns = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._work: dict[Candidate, tuple[int, float]] = {}
        """Candidate → its open requests of ours, and their tokens."""
        self._open: dict[tuple[Candidate, Hashable], float] = {}
        self._answer: float = ANSWER_TOKENS
        self._middling: float = ANSWER_TOKENS

    def pick(self, candidates: Sequence[C], request: RoutedRequest = ANY_REQUEST, now: float = 0.0) -> C:
        count = len(candidates)
        if count == 1:
            return candidates[0]
        first = int(self._rng.random() * count)
        second = int(self._rng.random() * (count - 1))
        one_of_two, other = candidates[first], candidates[second + (second >= first)]
        mine = self._tokens(request)
        ours, others = self._work_of(one_of_two) + mine, self._work_of(other) + mine
        return one_of_two if ours / one_of_two.weight <= others / other.weight else other

    def on_request_start(self, candidate: Candidate, request: RoutedRequest, now: float) -> None:
        tokens = self._open[candidate, request.id] = self._tokens(request)
        number, work = self._work.get(candidate, (0, 0.0))
        self._work[candidate] = (number + 1, work + tokens)
        self._middling += (1.0 - MEMORY) * (tokens - self._middling)

    def on_request_end(self, candidate: Candidate, request: RoutedRequest, outcome: RequestOutcome = LOST) -> None:
        number, work = self._work.pop(candidate)
        tokens = self._open.pop((candidate, request.id))
        if number > 1:
            self._work[candidate] = (number - 1, work - tokens)
        if outcome.answered and outcome.completion_tokens:
            self._answer += (1.0 - MEMORY) * (outcome.completion_tokens - self._answer)

    def _tokens(self, request: RoutedRequest) -> float:
        most = request.most_tokens
        return request.prompt_tokens + (self._answer if most is None else min(self._answer, most))

    def _work_of(self, candidate: Candidate) -> float:
        number, work = self._work.get(candidate, (0, 0.0))
        return work + max(0.0, candidate.load - number) * self._middling


_MADE_BY: Final[dict[str, Callable[[PolicyMeans], RoutingPolicy]]] = {
    "least-loaded": lambda means: LeastLoadedPolicy(means.rng),
    "random": lambda means: RandomPolicy(means.rng),
    "round-robin": lambda _: RoundRobinPolicy(),
    "weighted": lambda _: WeightedPolicy(),
    "power-of-two": lambda means: PowerOfTwoPolicy(means.rng),
    "slo-headroom": lambda means: HeadroomPolicy(means, LeastLoadedPolicy(means.rng)),
    "slo-packing": lambda means: PackingPolicy(means, LeastLoadedPolicy(means.rng)),
}


def targets_of(seconds: Mapping[str, tuple[float | None, float | None]]) -> dict[str, StreamTarget]:
    """From model → (to the first token, for each further one), as specs and blueprints have them."""
    usual = StreamTarget()
    return {
        model: StreamTarget(
            usual.ttft_s if ttft is None else ttft,
            usual.tpot_s if tpot is None else tpot,
        )
        for model, (ttft, tpot) in seconds.items()
    }


def policy_names() -> tuple[str, ...]:
    """Those that come with fabrictool, then those that are installed here."""
    return (*_MADE_BY, *(name for name in plugin_names(PLUGINS) if name not in _MADE_BY))


def routing_policy(
    name: str,
    rng: random.Random,
    targets: Mapping[str, StreamTarget] | None = None,
    complain: Callable[[str], None] = lambda _: None,
) -> RoutingPolicy:
    """The routing policy of that name; `complain` is told, once, of a plug-in that misbehaves.

    Raises
    ------
    InvalidInputError
        FT8003 for a name that nobody has, FT8130 for a plug-in that cannot be loaded.
    """
    means = PolicyMeans(rng, targets or {})
    maker = _MADE_BY.get(name)
    if maker is not None:
        return maker(means)
    known = policy_names()
    if name not in known:
        message = f"there is no routing policy {name!r}; those known here are {', '.join(known)}"
        raise InvalidInputError.of("FT8003", message, hint="install its package here, or choose another")
    return plugged_in(name, means, LeastLoadedPolicy(rng), complain)
