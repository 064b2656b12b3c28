"""Replicas behind a routing policy, a stream of requests, and what becomes of them: the serving simulation's surface.

Pure: virtual time, the random source inside the policy that the caller brings. Same arguments, same result.
Longer than most modules: the loop's arrays are filled beside the specs that they are filled from, field by field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fabrictool.base.errors import InvalidInputError
from fabrictool.routing.candidates import TrustPolicy, select
from fabrictool.routing.protocol import LOST, RequestOutcome
from fabrictool.simulator import kernel
from fabrictool.simulator.memory import NOTHING
from fabrictool.simulator.routes import lent, rivals, routing_by

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fabrictool.routing.protocol import RoutingPolicy
    from fabrictool.simulator.demanded import GroupDemand
    from fabrictool.simulator.memory import RequestMemory
    from fabrictool.simulator.stepmodel import StepModel
    from fabrictool.simulator.steptimes import StepTimes

    Floats = np.ndarray[Any, np.dtype[np.float64]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]

ANYBODY = TrustPolicy({}, {})
"""Trust is kept where replicas are chosen (`deployment`), and by group in `rivals`: whoever is there may serve."""
FAST_FORWARD = 1 << 30
STEP_BY_STEP = 1
Role = Literal["unified", "prefill", "decode"]
_ROLES: dict[Role, int] = {"unified": kernel.UNIFIED, "prefill": kernel.PREFILL, "decode": kernel.DECODE}


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One replica: its step times and the limits of its engine."""

    times: StepTimes
    max_num_seqs: int
    token_budget: int
    """Tokens that one step computes at most (vLLM: ``max_num_batched_tokens``)."""
    kv_tokens: int
    """Tokens that the KV cache holds."""
    model: str = ""
    provider: str = ""
    role: Role = "unified"
    weight: float = 1.0
    """For routing: its share of traffic under equal load."""
    group_weights: Mapping[str, float] = field(default_factory=dict)
    """For routing: consumer group → that share of the group's requests."""
    lanes: int = 1
    prefill_first: bool = False
    recv_interval: int = 1
    """Decode steps from one look for new requests to the next (SGLang: ``scheduler-recv-interval``)."""
    balance_steps: int = 0
    """Decode steps that prompts wait until each attention group has one (TensorRT-LLM: ``timeout_iters``); 0: none."""
    spared: float = 0.0
    """Of the cache that running requests have not taken yet, the share that stays free for them when one more comes in.
    With any, that one has to find room for its whole answer, too."""
    whole_prompts: bool = False
    """A prompt has all of its blocks from the start on, and is not preempted while it is computed: before there was
    chunked prefill, and with `spared`."""
    swap: bool = False
    beside: RequestMemory = NOTHING
    """What a request holds beside its part of `kv_tokens`."""
    prefix_tokens: int = 0
    """Tokens under one prefix id of the stream, a multiple of 16; 0: no prefix caching."""
    host_tokens: int = 0
    """Tokens of prefixes that the host's memory keeps when the cache drops them (vLLM: ``OffloadingConnector``; SGLang:
    HiCache). A step waits for those that it loads; what the host has had longest makes room there."""
    frontend: float = 0.0
    """Seconds by which a first token comes later to its client than a step computed it; later tokens make up for it."""
    frontend_stream: float = 0.0
    """More for each other request that is in flight on the replica then."""
    frontend_token: float = 0.0
    """Seconds outside the engine's steps for each token of the prompt."""
    up: float = 0.0
    """When it becomes ready (a cold start ends)."""
    drain: float = math.inf
    """From when on it gets no new requests (before the walltime's end)."""
    down: float = math.inf
    """When it is gone, with all that it still runs."""
    step: StepModel | None = None
    """Behind `times`: what its devices compute and move, for what they draw. None: not known."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests in order of arrival. In a closed loop only the first `clients` arrival times count."""

    arrival: Floats
    """Seconds, ascending."""
    prompt: Ints
    """Tokens, at least 1."""
    output: Ints
    """Tokens, at least 1."""
    model: Ints | None = None
    """Index into `models`; None: all ask for ``models[0]``."""
    models: tuple[str, ...] = ("",)
    group: Ints | None = None
    """Index into `groups`; None: nobody says who asks, and whoever is there may serve it."""
    groups: tuple[GroupDemand, ...] = ()
    """Who may ask, with the providers that may serve them."""
    priority: Ints | None = None
    chain_start: Ints | None = None
    """(requests + 1) Where each request's prefix ids begin in `chain`."""
    chain: Ints | None = None
    """Dense ids ≥ 0; equal ids in front of two prompts mean equal tokens."""


@dataclass(frozen=True, slots=True)
class Accounts:
    """What each replica did; arrays over replicas."""

    busy: Floats
    """Seconds in steps."""
    steps: Floats
    tokens: Floats
    """Tokens computed, prompts and outputs."""
    pairs: Floats
    """(query, key) pairs of prefill attention."""
    read: Floats
    """Cached tokens read by decode steps."""
    cache_time: Floats
    """Blocks of 16 tokens in use × seconds of `busy`."""
    itl: Floats
    """(replicas, bins) Inter-token latencies; see `inter_token_latencies`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the requests; arrays over requests, seconds of virtual time; NaN: never."""

    arrival: Floats
    first: Floats
    finish: Floats
    prompt: Ints
    output: Ints
    cached: Ints
    preempted: Ints
    replica: Ints
    refused: Ints
    """Indices of requests that fit no replica."""
    lost: Ints
    """Indices of requests whose replica went away in the middle of the answer."""
    retried: int
    """Requests that moved to another replica before their first token."""
    end: float
    accounts: Accounts
    samples: Floats
    """(times, 1 + 3 × replicas) When, then running, waiting and KV share of each replica."""
    complete: bool = True
    """False when it was stopped early."""

    def settled(self, count: int) -> Outcome:
        """Without its first `count` requests, which in a closed loop all come at once."""
        arrays = ("arrival", "first", "finish", "prompt", "output", "cached", "preempted", "replica")
        indices = {name: getattr(self, name)[getattr(self, name) >= count] - count for name in ("refused", "lost")}
        return replace(self, **{name: getattr(self, name)[count:] for name in arrays}, **indices)

    @property
    def ttft(self) -> Floats:
        return self.first - self.arrival

    @property
    def e2e(self) -> Floats:
        return self.finish - self.arrival

    @property
    def tpot(self) -> Floats:
        """Mean time per output token after the first; NaN for outputs of one token."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.output > 1, (self.finish - self.first) / (self.output - 1), np.nan)


@dataclass(slots=True)
class _View:
    """A replica as routing sees it."""

    index: int
    spec: ReplicaSpec
    inside: tuple[Ints, Ints, Ints, Ints]
    """Requests decoding, prefilling, waiting and coming, of all replicas: a column is read much faster than a record.
    """
    ready: bool = False
    context: int = 0
    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def model(self) -> str:
        return self.spec.model

    @property
    def provider(self) -> str:
        return self.spec.provider

    @property
    def weight(self) -> float:
        return self.spec.weight

    @property
    def role(self) -> Role:
        return self.spec.role

    @property
    def group_weights(self) -> Mapping[str, float]:
        return self.spec.group_weights

    @property
    def device(self) -> str:
        return ""

    @property
    def site(self) -> str:
        return ""

    @property
    def steps(self) -> None:
        """Nobody measured it: a policy learns of it as it goes."""

    @property
    def waiting(self) -> int:
        return int(self.inside[2][self.index])

    @property
    def load(self) -> float:
        decoding, prefilling, waiting, coming = self.inside
        at = self.index
        return float(decoding[at] + prefilling[at] + waiting[at] + coming[at])

    def __hash__(self) -> int:
        return self.index


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request as routing sees it."""

    id: tuple[int, bool]
    model: str
    prompt_tokens: int
    output: int
    group: str | None = None
    conversation: int | None = None

    @property
    def most_tokens(self) -> int | None:
        """Nobody knows how long an answer will be."""
        return None


_READ = ("where", "whither", "handed", "state", "first", "finish", "prompt", "output")
_INSIDE = ("decoding", "prefilling", "waiting", "coming")
_OVER = (kernel.FINISHED, kernel.REFUSED, kernel.LOST)


@dataclass(slots=True)
class Fleet:
    """A simulation that can be advanced in slices; `simulate` plays it to its end."""

    specs: Sequence[ReplicaSpec]
    stream: Stream
    policy: RoutingPolicy
    clients: int = 0
    """Closed loop: that many requests are always in flight; 0: open loop."""
    limit: int = FAST_FORWARD
    requests: Any = field(init=False)
    replicas: Any = field(init=False)
    lists: kernel.Lists = field(init=False)
    tables: kernel.StepTables = field(init=False)
    cache: kernel.Cache = field(init=False)
    clock: kernel.EventQueue = field(init=False)
    routing: kernel.RoutingState = field(init=False)
    _views: list[_View] = field(init=False)
    _rivals: dict[str | None, tuple[list[_View], list[_View]]] = field(init=False)
    """As `routes.rivals` says."""
    _columns: dict[str, Any] = field(init=False)
    """Of the requests: read much faster than a record."""
    _changes: list[tuple[float, int, str]] = field(init=False)
    _parked: list[int] = field(init=False, default_factory=list)
    _told: dict[tuple[int, bool], tuple[_View, _Asked, float]] = field(init=False, default_factory=dict)
    """Request, and whether its cache was handed over → to whom a policy that learns sent it, and when."""
    _retried: int = field(init=False, default=0)
    _samples: list[list[float]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        _check(self.specs, self.stream)
        self.requests = _requests(self.stream, self.clients, self.specs)
        self.tables, kinds = _tables(self.specs)
        self.replicas = _replicas(self.specs, kinds, self.stream.models)
        self.lists = _lists(self.specs, self.stream, int(self.requests.priority.max(initial=0)) + 1)
        self.cache = _cache(self.specs, self.stream)
        self.clock = _clock(self.requests, self.clients)
        decoding, prefilling, waiting, coming = (np.asarray(self.replicas[name]) for name in _INSIDE)
        self._views = [_View(r, spec, (decoding, prefilling, waiting, coming)) for r, spec in enumerate(self.specs)]
        self._columns = {name: np.asarray(self.requests[name]) for name in _READ}
        self._columns["now"] = np.asarray(self.clock.at["now"])
        self._rivals = rivals(self.stream.groups, self._views)
        self.routing = routing_by(
            self.policy,
            self.stream.model,
            self.stream.group,
            len(self.requests),
            self._rivals,
            self._views,
        )
        self._changes = sorted(
            (when, r, what)
            for r, spec in enumerate(self.specs)
            for what, when in (("up", spec.up), ("drain", spec.drain), ("down", spec.down))
            if when < math.inf
        )
        self._apply_changes(-math.inf, 0.0)
        self._assign_only_choices()

    @property
    def done(self) -> int:
        return len(self.requests) - int(self.clock.at[0].unfinished)

    def advance(self, until: float = math.inf) -> bool:
        """Plays up to `until`; False when nothing is left to happen."""
        with lent(self.policy, self.routing, self._rivals, self._views):
            return self._advance(until)

    def _advance(self, until: float) -> bool:
        while True:
            change = self._changes[0][0] if self._changes else math.inf
            reason = kernel.advance(
                self.requests,
                self.replicas,
                self.lists,
                self.tables,
                self.cache,
                self.clock,
                self.routing,
                min(until, change),
                self.limit,
            )
            if reason == kernel.ROUTE:
                self._route(int(self.clock.at[0].request))
                continue
            if self._changes and change <= until and (reason == kernel.UNTIL or self._parked):
                self._apply_changes(float(self.clock.at[0].now), change)
                continue
            inside = self.replicas.waiting + self.replicas.decoding + self.replicas.coming
            if reason != kernel.UNTIL and self._changes and self._parked:
                return True  # who waits goes on with the next change, after `until`
            if reason != kernel.UNTIL and inside.any():
                message = "the simulation stopped with requests in it"
                raise RuntimeError(message)
            return bool(reason == kernel.UNTIL)

    def sample(self) -> None:
        """Notes running, waiting and cache use of each replica now."""
        state = self.replicas
        row = [float(self.clock.at[0].now)]
        for r in range(len(self.specs)):
            replica = state[r]
            idle = replica.evictable * (replica.chain_tokens // kernel.BLOCK)
            used = 1.0 - (replica.free + idle) / max(1, replica.blocks)
            running = replica.decoding + replica.prefilling + replica.coming
            row += [float(running), float(replica.waiting), float(used)]
        self._samples.append(row)

    def outcome(self, *, complete: bool = True) -> Outcome:
        requests, state = self.requests, self.replicas
        served = np.where(requests.where >= 0, requests.where, 0)
        known = requests.where >= 0
        outside = np.where(known, state.outside_token[served] * requests.prompt, 0.0)
        first = requests.first + outside + requests.late
        accounts = Accounts(
            busy=state.busy.copy(),
            steps=state.steps.copy(),
            tokens=state.tokens.copy(),
            pairs=state.pairs.copy(),
            read=state.read.copy(),
            cache_time=state.cache_time.copy(),
            itl=self.lists.itl.copy(),
        )
        return Outcome(
            arrival=requests.arrival.copy(),
            first=first,
            finish=np.maximum(requests.finish + outside, first),
            prompt=requests.prompt,
            output=requests.output,
            cached=requests.cached,
            preempted=requests.preempted,
            replica=requests.where,
            refused=np.flatnonzero(requests.state == kernel.REFUSED),
            lost=np.flatnonzero(requests.state == kernel.LOST),
            retried=self._retried,
            end=float(self.clock.at[0].now),
            accounts=accounts,
            samples=np.array(self._samples, dtype=float).reshape(len(self._samples), 1 + 3 * len(self.specs)),
            complete=complete,
        )

    def _assign_only_choices(self) -> None:
        """A model with one replica that lives all the time needs no routing: the loop runs without coming back."""
        for m, model in enumerate(self.stream.models):
            for late, target in ((False, self.requests.where), (True, self.requests.whither)):
                mine = [v for v in self._views if v.model == model and (v.role == "decode") is late]
                if not all(set(mine) <= set(sides[late]) for sides in self._rivals.values()):
                    continue
                if len(mine) == 1 and mine[0].spec.up <= 0 and mine[0].spec.drain == mine[0].spec.down == math.inf:
                    chosen = slice(None) if self.stream.model is None else self.stream.model == m
                    target[chosen] = mine[0].index

    def _route(self, i: int) -> None:
        handed = bool(self._columns["handed"][i])
        model = self.stream.models[0 if self.stream.model is None else int(self.stream.model[i])]
        group = None if self.stream.group is None else self.stream.groups[int(self.stream.group[i])].group
        choice = select(self._rivals[group][handed], model=model, trust=ANYBODY, group=None)
        target = self._columns["whither" if handed else "where"]
        if choice.candidates:
            target[i] = self._pick(choice.candidates, i, model, group, handed=handed)
        elif any(what == "up" and self.specs[r].model == model for _, r, what in self._changes):
            target[i] = kernel.PARKED
            self._parked.append(i)
        else:  # nobody may ever serve it
            target[i] = kernel.PARKED
            now = float(self.clock.at[0].now)
            if self.requests[i].handed == kernel.KEPT:
                self._let_go(i, now)
            kernel.leave(self.requests, self.replicas, self.clock, i, kernel.REFUSED, now)

    # Wide: what a policy is told of a request.
    def _pick(self, candidates: Sequence[_View], i: int, model: str, group: str | None, *, handed: bool) -> int:
        policy = self.policy
        request = _Asked((i, handed), model, int(self._columns["prompt"][i]), int(self._columns["output"][i]), group)
        if not policy.learns:
            return policy.pick(candidates, request).index
        now = float(self._columns["now"][0])
        self._tell_ends()
        chosen = policy.pick(candidates, request, now)
        policy.on_request_start(chosen, request, now)
        self._told[i, handed] = chosen, request, now
        return chosen.index

    def _tell_ends(self) -> None:
        """A policy that learns hears, before it chooses again, of what ended since."""
        columns = self._columns
        for key in list(self._told):
            i, handed = key
            gone = columns["state"][i] in _OVER or bool(columns["handed"][i]) is not handed
            view, request, began = self._told[key]
            if not gone and columns["whither" if handed else "where"][i] == view.index:
                continue
            del self._told[key]
            outcome = LOST
            first, finish = float(columns["first"][i]), float(columns["finish"][i])
            # Of a pair, what the client saw says nothing of the prefill replica alone.
            if columns["state"][i] == kernel.FINISHED and not columns["handed"][i]:
                tpot = (finish - first) / (request.output - 1) if request.output > 1 else None
                outcome = RequestOutcome(True, first - began, tpot, request.prompt_tokens, request.output)
            self.policy.on_request_end(view, request, outcome)

    def _apply_changes(self, now: float, until: float) -> None:
        while self._changes and self._changes[0][0] <= until:
            when, r, what = self._changes.pop(0)
            self._views[r].ready = self.replicas[r].ready = what == "up"
            if what == "down":
                self._take_down(r, max(now, when))
            if what == "up":
                self._revive(max(now, when))

    def _revive(self, when: float) -> None:
        parked, self._parked = self._parked, []
        for i in parked:
            target = self.requests.whither if self.requests[i].handed else self.requests.where
            target[i] = kernel.NOWHERE
            kernel.push(self.clock, when, i)

    def _take_down(self, r: int, when: float) -> None:
        """Replica r is gone: answers that clients have a part of are lost, the rest tries elsewhere."""
        requests = self.requests
        over = np.isin(requests.state, _OVER)
        handing = np.isin(requests.handed, (kernel.KEPT, kernel.COMING)) & ~over
        coming = requests.handed == kernel.COMING
        landed = coming & (requests.state == kernel.WAITING)
        kept = handing & ~landed & (requests.where == r)
        requests.handed[kept] = kernel.DROPPED
        for i in np.flatnonzero(kept & coming).tolist():
            kernel.forget_fetched(*self._state, i, when, self.limit)
            requests[i].whither = kernel.NOWHERE  # when it would have come, it goes to whoever decodes then
        fetched = np.flatnonzero(handing & coming & (requests.whither == r))
        for i in (*kernel.clear(requests, self.replicas, self.lists, self.cache, r), *fetched):
            if handing[i] and not landed[i] and requests[i].where != r:
                self._let_go(i, when)
            if np.isfinite(requests[i].first):
                kernel.leave(requests, self.replicas, self.clock, i, kernel.LOST, when)
                continue
            self._retried += 1
            awaited = coming[i] and not landed[i]
            requests[i].handed = kernel.UNHANDED
            requests[i].generated = 0
            requests[i].late = 0.0
            requests[i].where = requests[i].whither = kernel.NOWHERE
            if not awaited:  # else it tries when its cache would have come
                kernel.push(self.clock, when, i)

    def _let_go(self, i: int, when: float) -> None:
        kernel.let_go(*self._state, i, when, self.limit)

    @property
    def _state(self) -> tuple[Any, Any, kernel.Lists, kernel.StepTables, kernel.Cache, kernel.EventQueue]:
        return self.requests, self.replicas, self.lists, self.tables, self.cache, self.clock


def simulate(
    specs: Sequence[ReplicaSpec],
    stream: Stream,
    policy: RoutingPolicy,
    *,
    clients: int = 0,
    samples: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Plays the stream to its end.

    `samples` is how many points of the timeline are kept until the last arrival, and then at the same pace;
    `progress` is told (requests over, requests in all) at each of them. With it, a KeyboardInterrupt ends the
    simulation early with what it has: see `Outcome.complete`. Raises InvalidInputError FT2101-FT2104 for streams and
    replicas that make no sense.
    """
    fleet = Fleet(specs, stream, policy, clients=clients)
    count = len(stream.arrival)
    horizon = float(stream.arrival[-1]) if count and not clients else math.inf
    complete = True
    try:
        if samples and 0 < horizon < math.inf:
            at, goes_on = 0, True
            while goes_on and (at < samples or fleet.done < count):
                at += 1
                goes_on = fleet.advance(horizon * at / samples) or at < samples
                fleet.sample()
                if progress:
                    progress(fleet.done, count)
        fleet.advance()
    except KeyboardInterrupt:
        if progress is None:
            raise
        complete = fleet.done == count
    if progress:
        progress(fleet.done, count)
    return fleet.outcome(complete=complete)


def _check(specs: Sequence[ReplicaSpec], stream: Stream) -> None:
    if not specs:
        raise InvalidInputError.of("FT2101", "no replica to simulate")
    count = len(stream.arrival)
    if count and (not np.isfinite(stream.arrival).all() or (np.diff(stream.arrival) < 0).any()):
        raise InvalidInputError.of("FT2102", "arrival times must be finite numbers in ascending order")
    if count and (stream.prompt.min() < 1 or stream.output.min() < 1):
        raise InvalidInputError.of("FT2103", "a request needs at least one prompt token and one output token")
    for spec in specs:
        times = (spec.times.decode, spec.times.mixed, spec.times.sample, spec.times.shared)
        if any(not np.isfinite(t).all() or (t < 0).any() for t in times) or spec.kv_tokens < kernel.BLOCK:
            raise InvalidInputError.of(
                "FT2104", f"replica of {spec.model!r}: step times must be finite and a KV cache must hold a block"
            )


def _requests(stream: Stream, clients: int, specs: Sequence[ReplicaSpec]) -> Any:
    count = len(stream.arrival)
    requests = np.zeros(count, dtype=kernel.REQUEST).view(np.recarray)
    requests.arrival = stream.arrival
    if clients:
        requests.arrival[clients:] = np.nan
    requests.prompt, requests.output = stream.prompt, stream.output
    if stream.priority is not None:
        requests.priority = stream.priority
    if stream.chain_start is not None and any(spec.prefix_tokens for spec in specs):
        requests.chain, requests.ids = stream.chain_start[:-1], np.diff(stream.chain_start)
    requests.first = requests.finish = np.nan
    requests.state = kernel.FLYING
    requests.where = requests.whither = kernel.NOWHERE
    requests.following = -1
    requests.paused = -1.0
    return requests


def _tables(specs: Sequence[ReplicaSpec]) -> tuple[kernel.StepTables, list[int]]:
    """One row for each different StepTimes, and which row each replica uses."""
    kinds: list[StepTimes] = []
    rows: dict[int, int] = {}
    which = []
    for spec in specs:
        if id(spec.times) not in rows:
            rows[id(spec.times)] = len(kinds)
            kinds.append(spec.times)
        which.append(rows[id(spec.times)])

    def stack(arrays: list[Floats]) -> Floats:
        longest = max(len(array) for array in arrays)
        return np.stack([np.concatenate([a, np.full(longest - len(a), a[-1])]) for a in arrays])

    rates = np.zeros(len(kinds), dtype=kernel.RATES).view(np.recarray)
    for name in kernel.RATES.names or ():
        rates[name] = [getattr(times, name) for times in kinds]
    names = ("decode", "mixed", "sample", "shared", "draft")
    tables = {name: stack([getattr(times, name) for times in kinds]) for name in names}
    return kernel.StepTables(**tables, rates=rates), which


def _replicas(specs: Sequence[ReplicaSpec], kinds: list[int], models: tuple[str, ...]) -> Any:
    replicas = np.zeros(len(specs), dtype=kernel.REPLICA).view(np.recarray)
    replicas.table = kinds
    replicas.role = [_ROLES[spec.role] for spec in specs]
    replicas.seqs = [spec.max_num_seqs for spec in specs]
    replicas.budget = [spec.token_budget for spec in specs]
    replicas.blocks = replicas.free = [spec.kv_tokens // kernel.BLOCK for spec in specs]
    replicas.lanes = [spec.lanes for spec in specs]
    replicas.prefill_first = [spec.prefill_first for spec in specs]
    replicas.look = [spec.recv_interval for spec in specs]
    # With one group there is nobody to wait for, and what a decode replica takes in is computed already.
    replicas.balance = [spec.balance_steps if spec.times.groups > 1 and spec.role != "decode" else 0 for spec in specs]
    replicas.spared = [spec.spared for spec in specs]
    replicas.whole = [spec.whole_prompts or spec.spared > 0 for spec in specs]
    replicas.window = [spec.times.window for spec in specs]
    replicas.beside = [spec.beside.fixed / kernel.BLOCK for spec in specs]
    replicas.beside_token = [spec.beside.windowed / kernel.BLOCK for spec in specs]
    replicas.swaps = [spec.swap for spec in specs]
    replicas.chain_tokens = [spec.prefix_tokens for spec in specs]
    replicas.shelf = [spec.host_tokens // spec.prefix_tokens if spec.prefix_tokens else 0 for spec in specs]
    replicas.first_delay = [spec.frontend for spec in specs]
    replicas.stream_delay = [spec.frontend_stream for spec in specs]
    replicas.outside_token = [spec.frontend_token for spec in specs]
    replicas.model = [models.index(spec.model) if spec.model in models else kernel.NOWHERE for spec in specs]
    replicas.weight = [spec.weight for spec in specs]
    replicas.ends = math.inf
    replicas.soonest = kernel.NEVER
    replicas.landed = -1
    return replicas


def _lists(specs: Sequence[ReplicaSpec], stream: Stream, levels: int) -> kernel.Lists:
    count = len(specs)
    slots = max(spec.max_num_seqs for spec in specs) + 1
    chain = np.zeros(1, dtype=np.int64) if stream.chain is None else np.asarray(stream.chain, dtype=np.int64)
    run, fill, chunk = (np.zeros((count, slots), dtype=np.int64) for _ in range(3))
    return kernel.Lists(
        chain=chain,
        run=run,
        fill=fill,
        chunk=chunk,
        phase=np.zeros((count, kernel.BLOCK), dtype=np.int64),
        head=np.full((count, levels), -1, dtype=np.int64),
        tail=np.full((count, levels), -1, dtype=np.int64),
        itl=np.zeros((count, kernel.ITL_BINS)),
    )


def _cache(specs: Sequence[ReplicaSpec], stream: Stream) -> kernel.Cache:
    caching = stream.chain is not None and len(stream.chain) and any(spec.prefix_tokens for spec in specs)
    ids = int(stream.chain.max()) + 1 if caching and stream.chain is not None else 1
    count = len(specs)
    return kernel.Cache(
        blocks=np.zeros((count, ids), dtype=kernel.BLOCKS).view(np.recarray),
        ring=np.zeros((count, 2 * ids + 2), dtype=kernel.RING).view(np.recarray),
        ends=np.zeros(count, dtype=kernel.RING_ENDS).view(np.recarray),
        shelf=np.zeros((count, ids + 1), dtype=np.int64),
        shelf_ends=np.zeros(count, dtype=kernel.RING_ENDS).view(np.recarray),
    )


def _clock(requests: Any, clients: int) -> kernel.EventQueue:
    count = len(requests)
    at = np.zeros(1, dtype=kernel.CLOCK).view(np.recarray)
    at.unfinished, at.request = count, kernel.NOWHERE
    at.opened = at.spawned = min(clients, count) if clients else count
    return kernel.EventQueue(at=at, heap=np.zeros(count + 1, dtype=kernel.HEAP).view(np.recarray))
