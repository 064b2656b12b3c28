"""The event loop of the serving simulation, on arrays, with the steps between events fast-forwarded.

One function, `advance`, moves a fleet of replicas from event to event on a virtual clock. It is written so that numba
compiles it; without numba the very same code runs interpreted, some hundred times slower. Requests, replicas and
their state are arrays, so that a million requests fit in memory and nothing is allocated on the way.

An engine repeats steps. A step computes one token for each running request and, within the token budget, chunks of
prompts (continuous batching: Orca, OSDI 2022; chunked prefill: Sarathi-Serve, OSDI 2024). Between two events (an
arrival that can be admitted, a completion, a full cache) the batch is constant and a step's time is affine in the
number of cached tokens, so that k steps take ``k·a + g·(k·K + D·k(k-1)/2)`` seconds: one event, not k. The result
equals stepping one by one to rounding; the tests compare it with a plain twin that does just that.

What needs judgement stays outside and in Python: routing policies that learn or are installed (`advance` returns with a
request that has no replica yet), joins, failures and walltime ends (the caller passes `until` and changes the state
there). The simple policies that come with fabrictool choose in the loop, as they would in Python to the last draw.

One module, longer than others, because it is one compiled loop: its functions share these records, numba compiles and
caches them together, and none has a meaning without the others. What numba keeps on disk it finds by names and line
numbers, and cannot read where a record has got another name since: who renames one moves all functions by a line.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from fabrictool.routing.policies import GOLDEN

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


def _without_linear_algebra() -> None:
    """Tell numba that there is none: to see whether there is it loads SciPy's, which takes longer than the rest of the
    kernel; and nothing here multiplies matrices.
    """
    from numba.np import linalg  # noqa: PLC0415 - where numba is

    def none() -> None:
        raise ImportError

    kept = getattr(linalg, "ensure_blas", None)
    if kept is None:  # a numba that asks elsewhere: it takes longer to start, no more
        return
    linalg.ensure_blas = none
    try:
        with suppress(ImportError):
            import numba.np.arraymath  # noqa: F401, PLC0415 - it asks as it is loaded
    finally:
        linalg.ensure_blas = kept


try:
    from numba import njit as _njit
except ImportError:  # the base installation has no compiler
    COMPILED = False

    def compiled(function: F) -> F:
        """Without numba: the function itself."""
        return function
else:
    COMPILED = True
    _without_linear_algebra()

    def compiled(function: F) -> F:
        """Machine code, kept on disk between runs where there is a place to keep it."""
        try:
            return _njit(cache=True, error_model="numpy")(function)  # type: ignore[no-any-return]
        except RuntimeError:  # neither beside the source nor in a home can this user write
            return _njit(error_model="numpy")(function)  # type: ignore[no-any-return]


NEVER = 1 << 60
BLOCK = 16
"""Tokens in a block of the paged KV cache (vLLM's default)."""
ITL_BINS = 2400
ITL_LOW = 1e-5
ITL_RATIO = 1.01
"""Inter-token latencies are counted in bins 1 % wide from 10 µs on."""

ROUNDING = 1e-9
"""Of sums of tokens that are not whole."""
MOST_SPARED = 4096
"""Tokens of a request's own answer that have to be free when it is admitted, at most (SGLang's clip of long limits)."""

UNIFIED, PREFILL, DECODE = 0, 1, 2
DONE, ROUTE, UNTIL = 0, 1, 2
"""Why `advance` returned: nothing is left to do; `EventQueue.request` needs a replica; the clock would pass `until`."""
WAITING, PREFILLING, DECODING, FINISHED, REFUSED, FLYING, LOST = 0, 1, 2, 3, 4, 5, 6
UNHANDED, KEPT, COMING, LANDED, DROPPED = 0, 1, 2, 3, 4
"""Where the cache is of a request that two replicas serve: not computed yet; with the first, until the second has room;
on its way, and in the room of both; with the second; gone, so that the second computes it again."""
NOWHERE, PARKED = -1, -2
"""Not routed yet; taken out of the loop by the caller, who brings it back with `revive`."""
BY_CALLER, LEAST_LOADED, RANDOM, ROUND_ROBIN, WEIGHTED = 0, 1, 2, 3, 4
"""Who gives requests a replica: the caller of `advance`, or the policy of `routing.policies` by that name."""
MT_WORDS, MT_MIDDLE = 624, 397


REQUEST = np.dtype(
    [
        ("arrival", "f8"),
        ("first", "f8"),  # out: when the first token left; NaN before
        ("late", "f8"),  # out: seconds by which it came later to its client
        ("finish", "f8"),  # out: when the last token left; NaN before
        ("prompt", "i8"),
        ("output", "i8"),
        ("priority", "i8"),  # 0 is served first
        ("chain", "i8"),  # where its prefix ids begin in `Lists.chain`
        ("ids", "i8"),  # how many those are
        ("state", "i8"),
        ("generated", "i8"),
        ("prefilled", "i8"),  # tokens of the present prefill that are computed or were found in the cache
        ("reserved", "i8"),  # tokens of the present prefill that have blocks
        ("swapped", "i8"),  # 1: its cache waits in the host's memory
        ("cached", "i8"),  # out: prompt tokens that the prefix cache held
        ("preempted", "i8"),  # out: how often
        ("offset", "i8"),  # cached tokens in a step are offset + step
        ("ends", "i8"),  # the step after which it is over
        ("admitted", "i8"),
        ("where", "i8"),  # replica that prefills (or does all); NOWHERE until it is routed
        ("whither", "i8"),  # replica that decodes after a hand-over; NOWHERE until it is routed
        ("handed", "i8"),  # UNHANDED, KEPT, COMING, LANDED, DROPPED
        ("following", "i8"),  # the next in the queue, or of those that came
        ("paused", "f8"),  # when its last token came before it was preempted; negative: it is not
    ]
)
"""One record a request, in order of arrival; seconds and tokens."""

REPLICA = np.dtype(
    [
        ("table", "i8"),  # row of `StepTables`
        ("role", "i8"),
        ("seqs", "i8"),
        ("budget", "i8"),
        ("blocks", "i8"),
        ("lanes", "i8"),  # micro-batches in flight: pipeline stages × data-parallel attention groups
        ("prefill_first", "?"),  # prompts stop decoding until they are done (SGLang), instead of sharing its steps
        ("look", "i8"),  # decode steps between two looks for new requests; 1: each step looks
        ("unlooked", "i8"),  # decode steps since the last look
        ("looked", "f8"),  # when that was: what came later is not known to the scheduler yet
        ("balance", "i8"),  # decode steps that prompts wait until each attention group has one; 0: they do not
        ("since", "i8"),  # decode steps that were done when the first of them began to wait; negative: none does
        ("spared", "f8"),  # share of `owed` that has to be free when a request is admitted, beside all of its own
        ("whole", "?"),  # a prompt has all of its blocks from the start on, and is not preempted while it is computed
        ("owed", "i8"),  # blocks that the admitted requests have not taken yet and will
        ("window", "i8"),  # tokens that a sliding window holds
        ("beside", "f8"),  # blocks that a request in the batch takes whatever its length ...
        ("beside_token", "f8"),  # ... and for each of its tokens that a sliding window holds
        ("swaps", "?"),  # preempted requests keep their cache in host memory, instead of computing it again
        ("chain_tokens", "i8"),  # tokens under one prefix id; 0: no prefix caching
        ("shelf", "i8"),  # prefix ids that the host's memory holds beside the cache
        ("first_delay", "f8"),  # seconds by which a first token comes later to its client ...
        ("stream_delay", "f8"),  # ... and for each other request that is in flight
        ("outside_token", "f8"),  # seconds of a request outside its steps, for each prompt token
        ("rejoined", "?"),  # whether requests decode again since the last step
        ("ahead", "f8"),  # tokens that steps with prompts in them have decoded beyond whole ones
        ("starts", "f8"),
        ("model", "i8"),  # what `RoutingState.model` counts; -1: none of the stream's
        ("weight", "f8"),
        ("ready", "?"),
        ("ends", "f8"),  # infinity when idle
        ("count", "i8"),  # steps until then
        ("step", "i8"),  # decode steps done
        ("soonest", "i8"),  # step at which the first of the decoding requests is over
        ("context", "i8"),  # cached tokens that the next decode step reads
        ("decoding", "i8"),
        ("prefilling", "i8"),
        ("waiting", "i8"),
        ("coming", "i8"),  # requests whose room is taken while their cache comes
        ("landed", "i8"),  # the last of them whose cache is there and waits for the next step; -1: none
        ("free", "i8"),
        ("evictable", "i8"),
        ("sequence", "i8"),
        ("touched", "i8"),
        ("link_free", "f8"),
        ("pending_swap", "f8"),
        ("loading", "i8"),  # tokens that the next step waits for, from the host's memory
        ("stall", "f8"),
        ("busy", "f8"),
        ("steps", "f8"),
        ("tokens", "f8"),
        ("pairs", "f8"),
        ("read", "f8"),
        ("cache_time", "f8"),
    ]
)
"""One record a replica: limits, state, accounts."""

RATES = np.dtype(
    [
        ("read", "f8"),  # seconds for each cached token that a decode step reads
        ("read_window", "f8"),  # the same in sliding-window layers
        ("pair", "f8"),  # seconds for each (query, key) pair of a prefill chunk
        ("pair_window", "f8"),
        ("window", "i8"),  # tokens that a sliding-window layer looks back; 0: none is windowed
        ("swap", "f8"),  # seconds for each token that is moved to or from host memory
        ("hand", "f8"),  # seconds for each token that is handed from prefill to decode
        ("hand_latency", "f8"),
        ("queries", "i8"),  # tokens of each sequence that a step computes to decode some: above 1 with drafts
        ("decoded", "f8"),  # how many of them it decodes on average
        ("groups", "i8"),  # groups of devices that have attention of their own and share the experts
    ]
)
"""One record a kind of replica."""

BLOCKS = np.dtype([("resident", "?"), ("users", "i8"), ("touch", "i8"), ("shelved", "?")])
"""(replica, prefix id): a prefix in the cache; shelved: the host's memory has it, too, or alone."""
RING = np.dtype([("block", "i8"), ("touch", "i8")])
"""(replica, slot): prefixes in the order in which they fell out of use; least recently used first out."""
RING_ENDS = np.dtype([("head", "i8"), ("tail", "i8")])
HEAP = np.dtype([("time", "f8"), ("request", "i8")])
CLOCK = np.dtype(
    [
        ("now", "f8"),
        ("arrived", "i8"),
        ("opened", "i8"),  # requests with an arrival time of their own; those behind come when another is over
        ("spawned", "i8"),
        ("request", "i8"),  # what needs a replica, after ROUTE
        ("queued", "i8"),  # entries of the heap
        ("unfinished", "i8"),
    ]
)


class Lists(NamedTuple):
    """Who is where: arrays of request numbers."""

    chain: Any
    """Prefix ids of all requests, one after the other."""
    run: Any
    """(replica, slot) → decoding; any order."""
    fill: Any
    """(replica, slot) → prefilling; in order of admission."""
    chunk: Any
    """(replica, slot) → tokens that the step computes of `fill`."""
    phase: Any
    """(replica, 16) → how many decoding requests have this remainder of `offset`."""
    head: Any
    """(replica, priority) → first waiting request."""
    tail: Any
    itl: Any
    """(replica, bin) → inter-token latencies."""


class StepTables(NamedTuple):
    """Step times of each kind of replica, seconds. Rows are kinds."""

    decode: Any
    """(kind, sequences) → a step that only decodes, without reading the cache."""
    mixed: Any
    """(kind, tokens of one lane) → a step with prompts in it, without attention and sampling."""
    sample: Any
    """(kind, sequences) → logits and sampling of a mixed step."""
    shared: Any
    """(kind, tokens of all attention groups) → what these share in a mixed step."""
    draft: Any
    """(kind, sequences) → guessing of drafts, in a mixed step."""
    rates: Any


class Cache(NamedTuple):
    """The prefix cache of each replica."""

    blocks: Any
    ring: Any
    ends: Any
    shelf: Any
    """(replica, slot) → prefix ids in the host's memory, in the order in which they came there."""
    shelf_ends: Any


class RoutingState(NamedTuple):
    """Who chooses a request's replica, and with what."""

    by: Any
    """One number: BY_CALLER or a policy."""
    turn: Any
    """One number: requests that were routed so far, with ROUND_ROBIN."""
    words: Any
    """State of Python's random source (MT19937), as ``random.Random.getstate`` gives it: 624 words and a position."""
    model: Any
    """(requests) → model."""
    group: Any
    """(requests) → consumer group."""
    allowed: Any
    """(groups, replicas) Whether it may serve the group."""
    weights: Any
    """(groups, replicas) By which the group's requests are dealt out."""
    part: Any
    """(groups, replicas) → row of `credit`."""
    credit: Any
    """(parts, replicas) What it gained of its weight and did not pay, with WEIGHTED."""
    candidates: Any
    """(replicas) Room for replica numbers ..."""
    shares: Any
    """... for their weights ..."""
    loads: Any
    """... and for what is compared of them."""


class EventQueue(NamedTuple):
    """The loop's own state, and arrivals to come that are not in the stream's order."""

    at: Any
    """One record of CLOCK."""
    heap: Any


@compiled
def push(clock: EventQueue, time: float, request: int) -> None:
    """Request arrives (again) at `time`."""
    at = clock.at[0].queued
    clock.at[0].queued = at + 1
    while at > 0:
        above = (at - 1) >> 1
        over = clock.heap[above].time
        if over < time or (over == time and clock.heap[above].request < request):
            break
        clock.heap[at].time = over
        clock.heap[at].request = clock.heap[above].request
        at = above
    clock.heap[at].time = time
    clock.heap[at].request = request


@compiled
def _pop(clock: EventQueue) -> int:
    top = clock.heap[0].request
    size = clock.at[0].queued - 1
    clock.at[0].queued = size
    time, request = clock.heap[size].time, clock.heap[size].request
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            clock.heap[other].time < clock.heap[child].time
            or (
                clock.heap[other].time == clock.heap[child].time
                and clock.heap[other].request < clock.heap[child].request
            )
        ):
            child = other
        if time < clock.heap[child].time or (time == clock.heap[child].time and request < clock.heap[child].request):
            break
        clock.heap[at].time = clock.heap[child].time
        clock.heap[at].request = clock.heap[child].request
        at = child
    clock.heap[at].time = time
    clock.heap[at].request = request
    return int(top)


@compiled
def _blocks(tokens: int) -> int:
    return (tokens + BLOCK - 1) // BLOCK


@compiled
def _chain_blocks(requests: Any, replicas: Any, r: int, i: int) -> int:
    """Blocks of request i that live under shared prefix ids; whole ids only."""
    per_id = replicas[r].chain_tokens
    if per_id == 0:
        return 0
    ids = requests[i].ids
    return int(min(ids, requests[i].prompt // per_id) * per_id // BLOCK)


@compiled
def _own_blocks(requests: Any, replicas: Any, r: int, i: int, tokens: int) -> int:
    return max(0, _blocks(tokens) - _chain_blocks(requests, replicas, r, i))


@compiled
def _unborn(requests: Any, replicas: Any, r: int, i: int, held: int, most: int) -> int:
    """Blocks that request i takes beyond those of `held` tokens until its answer, or `most` tokens of it, is there.

    The last token is never in the cache.
    """
    if replicas[r].role == PREFILL:
        return 0
    output = min(requests[i].output, requests[i].generated + most)
    whole = _own_blocks(requests, replicas, r, i, requests[i].prompt + output - 1)
    return max(0, whole - _own_blocks(requests, replicas, r, i, held))


@compiled
def _beside(requests: Any, replicas: Any, r: int, i: int) -> int:
    """Blocks that request i takes as long as it is in the batch: what its windows hold, and states of linear attention.

    Those of its whole answer from the start on: they are few, and what does not grow needs no watching.
    """
    if replicas[r].beside == 0.0 and replicas[r].beside_token == 0.0:
        return 0
    answer = 0 if replicas[r].role == PREFILL else requests[i].output
    held = min(requests[i].prompt + answer, replicas[r].window)
    blocks: int = math.ceil(replicas[r].beside + replicas[r].beside_token * held)
    return blocks


@compiled
def _make_room(replicas: Any, cache: Cache, r: int, need: int) -> None:
    """Drops unused prefixes, least recently used first, until `need` blocks are free or nothing is left to drop."""
    per_id = replicas[r].chain_tokens // BLOCK
    size = cache.ring.shape[1]
    while replicas[r].free < need and replicas[r].evictable > 0:
        slot = cache.ends[r].head % size
        cache.ends[r].head += 1
        block = cache.ring[r, slot].block
        stale = cache.blocks[r, block].touch != cache.ring[r, slot].touch
        if stale or not cache.blocks[r, block].resident or cache.blocks[r, block].users > 0:
            continue
        cache.blocks[r, block].resident = False
        replicas[r].evictable -= 1
        replicas[r].free += per_id
        if replicas[r].shelf > 0 and not cache.blocks[r, block].shelved:
            _shelve(replicas, cache, r, block)


@compiled
def _shelve(replicas: Any, cache: Cache, r: int, block: int) -> None:
    """A prefix that the device's cache drops goes to the host's memory, where the oldest makes room for it."""
    size = cache.shelf.shape[1]
    if cache.shelf_ends[r].tail - cache.shelf_ends[r].head >= replicas[r].shelf:
        oldest = cache.shelf[r, cache.shelf_ends[r].head % size]
        cache.shelf_ends[r].head += 1
        cache.blocks[r, oldest].shelved = False
    cache.shelf[r, cache.shelf_ends[r].tail % size] = block
    cache.shelf_ends[r].tail += 1
    cache.blocks[r, block].shelved = True


@compiled
def _unuse_chain(requests: Any, replicas: Any, lists: Lists, cache: Cache, r: int, i: int) -> None:
    """Request i no longer needs its shared prefix, which stays in the cache until room is needed."""
    per_id = replicas[r].chain_tokens
    if per_id == 0:
        return
    size = cache.ring.shape[1]
    start = requests[i].chain
    ids = _chain_blocks(requests, replicas, r, i) * BLOCK // per_id
    for at in range(ids - 1, -1, -1):  # the tail of a chain goes first: it is useless without its head
        block = lists.chain[start + at]
        cache.blocks[r, block].users -= 1
        if cache.blocks[r, block].users == 0:
            replicas[r].evictable += 1
            replicas[r].touched += 1
            cache.blocks[r, block].touch = replicas[r].touched
            if cache.ends[r].tail - cache.ends[r].head >= size:
                _compact(cache, r)
            slot = cache.ends[r].tail % size
            cache.ring[r, slot].block = block
            cache.ring[r, slot].touch = replicas[r].touched
            cache.ends[r].tail += 1


@compiled
def _compact(cache: Cache, r: int) -> None:
    """Forgets entries of the ring that were touched again since; as many stay as prefixes are unused."""
    size = cache.ring.shape[1]
    write = cache.ends[r].head
    for read in range(cache.ends[r].head, cache.ends[r].tail):
        block, touch = cache.ring[r, read % size].block, cache.ring[r, read % size].touch
        if (
            cache.blocks[r, block].resident
            and cache.blocks[r, block].users == 0
            and cache.blocks[r, block].touch == touch
        ):
            cache.ring[r, write % size].block = block
            cache.ring[r, write % size].touch = touch
            write += 1
    cache.ends[r].tail = write


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _release(requests: Any, replicas: Any, lists: Lists, cache: Cache, r: int, i: int, tokens: int) -> None:
    replicas[r].free += _own_blocks(requests, replicas, r, i, tokens) + _beside(requests, replicas, r, i)
    replicas[r].owed -= _unborn(requests, replicas, r, i, tokens, NEVER)
    _unuse_chain(requests, replicas, lists, cache, r, i)


@compiled
def _enqueue(requests: Any, replicas: Any, lists: Lists, r: int, i: int, front: bool) -> None:
    level = requests[i].priority
    requests[i].state = WAITING
    if front:
        requests[i].following = lists.head[r, level]
        lists.head[r, level] = i
        if lists.tail[r, level] < 0:
            lists.tail[r, level] = i
    else:
        requests[i].following = -1
        if lists.tail[r, level] >= 0:
            requests[lists.tail[r, level]].following = i
        else:
            lists.head[r, level] = i
        lists.tail[r, level] = i
    replicas[r].waiting += 1


@compiled
def _first_level(lists: Lists, r: int) -> int:
    for level in range(lists.head.shape[1]):
        if lists.head[r, level] >= 0:
            return level
    return -1


@compiled
def _known(lists: Lists, cache: Cache, r: int, start: int, ids: int) -> tuple[int, int, int, int]:
    """Of a chain of prefix ids: those that need no computing, how many of them the host has to load; those that lie
    in the cache unused; those that are not in it.
    """
    hits, loaded, idle, fresh = 0, 0, 0, 0
    unbroken = True
    for at in range(ids):
        block = lists.chain[start + at]
        if cache.blocks[r, block].resident:
            hits += unbroken
            idle += cache.blocks[r, block].users == 0
        else:
            fresh += 1
            unbroken = unbroken and cache.blocks[r, block].shelved
            hits += unbroken
            loaded += unbroken
    return hits, loaded, idle, fresh


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _admit(requests: Any, replicas: Any, lists: Lists, cache: Cache, r: int, i: int, budget: int) -> bool:
    """Takes the blocks of request i; False, and nothing changed, when they are not to be had.

    All that it has to compute has to fit now, but only what it computes in this step (`budget` tokens at most) gets its
    blocks (vLLM: ``full_sequence_must_fit``), unless the engine takes those of whole prompts.
    """
    ready = requests[i].handed == KEPT or requests[i].swapped == 1
    tokens = requests[i].prompt + requests[i].generated
    per_id = replicas[r].chain_tokens
    per_block = per_id // BLOCK
    start = requests[i].chain
    ids = _chain_blocks(requests, replicas, r, i) * BLOCK // per_id if per_id else 0
    hits, loaded, idle_hits, fresh = _known(lists, cache, r, start, ids)
    # A cache that is there already lacks the newest token: the next step computes it.
    held = tokens - 1 if ready else tokens
    need = _own_blocks(requests, replicas, r, i, held) + fresh * per_block + _beside(requests, replicas, r, i)
    room = replicas[r].free + (replicas[r].evictable - idle_hits) * per_block
    if replicas[r].spared > 0.0 and replicas[r].decoding + replicas[r].prefilling > 0:
        own = _unborn(requests, replicas, r, i, held, MOST_SPARED)
        if need + own + replicas[r].spared * replicas[r].owed > room:
            return False
    if need > room:
        return False
    # Those that run take theirs first; they cannot need more than a block each.
    if not replicas[r].whole and need + replicas[r].decoding > room and need + _growth(replicas, lists, r, 1) > room:
        return False
    cached = min(hits * per_id, tokens - 1)
    if not ready:
        requests[i].reserved = tokens if replicas[r].whole else min(tokens, cached + budget)
        need -= _own_blocks(requests, replicas, r, i, tokens)
        need += _own_blocks(requests, replicas, r, i, requests[i].reserved)
    for at in range(ids):
        block = lists.chain[start + at]
        if cache.blocks[r, block].resident:
            if cache.blocks[r, block].users == 0:
                replicas[r].evictable -= 1
            cache.blocks[r, block].users += 1
    _make_room(replicas, cache, r, need)
    for at in range(ids):
        block = lists.chain[start + at]
        if not cache.blocks[r, block].resident:
            cache.blocks[r, block].resident = True
            cache.blocks[r, block].users += 1
    replicas[r].free -= need
    replicas[r].owed += _unborn(requests, replicas, r, i, held if ready else requests[i].reserved, NEVER)
    requests[i].swapped = 0
    if ready:
        requests[i].prefilled = tokens
    else:
        requests[i].prefilled = cached
        replicas[r].loading += loaded * per_id
        if requests[i].generated == 0:
            requests[i].cached = min(cached, requests[i].prompt)
    replicas[r].sequence += 1
    requests[i].admitted = replicas[r].sequence
    return True


@compiled
def _join_decoding(requests: Any, replicas: Any, lists: Lists, r: int, i: int) -> None:
    """Request i computes one token in each step from now on. Its cache holds ``offset + step`` tokens in a step."""
    lists.run[r, replicas[r].decoding] = i
    replicas[r].decoding += 1
    length = requests[i].prompt + requests[i].generated
    requests[i].offset = length - replicas[r].step
    requests[i].ends = replicas[r].step + requests[i].output - requests[i].generated
    lists.phase[r, requests[i].offset % BLOCK] += 1
    replicas[r].soonest = min(replicas[r].soonest, requests[i].ends)
    replicas[r].context += length
    requests[i].state = DECODING


@compiled
def _find_soonest(requests: Any, replicas: Any, lists: Lists, r: int) -> None:
    soonest = NEVER
    for at in range(replicas[r].decoding):
        soonest = min(soonest, requests[lists.run[r, at]].ends)
    replicas[r].soonest = soonest


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _stop_decoding(
    requests: Any, replicas: Any, lists: Lists, tables: StepTables, cache: Cache, r: int, slot: int
) -> None:
    """The request at a place of `run` gives its blocks back and waits at the head of its queue."""
    victim = lists.run[r, slot]
    held = requests[victim].offset + replicas[r].step
    replicas[r].decoding -= 1
    lists.run[r, slot] = lists.run[r, replicas[r].decoding]
    replicas[r].context -= held
    lists.phase[r, requests[victim].offset % BLOCK] -= 1
    _find_soonest(requests, replicas, lists, r)
    requests[victim].generated = held - requests[victim].prompt
    requests[victim].preempted += 1
    if requests[victim].paused < 0.0:  # else it has waited for longer
        requests[victim].paused = replicas[r].ends
    if requests[victim].handed == LANDED:
        requests[victim].handed = DROPPED
    # The token of this step is not in the cache yet.
    _release(requests, replicas, lists, cache, r, victim, held - 1)
    if replicas[r].swaps:
        requests[victim].swapped = 1
        replicas[r].pending_swap += held * tables.rates[replicas[r].table].swap
    _enqueue(requests, replicas, lists, r, victim, True)


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _put_back(requests: Any, replicas: Any, lists: Lists, cache: Cache, r: int, at: int) -> None:
    """The request at a place of `fill` gives its blocks back and waits at the head of its queue."""
    i = lists.fill[r, at]
    replicas[r].prefilling -= 1
    for later in range(at, replicas[r].prefilling):
        lists.fill[r, later] = lists.fill[r, later + 1]
        lists.chunk[r, later] = lists.chunk[r, later + 1]
    requests[i].preempted += 1
    _release(requests, replicas, lists, cache, r, i, requests[i].reserved)
    _enqueue(requests, replicas, lists, r, i, True)


@compiled
def _last_to_fill(requests: Any, replicas: Any, lists: Lists, r: int, first: int) -> int:
    """The place of `fill`, from `first` on, of the least urgent and last admitted; -1 where there is none."""
    last = -1
    for at in range(first, replicas[r].prefilling):
        if last < 0 or requests[lists.fill[r, at]].priority >= requests[lists.fill[r, last]].priority:
            last = at
    return last


@compiled
def _last_to_decode(requests: Any, replicas: Any, lists: Lists, r: int) -> int:
    """The place of `run` of the least urgent and last admitted; -1 where there is none."""
    last = -1
    for at in range(replicas[r].decoding):
        if last < 0 or _after(requests, lists.run[r, at], lists.run[r, last]):
            last = at
    return last


@compiled
def _after(requests: Any, i: int, other: int) -> bool:
    """Whether request i is preempted before the other."""
    if requests[i].priority != requests[other].priority:
        return bool(requests[i].priority > requests[other].priority)
    return bool(requests[i].admitted > requests[other].admitted)


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _preempt(requests: Any, replicas: Any, lists: Lists, tables: StepTables, cache: Cache, r: int, first: int) -> int:
    """The least urgent, last admitted request waits again; its place in `fill`, -1 if it decoded. Prompts before the
    place `first` are spared.
    """
    filling = -1 if replicas[r].whole else _last_to_fill(requests, replicas, lists, r, first)
    slot = _last_to_decode(requests, replicas, lists, r)
    if filling >= 0 and (slot < 0 or _after(requests, lists.fill[r, filling], lists.run[r, slot])):
        _put_back(requests, replicas, lists, cache, r, filling)
        return filling
    _stop_decoding(requests, replicas, lists, tables, cache, r, slot)
    return -1


@compiled
def _growth(replicas: Any, lists: Lists, r: int, steps: int) -> int:
    """Blocks that `steps` more steps of the running requests take beyond what they hold.

    A request opens a block every 16 steps; when, depends on ``offset mod 16`` alone, and those are counted.
    """
    whole, rest = divmod(steps, BLOCK)
    total = whole * replicas[r].decoding
    if rest > 0:
        for residue in range(BLOCK):
            filled = (residue + replicas[r].step - 1) % BLOCK
            if filled == 0 or filled + rest > BLOCK:
                total += lists.phase[r, residue]
    return int(total)


@compiled
def _affordable(replicas: Any, lists: Lists, r: int, most: int) -> int:
    """How many steps, up to `most`, the free and droppable blocks allow."""
    room = replicas[r].free + replicas[r].evictable * (replicas[r].chain_tokens // BLOCK)
    if replicas[r].decoding * ((most + BLOCK - 1) // BLOCK + 1) <= room:
        return most
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) >> 1
        if _growth(replicas, lists, r, middle) <= room:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def _windowed(requests: Any, replicas: Any, lists: Lists, r: int, window: int, most: int) -> tuple[int, int, int]:
    """(tokens that windowed layers read, requests still inside the window, steps until one of those leaves it)."""
    read, inside, until = 0, 0, most
    step = replicas[r].step
    for at in range(replicas[r].decoding):
        length = requests[lists.run[r, at]].offset + step
        if length < window:
            inside += 1
            read += length
            until = min(until, window - length)
        else:
            read += window
    return read, inside, until


@compiled
def _pairs(start: int, chunk: int, window: int) -> float:
    """(query, key) pairs of `chunk` tokens behind `start`; with a window, each looks back that far at most."""
    end = start + chunk
    if window == 0 or end <= window:
        return chunk * start + 0.5 * chunk * (chunk + 1)
    inside = max(0, window - start)
    return inside * start + 0.5 * inside * (inside + 1) + float(chunk - inside) * window


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _fetch(requests: Any, replicas: Any, tables: StepTables, clock: EventQueue, r: int, i: int, now: float) -> None:
    """The cache of request i, for which replica r has taken room, sets out over the link of who keeps it."""
    keeper = requests[i].where
    rates = tables.rates[replicas[keeper].table]
    replicas[keeper].link_free = max(replicas[keeper].link_free, now) + requests[i].prompt * rates.hand
    replicas[r].coming += 1
    requests[i].handed = COMING
    requests[i].state = FLYING
    push(clock, replicas[keeper].link_free + rates.hand_latency, i)


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _admit_waiting(
    requests: Any,
    replicas: Any,
    lists: Lists,
    tables: StepTables,
    cache: Cache,
    clock: EventQueue,
    r: int,
    now: float,
    budget: int,
) -> int:
    """Takes requests from the queue into the batch while slots, blocks and `budget` allow; what is left of it."""
    while replicas[r].waiting > 0 and budget > 0:
        if replicas[r].decoding + replicas[r].prefilling + replicas[r].coming >= replicas[r].seqs:
            break
        level = _first_level(lists, r)
        i = lists.head[r, level]
        if requests[i].arrival > replicas[r].looked:
            break
        if not _admit(requests, replicas, lists, cache, r, i, budget):
            break
        lists.head[r, level] = requests[i].following
        if lists.head[r, level] < 0:
            lists.tail[r, level] = -1
        replicas[r].waiting -= 1
        if requests[i].handed == KEPT:
            _fetch(requests, replicas, tables, clock, r, i, now)
            continue
        missing = requests[i].prompt + requests[i].generated - requests[i].prefilled
        if missing == 0:  # swapped in: nothing to compute
            replicas[r].pending_swap += requests[i].prefilled * tables.rates[replicas[r].table].swap
            _join_decoding(requests, replicas, lists, r, i)
            replicas[r].rejoined = True
            budget -= tables.rates[replicas[r].table].queries
            continue
        requests[i].state = PREFILLING
        at = replicas[r].prefilling
        lists.fill[r, at] = i
        lists.chunk[r, at] = min(missing, budget)
        replicas[r].prefilling = at + 1
        budget -= lists.chunk[r, at]
    return budget


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _chunks(requests: Any, replicas: Any, lists: Lists, tables: StepTables, cache: Cache, r: int, budget: int) -> int:
    """Deals `budget` tokens out to the prompts that are being computed, and blocks for them; what is left of it."""
    at = 0
    while at < replicas[r].prefilling:
        i = lists.fill[r, at]
        missing = requests[i].prompt + requests[i].generated - requests[i].prefilled
        chunk = max(0, min(missing, budget))
        reserved, more = requests[i].prefilled + chunk, 0
        if reserved > requests[i].reserved:
            more = _own_blocks(requests, replicas, r, i, reserved)
            more -= _own_blocks(requests, replicas, r, i, requests[i].reserved)
        put_back = -1
        while more > 0 and put_back != at:
            droppable = replicas[r].evictable * (replicas[r].chain_tokens // BLOCK)
            if more + _growth(replicas, lists, r, 1) <= replicas[r].free + droppable:
                break
            put_back = _preempt(requests, replicas, lists, tables, cache, r, at)
        if put_back == at:
            continue
        if more > 0:
            _make_room(replicas, cache, r, more)
            replicas[r].free -= more
            replicas[r].owed -= _unborn(requests, replicas, r, i, requests[i].reserved, NEVER)
            replicas[r].owed += _unborn(requests, replicas, r, i, reserved, NEVER)
        requests[i].reserved = max(requests[i].reserved, reserved)
        lists.chunk[r, at] = chunk
        budget -= chunk
        at += 1
    return budget


@compiled
def _looks(replicas: Any, tables: StepTables, r: int) -> bool:
    """Whether the next step may take in requests that came since the last look."""
    if replicas[r].decoding == 0 or replicas[r].prefilling > 0:
        return True
    if replicas[r].balance == 0:
        return bool(replicas[r].unlooked == 0)
    if replicas[r].waiting >= tables.rates[replicas[r].table].groups:
        return True
    return bool(replicas[r].since >= 0 and replicas[r].step - replicas[r].since >= replicas[r].balance)


# Long: one pass over a step, whose parts share a dozen running sums; wide as the others are.
@compiled
def _plan_step(
    requests: Any,
    replicas: Any,
    lists: Lists,
    tables: StepTables,
    cache: Cache,
    clock: EventQueue,
    r: int,
    now: float,
    limit: int,
) -> None:
    """Decides the next step (or run of equal steps) of replica r and when it ends; idle replicas end at infinity."""
    kind = replicas[r].table
    replicas[r].ends = now  # who has to stop here has had his last token now, also where the replica was idle
    while replicas[r].landed >= 0:
        i = replicas[r].landed
        replicas[r].landed = requests[i].following
        replicas[r].coming -= 1
        requests[i].handed = LANDED
        if math.isnan(requests[i].first):
            requests[i].first = now
            # The answer has to pass the front ends of both replicas.
            requests[i].late += replicas[r].first_delay + replicas[r].decoding * replicas[r].stream_delay
        _join_decoding(requests, replicas, lists, r, i)
    while replicas[r].decoding > 0 and _affordable(replicas, lists, r, 1) < 1:
        _preempt(requests, replicas, lists, tables, cache, r, 0)
    budget = replicas[r].budget
    if not replicas[r].prefill_first:
        budget -= replicas[r].decoding * tables.rates[kind].queries
    if replicas[r].prefilling > 0:
        budget = _chunks(requests, replicas, lists, tables, cache, r, budget)
    if _looks(replicas, tables, r):
        replicas[r].unlooked = 0
        replicas[r].looked = now
        replicas[r].since = -1
    _admit_waiting(requests, replicas, lists, tables, cache, clock, r, now, budget)
    decoding = replicas[r].decoding
    while decoding > 0 and _affordable(replicas, lists, r, 1) < 1:
        # Those just admitted may have taken the running ones' last blocks.
        _preempt(requests, replicas, lists, tables, cache, r, 0)
        decoding = replicas[r].decoding
    if replicas[r].balance > 0 and replicas[r].waiting > 0 and replicas[r].since < 0:
        replicas[r].since = replicas[r].step
    replicas[r].starts = now
    if decoding == 0 and replicas[r].prefilling == 0:
        replicas[r].ends = math.inf
        replicas[r].count = 0
        return
    extra = replicas[r].pending_swap + replicas[r].loading * tables.rates[kind].swap
    replicas[r].pending_swap = 0.0
    replicas[r].loading = 0
    window = tables.rates[kind].window
    if replicas[r].prefilling == 0:
        most = min(limit, replicas[r].soonest - replicas[r].step)
        if replicas[r].waiting > 0 and replicas[r].look > 1:
            most = min(most, replicas[r].look - replicas[r].unlooked)
        if replicas[r].since >= 0:
            most = min(most, replicas[r].since + replicas[r].balance - replicas[r].step)
        most = _affordable(replicas, lists, r, most)
        read, inside = 0, 0
        if window > 0:
            read, inside, most = _windowed(requests, replicas, lists, r, window, most)
        replicas[r].count = 1 if extra > 0 else most
        base, slope, curve = _affine(replicas, tables, r, read, inside)
        k = replicas[r].count
        replicas[r].ends = now + extra + k * base + slope * k + curve * (0.5 * k * (k - 1))
        return
    prefill_only = replicas[r].prefill_first
    tokens, sampled, pairs, pairs_window, chunks = 0, 0, 0.0, 0.0, 0
    for at in range(replicas[r].prefilling):
        i = lists.fill[r, at]
        chunk = lists.chunk[r, at]
        if chunk == 0:
            continue
        chunks += 1
        tokens += chunk
        start = requests[i].prefilled
        pairs += _pairs(start, chunk, 0)
        if window > 0:
            pairs_window += _pairs(start, chunk, window)
        sampled += start + chunk == requests[i].prompt + requests[i].generated
    share = max(1, min(replicas[r].lanes, chunks))
    length = (tokens + share - 1) // share
    time = (pairs * tables.rates[kind].pair + pairs_window * tables.rates[kind].pair_window) / share
    computed = 0
    if not prefill_only:
        # Requests, not lanes, when those are fewer: a lone one gains nothing from micro-batches beside it.
        lanes = max(1, min(replicas[r].lanes, decoding))
        computed = decoding * tables.rates[kind].queries
        length += (computed + lanes - 1) // lanes
        sampled += computed
        read = 0
        if window > 0:
            read, _, _ = _windowed(requests, replicas, lists, r, window, 1)
        reading = replicas[r].context * tables.rates[kind].read + read * tables.rates[kind].read_window
        time += reading * tables.rates[kind].decoded / lanes
        if computed > decoding:
            time += tables.draft[kind, min(decoding, tables.draft.shape[1] - 1)]
    time += tables.mixed[kind, min(length, tables.mixed.shape[1] - 1)]
    together = min(length * tables.rates[kind].groups, tokens + computed)
    time += tables.shared[kind, min(together, tables.shared.shape[1] - 1)]
    time += tables.sample[kind, min(sampled, tables.sample.shape[1] - 1)]
    replicas[r].count = 1
    if computed > decoding:
        # Whole tokens, and never more than the request that ends first still lacks.
        replicas[r].ahead += tables.rates[kind].decoded
        most = min(int(replicas[r].ahead + ROUNDING), replicas[r].soonest - replicas[r].step)
        replicas[r].count = _affordable(replicas, lists, r, most)
        replicas[r].ahead = min(replicas[r].ahead - replicas[r].count, tables.rates[kind].decoded)
    replicas[r].ends = now + extra + time
    replicas[r].pairs += pairs


@compiled
def _affine(replicas: Any, tables: StepTables, r: int, read: int, inside: int) -> tuple[float, float, float]:
    """(fixed, by context, growth) seconds of a decode step: the k-th takes ``fixed + by_context + k·growth``."""
    kind = replicas[r].table
    lanes = max(1, min(replicas[r].lanes, replicas[r].decoding))
    slope = replicas[r].context * tables.rates[kind].read + read * tables.rates[kind].read_window
    curve = replicas[r].decoding * tables.rates[kind].read + inside * tables.rates[kind].read_window
    return tables.decode[kind, replicas[r].decoding], slope / lanes, curve / lanes


@compiled
def _interrupt(requests: Any, replicas: Any, lists: Lists, tables: StepTables, r: int, now: float) -> None:
    """An arrival cuts a run of decode steps at the end of the step that is under way."""
    k = replicas[r].count
    if k <= 1 or replicas[r].prefilling > 0:
        return
    window = tables.rates[replicas[r].table].window
    read, inside = 0, 0
    if window > 0:
        read, inside, _ = _windowed(requests, replicas, lists, r, window, 1)
    base, slope, curve = _affine(replicas, tables, r, read, inside)
    first = base + slope
    passed = now - replicas[r].starts
    if curve > 0.0:
        linear = first - 0.5 * curve
        j = int((math.sqrt(linear * linear + 2.0 * curve * passed) - linear) / curve)
    else:
        j = int(passed / first) if first > 0.0 else 0
    # Rounding may be off by one step either way; the step under way is the last that begins before now.
    j = max(0, min(j, k - 1))
    while j > 0 and j * first + curve * (0.5 * j * (j - 1)) >= passed:
        j -= 1
    while j < k - 1 and (j + 1) * first + curve * (0.5 * (j + 1) * j) < passed:
        j += 1
    replicas[r].count = j + 1
    replicas[r].ends = replicas[r].starts + (j + 1) * first + curve * (0.5 * (j + 1) * j)


@compiled
def leave(requests: Any, replicas: Any, clock: EventQueue, i: int, state: int, now: float) -> None:
    """Request i is over; in a closed loop its client sends the next one when it has the whole answer."""
    outside = 0.0
    if state == FINISHED:
        requests[i].finish = now
        r = requests[i].where
        outside = replicas[r].outside_token * requests[i].prompt
        outside += max(0.0, requests[i].first + requests[i].late - now)
    requests[i].state = state
    clock.at[0].unfinished -= 1
    if clock.at[0].spawned < requests.shape[0]:
        spawned = clock.at[0].spawned
        clock.at[0].spawned += 1
        requests[spawned].arrival = now + outside
        push(clock, requests[spawned].arrival, spawned)


@compiled
def _count_itl(lists: Lists, r: int, seconds: float, tokens: int) -> None:
    slot = int(math.log(max(seconds, ITL_LOW) / ITL_LOW) / math.log(ITL_RATIO))
    lists.itl[r, min(slot, ITL_BINS - 1)] += tokens


@compiled
def _count_pause(requests: Any, lists: Lists, r: int, i: int, now: float) -> None:
    """The first token of request i since it was preempted."""
    if requests[i].paused >= 0.0:
        _count_itl(lists, r, now - requests[i].paused, 1)
        requests[i].paused = -1.0


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _complete(requests: Any, replicas: Any, lists: Lists, cache: Cache, clock: EventQueue, r: int, now: float) -> None:
    """Takes out the requests whose last token has just been computed."""
    step = replicas[r].step
    soonest = NEVER
    at = 0
    while at < replicas[r].decoding:
        i = lists.run[r, at]
        if requests[i].ends > step:
            soonest = min(soonest, requests[i].ends)
            at += 1
            continue
        held = requests[i].offset + step
        replicas[r].decoding -= 1
        lists.run[r, at] = lists.run[r, replicas[r].decoding]
        replicas[r].context -= held
        lists.phase[r, requests[i].offset % BLOCK] -= 1
        requests[i].generated = requests[i].output
        _release(requests, replicas, lists, cache, r, i, held - 1)
        leave(requests, replicas, clock, i, FINISHED, now)
    replicas[r].soonest = soonest


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _end_step(
    requests: Any, replicas: Any, lists: Lists, tables: StepTables, cache: Cache, clock: EventQueue, r: int
) -> None:
    """Books the steps that replica r just finished: tokens, completions, hand-overs."""
    now = replicas[r].ends
    k = replicas[r].count
    decoding = replicas[r].decoding
    stalled = replicas[r].prefill_first and replicas[r].prefilling > 0
    length = now - replicas[r].starts
    replicas[r].busy += length
    replicas[r].steps += 1.0 if replicas[r].prefilling > 0 else k / tables.rates[replicas[r].table].decoded
    used = replicas[r].blocks - replicas[r].free - replicas[r].evictable * (replicas[r].chain_tokens // BLOCK)
    replicas[r].cache_time += length * used
    if decoding > 0 and not stalled:
        need = _growth(replicas, lists, r, k)
        if need > replicas[r].free:
            _make_room(replicas, cache, r, need)
        replicas[r].free -= need
        replicas[r].owed -= need
        replicas[r].tokens += k * decoding
        replicas[r].read += k * float(replicas[r].context) + decoding * (0.5 * k * (k - 1))
        replicas[r].step += k
        replicas[r].unlooked = (replicas[r].unlooked + k) % replicas[r].look
        replicas[r].context += k * decoding
        again = 0
        if replicas[r].rejoined:
            for at in range(decoding):
                i = lists.run[r, at]
                again += requests[i].paused >= 0.0
                _count_pause(requests, lists, r, i, replicas[r].starts + length / k)
            replicas[r].rejoined = False
        _count_itl(lists, r, length / k, (k - 1) * decoding)
        _count_itl(lists, r, length / k + replicas[r].stall, decoding - again)
        replicas[r].stall = 0.0
        if replicas[r].step >= replicas[r].soonest:
            _complete(requests, replicas, lists, cache, clock, r, now)
    elif decoding > 0:
        replicas[r].stall += length
    if replicas[r].prefilling > 0:
        replicas[r].unlooked = 0  # a step with prompts in it counts as many
    kept = 0
    for at in range(replicas[r].prefilling):
        i = lists.fill[r, at]
        requests[i].prefilled += lists.chunk[r, at]
        replicas[r].tokens += lists.chunk[r, at]
        tokens = requests[i].prompt + requests[i].generated
        if requests[i].prefilled < tokens:
            lists.fill[r, kept] = i
            kept += 1
            continue
        _count_pause(requests, lists, r, i, now)
        requests[i].generated += 1
        handed = replicas[r].role == PREFILL and requests[i].generated < requests[i].output
        if math.isnan(requests[i].first):
            others = decoding + replicas[r].prefilling - 1
            requests[i].late += replicas[r].first_delay + others * replicas[r].stream_delay
            if not handed:  # else the replica that decodes the answer sends all of it
                requests[i].first = now
        if requests[i].generated >= requests[i].output:
            _release(requests, replicas, lists, cache, r, i, tokens)
            leave(requests, replicas, clock, i, FINISHED, now)
        elif handed:
            requests[i].handed = KEPT
            requests[i].state = FLYING
            push(clock, now, i)
        else:
            _join_decoding(requests, replicas, lists, r, i)
    replicas[r].prefilling = kept


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _arrive(
    requests: Any,
    replicas: Any,
    lists: Lists,
    tables: StepTables,
    cache: Cache,
    clock: EventQueue,
    i: int,
    r: int,
    now: float,
    limit: int,
) -> bool:
    """Request i reaches replica r; False when it can never fit there."""
    answer = 0 if replicas[r].role == PREFILL else requests[i].output
    if _blocks(requests[i].prompt + answer) + _beside(requests, replicas, r, i) > replicas[r].blocks:
        return False
    _enqueue(requests, replicas, lists, r, i, False)
    if replicas[r].ends == math.inf:
        _plan_step(requests, replicas, lists, tables, cache, clock, r, now, limit)
    elif (
        replicas[r].look > 1
        or replicas[r].balance > 0
        or (
            replicas[r].decoding + replicas[r].prefilling + replicas[r].coming < replicas[r].seqs
            and lists.head[r, _first_level(lists, r)] == i
        )
    ):
        _interrupt(requests, replicas, lists, tables, r, now)
    return True


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def _land(
    requests: Any,
    replicas: Any,
    lists: Lists,
    tables: StepTables,
    cache: Cache,
    clock: EventQueue,
    i: int,
    now: float,
    limit: int,
) -> None:
    """The cache of request i is with the replica that fetched it, which decodes it from its next step on."""
    let_go(requests, replicas, lists, tables, cache, clock, i, now, limit)
    r = requests[i].whither
    requests[i].state = WAITING
    requests[i].following = replicas[r].landed
    replicas[r].landed = i
    if replicas[r].ends == math.inf:
        _plan_step(requests, replicas, lists, tables, cache, clock, r, now, limit)
    else:
        _interrupt(requests, replicas, lists, tables, r, now)


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def let_go(
    requests: Any,
    replicas: Any,
    lists: Lists,
    tables: StepTables,
    cache: Cache,
    clock: EventQueue,
    i: int,
    now: float,
    limit: int,
) -> None:
    """The replica that computed the prompt of request i drops its cache, and goes on if it waited for room."""
    r = requests[i].where
    _release(requests, replicas, lists, cache, r, i, requests[i].prompt)
    if replicas[r].ends == math.inf and replicas[r].waiting > 0:
        _plan_step(requests, replicas, lists, tables, cache, clock, r, now, limit)


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def forget_fetched(
    requests: Any,
    replicas: Any,
    lists: Lists,
    tables: StepTables,
    cache: Cache,
    clock: EventQueue,
    i: int,
    now: float,
    limit: int,
) -> None:
    """The cache of request i will not come: the room that waits for it is free again, and others may have it."""
    r = requests[i].whither
    replicas[r].coming -= 1
    _release(requests, replicas, lists, cache, r, i, requests[i].prompt)
    per_block = replicas[r].chain_tokens // BLOCK
    ids = _chain_blocks(requests, replicas, r, i) // per_block if per_block else 0
    for at in range(requests[i].chain, requests[i].chain + ids):
        block = lists.chain[at]
        # Which prefixes were there before it is not known any more, so all that nobody uses count as lost.
        if cache.blocks[r, block].resident and cache.blocks[r, block].users == 0:
            cache.blocks[r, block].resident = False
            replicas[r].evictable -= 1
            replicas[r].free += per_block
    if replicas[r].waiting > 0:
        if replicas[r].ends == math.inf:
            _plan_step(requests, replicas, lists, tables, cache, clock, r, now, limit)
        else:
            _interrupt(requests, replicas, lists, tables, r, now)


@compiled
def _random_word(words: Any) -> int:
    """The next 32 bits (MT19937: Matsumoto and Nishimura, ACM TOMACS 1998), as CPython draws them."""
    at = words[MT_WORDS]
    if at >= MT_WORDS:
        for k in range(MT_WORDS):
            mixed = (words[k] & 0x80000000) | (words[(k + 1) % MT_WORDS] & 0x7FFFFFFF)
            words[k] = words[(k + MT_MIDDLE) % MT_WORDS] ^ (mixed >> 1) ^ ((mixed & 1) * 0x9908B0DF)
        at = 0
    words[MT_WORDS] = at + 1
    word = words[at]
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return int(word ^ (word >> 18))


@compiled
def _random_share(words: Any) -> float:
    """In [0, 1): ``random.Random.random``."""
    high, low = _random_word(words) >> 5, _random_word(words) >> 6
    return (high * 67108864.0 + low) * (1.0 / 9007199254740992.0)


@compiled
def _random_below(words: Any, count: int) -> int:
    """``random.Random.choice`` of so many, by number."""
    bits = 0
    while count >> bits:
        bits += 1
    drawn = count
    while drawn >= count:
        drawn = _random_word(words) >> (32 - bits)
    return drawn


@compiled
def _routed(requests: Any, replicas: Any, routing: RoutingState, i: int) -> int:
    """The replica that the policy gives request i; NOWHERE where there is none, or another one chooses."""
    if routing.by[0] == BY_CALLER:
        return NOWHERE
    candidates, loads, shares, g = routing.candidates, routing.loads, routing.shares, routing.group[i]
    count, total, level = 0, 0.0, True
    for r in range(replicas.shape[0]):
        replica = replicas[r]
        late = replica.role == DECODE
        here = replica.ready and replica.model == routing.model[i] and late == (requests[i].handed != 0)
        if here and routing.allowed[g, r]:
            candidates[count], shares[count] = r, routing.weights[g, r]
            total += shares[count]
            level = level and shares[count] == shares[0]
            loads[count] = total  # which all but LEAST_LOADED want
            count += 1
    if count == 0:
        return NOWHERE
    if total == 0.0:  # the plan sends the group to none of these: the one weight counts
        level = True
        for k in range(count):
            shares[k] = replicas[candidates[k]].weight
            total += shares[k]
            level = level and shares[k] == shares[0]
            loads[k] = total
    chosen = 0
    if routing.by[0] == LEAST_LOADED:
        least, equals = math.inf, 0
        for k in range(count):
            replica = replicas[candidates[k]]
            inside = replica.decoding + replica.prefilling + replica.waiting + replica.coming
            loads[k] = (inside + 1.0) / replica.weight
            equals = equals + 1 if loads[k] == least else equals
            if loads[k] < least:
                least, equals, chosen = loads[k], 1, k
        if equals > 1:
            left = _random_below(routing.words, equals)
            while left > 0:
                chosen += 1
                left -= loads[chosen] == least
    elif routing.by[0] == WEIGHTED:
        most = -math.inf
        for k in range(count):
            part = routing.part[g, candidates[k]]
            routing.credit[part, candidates[k]] += shares[k]
            if shares[k] > 0.0 and routing.credit[part, candidates[k]] > most:
                most, chosen = routing.credit[part, candidates[k]], k
        routing.credit[routing.part[g, candidates[chosen]], candidates[chosen]] -= total
    else:
        if routing.by[0] == RANDOM:
            share = _random_share(routing.words)
        else:
            share = routing.turn[0] * GOLDEN % 1.0
            routing.turn[0] += 1
        if routing.by[0] == ROUND_ROBIN and level:
            chosen = (routing.turn[0] - 1) % count
        else:
            while chosen < count - 1 and loads[chosen] <= share * total:
                chosen += 1
    return int(candidates[chosen])


@compiled
def _earliest(replicas: Any) -> int:
    best = 0
    for r in range(1, replicas.shape[0]):
        if replicas[r].ends < replicas[best].ends:
            best = r
    return best


# Wide: the loop's state is a handful of arrays, and compiled code passes each by itself.
@compiled
def advance(
    requests: Any,
    replicas: Any,
    lists: Lists,
    tables: StepTables,
    cache: Cache,
    clock: EventQueue,
    routing: RoutingState,
    until: float,
    limit: int,
) -> int:
    """Plays events up to and including `until`; `limit` bounds the decode steps of one event (1: no fast-forward).

    Returns DONE, ROUTE (give ``clock.request`` a replica and call again) or UNTIL.
    """
    while True:
        r = _earliest(replicas)
        step_end = replicas[r].ends
        arrival = math.inf
        if clock.at[0].arrived < clock.at[0].opened:
            arrival = requests[clock.at[0].arrived].arrival
        queued = clock.heap[0].time if clock.at[0].queued > 0 else math.inf
        now = min(step_end, arrival, queued)
        if now == math.inf:
            return DONE
        if now > until:
            return UNTIL
        clock.at[0].now = max(clock.at[0].now, now)
        if step_end < arrival and step_end < queued:
            _end_step(requests, replicas, lists, tables, cache, clock, r)
            _plan_step(requests, replicas, lists, tables, cache, clock, r, now, limit)
            continue
        from_heap = queued < arrival
        i = clock.heap[0].request if from_heap else clock.at[0].arrived
        if requests[i].handed == COMING:
            _pop(clock)
            _land(requests, replicas, lists, tables, cache, clock, i, clock.at[0].now, limit)
            continue
        target = requests[i].whither if requests[i].handed else requests[i].where
        if target == NOWHERE:
            target = _routed(requests, replicas, routing, i)
            if target == NOWHERE:
                clock.at[0].request = i
                return ROUTE
            if requests[i].handed:
                requests[i].whither = target
            else:
                requests[i].where = target
        if from_heap:
            _pop(clock)
        else:
            clock.at[0].arrived += 1
        if target == PARKED:
            if requests[i].state != REFUSED:
                requests[i].state = FLYING
            continue
        if not _arrive(requests, replicas, lists, tables, cache, clock, i, target, clock.at[0].now, limit):
            if requests[i].handed == KEPT:
                let_go(requests, replicas, lists, tables, cache, clock, i, clock.at[0].now, limit)
            leave(requests, replicas, clock, i, REFUSED, clock.at[0].now)


@compiled
def clear(requests: Any, replicas: Any, lists: Lists, cache: Cache, r: int) -> Any:
    """Empties replica r, which is gone: the requests that it held, in no order of merit; its accounts stay."""
    held = np.empty(replicas[r].decoding + replicas[r].prefilling + replicas[r].waiting, dtype=np.int64)
    size = 0
    for at in range(replicas[r].decoding):
        held[size] = lists.run[r, at]
        requests[held[size]].generated = max(
            1, replicas[r].step + requests[held[size]].offset - requests[held[size]].prompt
        )
        size += 1
    for at in range(replicas[r].prefilling):
        held[size] = lists.fill[r, at]
        size += 1
    for level in range(lists.head.shape[1]):
        i = lists.head[r, level]
        while i >= 0:
            held[size] = i
            size += 1
            i = requests[i].following
        lists.head[r, level] = lists.tail[r, level] = -1
    replicas[r].decoding = replicas[r].prefilling = replicas[r].waiting = 0
    replicas[r].context = replicas[r].evictable = replicas[r].count = 0
    lists.phase[r, :] = 0
    replicas[r].soonest = NEVER
    replicas[r].free = replicas[r].blocks
    replicas[r].owed = replicas[r].unlooked = replicas[r].coming = 0
    replicas[r].landed = -1
    replicas[r].ends = math.inf
    for block in range(cache.blocks.shape[1]):
        cache.blocks[r, block].resident = False
        cache.blocks[r, block].users = 0
        cache.blocks[r, block].shelved = False
    cache.shelf_ends[r].head = cache.shelf_ends[r].tail
    return held
