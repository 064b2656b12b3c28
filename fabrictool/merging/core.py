"""Events in, steps out: which replicas compute together next, and for whom.

Source: Flying Serving, sections 4 and 5. What always holds: a replica is in one step at a time; groups form and split
between steps only; a request's layout is fixed while it has blocks, and another one means that its prefix is computed
again; tokens that were sent stay with it; blocks are neither lost nor given twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fabrictool.merging.groups import ReplicaGroup, groups
from fabrictool.merging.requests import MergedStep, MergingOptions, MergingRequest, Split, Transition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fabrictool.merging.groups import BlockPool
    from fabrictool.merging.triggers import LoadTrigger


ROOMY = 0.75
"""Of a group's places, with how many requests it may form because there is little to do."""


@dataclass(slots=True)
class _Merged:
    """A group of several that has formed or shall."""

    group: ReplicaGroup
    transition: Transition
    for_load: bool = False
    """There was little to do; neither a request's length nor its priority asked for it."""
    pending: list[MergingRequest] = field(default_factory=list)
    """Until it has formed."""
    formed: bool = False
    ready_at: float = 0.0
    formed_at: float = 0.0
    splitting: bool = False
    """It takes no further requests, and its members do."""
    yields: bool = False
    """Its members' own requests have turns."""
    steps: dict[int, int] = field(default_factory=dict)
    """Member → steps of its own since the group's last one."""


@dataclass(slots=True)
class MergingCounts:
    """Since the start, for status documents and comparisons."""

    formed: int = 0
    recomputed: int = 0
    """Tokens that were computed again."""
    paused: int = 0
    evicted: int = 0


class MergingReplicas:
    """Replicas of one model, side by side on one node."""

    def __init__(
        self, replicas: int, pool: BlockPool, options: MergingOptions | None = None, trigger: LoadTrigger | None = None
    ) -> None:
        """`trigger`: merges all by load; without it only priority and length do."""
        self.replicas = replicas
        self.pool = pool
        self.options = options or MergingOptions()
        self.trigger = trigger
        self.waiting: list[MergingRequest] = []
        self.counts = MergingCounts()
        self.free = [pool.blocks] * replicas
        self.closed: set[int] = set()
        """Replicas that are gone."""
        self.given_up: list[MergingRequest] = []
        """Requests that have outgrown what is left; whoever drives takes them out."""
        self._busy: dict[int, MergedStep] = {}
        """Member → the step under way."""
        self._lists: dict[ReplicaGroup, list[MergingRequest]] = {group: [] for group in groups(replicas)}
        self._merged: list[_Merged] = []
        fixed = self.options.fixed or 1
        if fixed > 1:
            self._merged = [
                _Merged(group, Transition.SEQUENTIAL, formed=True) for group in self._lists if group.degree == fixed
            ]

    def arrive(self, request: MergingRequest, now: float) -> int | None:
        """A request comes. Not None: it is refused, for it is longer than so many tokens, which is what fits."""
        longest = self.pool.longest(self.widest)
        if request.prompt + request.most > longest:
            return longest
        if self.trigger is not None:
            self.trigger.arrived(now)
        self.waiting.append(request)
        return None

    def next_steps(self, now: float) -> list[MergedStep]:
        """Those that can begin. Until they are reported by `ended`, their replicas are busy."""
        if self.trigger is not None and not self.trigger.decide(now, len(self.waiting), self.in_flight):
            self._split()
        while True:
            evicted = self.counts.evicted
            self._regroup(now)
            steps = [step for merged in self._merged if (step := self._merged_step(merged, now))]
            steps += [step for replica in range(self.replicas) if (step := self._single_step(replica, now))]
            if steps or self._busy or self.counts.evicted == evicted:
                return steps

    def _regroup(self, now: float) -> None:
        """Until groups are what they should be: one that splits makes room for what waits."""
        for merged in self._merged:
            pauses = merged.formed and merged.transition is Transition.HARD and not merged.yields
            if pauses and now - merged.formed_at > self.options.pause_s:
                self._end_pause(merged)
        while True:
            self._assign()
            for merged in self._merged:
                if not merged.formed:
                    self._begin_meanwhile(merged)
                    if self._is_clear(merged):
                        self._form(merged, now)
            over = [merged for merged in self._merged if self._is_over(merged)]
            if not over:
                return
            self._merged = [merged for merged in self._merged if merged not in over]

    def ended(self, step: MergedStep, is_answered: Callable[[MergingRequest], bool]) -> list[MergingRequest]:
        """A step is over; the requests that have one token more. Those that are answered, or given up, leave."""
        for member in step.group.members:
            del self._busy[member]
        emitted = []
        for request, tokens in step.parts:
            request.cached += tokens
            if not request.left:
                request.emitted += 1
                emitted.append(request)
            if is_answered(request):
                self._lists[step.group].remove(request)
                self._release(request)
                self._leave_queues(request)  # a group may have been about to form for it
        return emitted

    def cancel(self, request: MergingRequest) -> bool:
        """Gives a request up. False: a step with it is under way; let `ended` see it as answered."""
        if self._is_computed(request):
            return False
        self._leave_queues(request)
        if request.group is not None:
            self._lists[request.group].remove(request)
            self._release(request)
        return True

    def _leave_queues(self, request: MergingRequest) -> None:
        for queue in (self.waiting, *(merged.pending for merged in self._merged)):
            if request in queue:
                queue.remove(request)

    def failed(self, step: MergedStep) -> None:
        """A step came to nothing, because a member is gone: `lost` says which."""
        for member in step.group.members:
            del self._busy[member]

    def lost(self, replica: int) -> None:
        """A replica is gone, and so is what its groups had cached; none of their steps may be under way. Their
        requests are computed again by others. Those that what is left cannot hold are given up by and by.
        """
        self.closed.add(replica)
        for merged in [merged for merged in self._merged if replica in merged.group.members]:
            self._merged.remove(merged)
            self.waiting += [request for request in merged.pending if request.group is None]
        for group, mine in self._lists.items():
            if replica in group.members:
                for request in list(mine):
                    mine.remove(request)
                    self._start_anew(request)

    def _is_open(self, group: ReplicaGroup) -> bool:
        return self.closed.isdisjoint(group.members)

    @property
    def widest(self) -> int:
        """The largest degree that can form; 0 without a replica."""
        fixed = self.options.fixed
        can = [group.degree for group in self._lists if self._is_open(group) and fixed in (None, group.degree)]
        return max(can, default=0)

    @property
    def in_flight(self) -> int:
        """Requests that have blocks."""
        return sum(map(len, self._lists.values()))

    @property
    def formed(self) -> list[ReplicaGroup]:
        """Groups of several, as they are now."""
        return [merged.group for merged in self._merged if merged.formed]

    def _end_pause(self, merged: _Merged) -> None:
        """Members' requests that have paused for long: other replicas begin them anew; without such they have turns."""
        bound = {member for other in self._merged for member in other.group.members}
        paused = [r for member in merged.group.members for r in self._lists[ReplicaGroup(member, 1)]]
        if bound | self.closed == set(range(self.replicas)):
            merged.yields = bool(paused)
            return
        for request in paused:
            self._lists[request.group or merged.group].remove(request)
            self._start_anew(request)

    def _split(self) -> None:
        """Groups that formed because there was little to do. What members have begun by themselves they finish."""
        for merged in [merged for merged in self._merged if merged.for_load]:
            if not merged.formed:
                self.waiting += [request for request in merged.pending if request.group is None]
                self._merged.remove(merged)
                continue
            merged.splitting = True
            merged.yields |= self.options.split is Split.FINISH
            mine = self._lists[merged.group]
            for request in [r for r in mine if self._is_cheaper_anew(r) and not self._is_computed(r)]:
                mine.remove(request)
                self._start_anew(request)
            merged.yields |= any(self._least(request) > 1 for request in mine)  # who needs the group stays in it

    def _is_cheaper_anew(self, request: MergingRequest) -> bool:
        options = self.options
        if self._least(request) > 1 or options.split is Split.FINISH:
            return False
        again = (request.prompt + request.emitted) / options.prefill_rate
        ahead = (request.most - request.emitted) / options.decode_rate
        return options.split is Split.RECOMPUTE or again < ahead / 2.0

    def _least(self, request: MergingRequest) -> int:
        """Replicas that hold it as it is now; when it has outgrown them, more are asked for."""
        return self.pool.degree(request.context, self.replicas) or self.replicas

    def _degree(self, request: MergingRequest) -> int:
        """Replicas that shall work on it: by length, by priority, and by load."""
        if self.options.fixed:
            return self.options.fixed
        widest, degree = self.widest, self._least(request)
        if not request.priority:
            degree = max(degree, min(widest, self.options.priority_degree))
        merges = self.trigger is not None and self.trigger.merged and not any(m.splitting for m in self._merged)
        return max(degree, widest) if merges else degree

    def _assign(self) -> None:
        longest = self.pool.longest(self.widest)
        too_long = [request for request in self.waiting if request.context > longest]
        self.waiting = [request for request in self.waiting if request not in too_long]
        self.given_up += too_long
        full: set[int] = set()
        for request in sorted(self.waiting, key=_age):
            degree = self._degree(request)
            if degree in full:
                continue
            taken = self._assign_alone(request) if degree == 1 else self._assign_merged(request, degree)
            if taken:
                self.waiting.remove(request)
            else:
                full.add(degree)

    def _assign_alone(self, request: MergingRequest) -> bool:
        """To the replica with the fewest requests."""
        splitting = {member for merged in self._merged if merged.splitting for member in merged.group.members}
        bound = {member for merged in self._merged for member in merged.group.members} - splitting
        open_ones = [ReplicaGroup(i, 1) for i in range(self.replicas) if i not in bound | self.closed]
        if not open_ones:  # better in a group that somebody needs than in no replica at all
            open_ones = [m.group for m in self._merged if m.formed and not m.splitting and self._is_needed(m)]
        return self._place(request, open_ones)

    def _is_needed(self, merged: _Merged) -> bool:
        """Whether a request in the group asked for it by its length or its priority."""
        return any(not request.priority or self._least(request) > 1 for request in self._lists[merged.group])

    def _place(self, request: MergingRequest, candidates: list[ReplicaGroup]) -> bool:
        for group in sorted(candidates, key=lambda group: (len(self._lists[group]), group)):
            need = self.pool.needed(request.context, group.degree)
            if len(self._lists[group]) < self.options.places and all(self.free[m] >= need for m in group.members):
                self._take(request, group, need)
                return True
        return False

    def _take(self, request: MergingRequest, group: ReplicaGroup, need: int) -> None:
        for member in group.members:
            self.free[member] -= need
        request.group, request.blocks = group, need
        self._lists[group].append(request)

    def _release(self, request: MergingRequest) -> None:
        """Its blocks; what they held is lost."""
        for member in request.group.members if request.group else ():
            self.free[member] += request.blocks
        request.group, request.blocks, request.cached = None, 0, 0
        request.layouts += 1

    def _start_anew(self, request: MergingRequest) -> None:
        self.counts.recomputed += request.cached
        self._release(request)
        if not any(request in merged.pending for merged in self._merged):
            self.waiting.append(request)

    def _assign_merged(self, request: MergingRequest, degree: int) -> bool:
        there = [merged for merged in self._merged if merged.group.degree >= degree and not merged.splitting]
        for merged in sorted(there, key=lambda merged: len(self._lists[merged.group]) + len(merged.pending)):
            if not merged.formed:
                self._wait_for(merged, request)
                return True
            if self._place_merged(request, merged):
                return True
        if there or self.options.fixed:
            return False
        return self._begin_merging(request, degree)

    def _place_merged(self, request: MergingRequest, merged: _Merged) -> bool:
        need = self.pool.needed(request.context, merged.group.degree)
        if len(self._lists[merged.group]) >= self.options.places:
            return False
        paused = [r for m in merged.group.members for r in self._lists[ReplicaGroup(m, 1)]]
        paused.sort(key=lambda r: (-r.priority, -r.began))
        while merged.transition is Transition.HARD and any(self.free[m] < need for m in merged.group.members):
            if not paused:
                break
            evicted = paused.pop(0)
            if evicted.group is None or self._is_computed(evicted):
                continue
            self.counts.evicted += 1
            self._lists[evicted.group].remove(evicted)
            self._start_anew(evicted)
        return self._place(request, [merged.group])

    def _is_computed(self, request: MergingRequest) -> bool:
        """Whether a step with it is under way."""
        step = self._busy.get(request.group.first) if request.group else None
        return step is not None and step.group == request.group and any(r is request for r, _ in step.parts)

    def _is_busy(self, group: ReplicaGroup) -> bool:
        """Whether a step of any of its members is under way."""
        return any(member in self._busy for member in group.members)

    def _begin_merging(self, request: MergingRequest, degree: int) -> bool:
        """Of the group whose members have the fewest requests; none of them may be bound already."""
        bound = {member for merged in self._merged for member in merged.group.members}
        free = [g for g in self._lists if g.degree == degree and self._is_open(g) and bound.isdisjoint(g.members)]
        if not free:
            return False
        group = min(free, key=lambda g: (sum(len(self._lists[ReplicaGroup(m, 1)]) for m in g.members), g))
        options = self.options
        transition = options.load_transition if request.priority else options.priority_transition
        unasked = request.priority > 0 and self._least(request) < degree
        merged = _Merged(group, transition, for_load=unasked)
        self._merged.append(merged)
        self._wait_for(merged, request)
        return True

    def _wait_for(self, merged: _Merged, request: MergingRequest) -> None:
        """Until the group forms; by a soft transition a member that is idle begins it meanwhile."""
        merged.pending.append(request)
        if not request.priority:
            merged.transition = self.options.priority_transition

    def _begin_meanwhile(self, merged: _Merged) -> None:
        if merged.transition is not Transition.SOFT:
            return
        pending = set(merged.pending)
        for request in merged.pending:
            if request.group is None and request.context <= self.pool.longest(1):
                alone = [ReplicaGroup(m, 1) for m in merged.group.members]
                self._place(request, [g for g in alone if pending.issuperset(self._lists[g])])

    def _is_clear(self, merged: _Merged) -> bool:
        """Whether the group can form: its members are between steps, and what must be finished is."""
        return not self._is_busy(merged.group) and self._holds_back(merged)

    def _holds_back(self, merged: _Merged) -> bool:
        """Whether the members of a group that shall form begin no further step: nothing has to be finished first."""
        if merged.transition is Transition.HARD:
            return True
        if merged.for_load and merged.transition is Transition.SOFT and self._is_crowded(merged):
            return False  # it would split at once
        stragglers = {r for m in merged.group.members for r in self._lists[ReplicaGroup(m, 1)]}
        return stragglers <= set(merged.pending)

    def _is_crowded(self, merged: _Merged) -> bool:
        """Whether more wait for a group than should, all of which members can serve by themselves."""
        alone = all(self._least(request) == 1 for request in merged.pending)
        return alone and len(merged.pending) > max(1.0, ROOMY * self.options.places)

    def _form(self, merged: _Merged, now: float) -> None:
        merged.formed, merged.formed_at, merged.ready_at = True, now, now + self.options.switch_s
        self.counts.formed += 1
        for request in merged.pending:
            if request.group is not None:
                self._lists[request.group].remove(request)
                self.counts.recomputed += request.cached
                self._release(request)
            if not self._place_merged(request, merged):
                self.waiting.append(request)
        merged.pending.clear()
        self.counts.paused += sum(len(self._lists[ReplicaGroup(m, 1)]) for m in merged.group.members)

    def _merged_step(self, merged: _Merged, now: float) -> MergedStep | None:
        mine = self._lists[merged.group]
        if not merged.formed or not mine or self._is_busy(merged.group):
            return None
        if merged.yields and any(self._has_turn(merged, member) for member in merged.group.members):
            return None
        merged.steps.clear()
        return self._step(merged.group, max(now, merged.ready_at))

    def _has_turn(self, merged: _Merged, member: int) -> bool:
        """Of a group that yields: whether a member's own steps come first."""
        return bool(self._lists[ReplicaGroup(member, 1)]) and merged.steps.get(member, 0) < self.options.turns

    def _is_over(self, merged: _Merged) -> bool:
        """Whether a group splits: nobody is left in it, or shall come."""
        if not merged.formed:
            return not merged.pending
        if self.options.fixed or self._lists[merged.group]:
            return False
        if merged.splitting:
            return True
        if self._is_busy(merged.group):
            return False
        stays = merged.for_load and self.trigger is not None and self.trigger.merged
        paused = any(self._lists[ReplicaGroup(m, 1)] for m in merged.group.members)
        return paused or not stays

    def _single_step(self, replica: int, now: float) -> MergedStep | None:
        alone = ReplicaGroup(replica, 1)
        if replica in self._busy or not self._lists[alone]:
            return None
        for merged in self._merged:
            if replica not in merged.group.members:
                continue
            if merged.yields:
                if self._lists[merged.group] and not self._has_turn(merged, replica):
                    return None
                merged.steps[replica] = merged.steps.get(replica, 0) + 1
            elif merged.formed or self._holds_back(merged):
                return None
        return self._step(alone, now)

    def _step(self, group: ReplicaGroup, begins: float) -> MergedStep | None:
        """None: who was left has outgrown the group, and is begun anew by a larger one."""
        parts = tuple(self._parts(group))
        if not parts:
            return None
        step = MergedStep(group, parts, begins)
        self._busy.update(dict.fromkeys(group.members, step))
        return step

    def _parts(self, group: ReplicaGroup) -> Iterator[tuple[MergingRequest, int]]:
        """A token for all that decode, and of prefixes as much as the budget leaves."""
        left = self.options.budget
        mine = sorted(self._lists[group], key=_age)  # who gives up blocks is younger, and not in the step yet
        for request in mine:
            if request.left == 1 and left and self._has_blocks(request, group):
                left -= 1
                yield request, 1
        for request in mine:
            if request.left > 1 and request.group == group and left:
                tokens = min(request.left, left)
                left -= tokens
                yield request, tokens

    def _has_blocks(self, request: MergingRequest, group: ReplicaGroup) -> bool:
        """For its next token; if there are none, the youngest of those that its members hold begins anew."""
        while request.group == group:
            more = self.pool.needed(request.context, group.degree) - request.blocks
            if more <= 0:
                return True
            if all(self.free[member] >= more for member in group.members):
                for member in group.members:
                    self.free[member] -= more
                request.blocks += more
                return True
            held = [r for other, rs in self._lists.items() if not _are_apart(other, group) for r in rs]
            idle = [r for r in held if not self._is_computed(r)]
            youngest = max(idle, key=_age)
            self.counts.evicted += 1
            self._lists[youngest.group or group].remove(youngest)
            self._start_anew(youngest)
        return False


def _age(request: MergingRequest) -> tuple[int, float, int]:
    """The urgent and the old first."""
    return request.priority, request.began, request.id


def _are_apart(group: ReplicaGroup, other: ReplicaGroup) -> bool:
    """Whether two have no member in common."""
    return set(group.members).isdisjoint(other.members)
