"""The serving engine once more, as plain objects that step one by one: slow, obvious, and the kernel's judge."""

import math
from dataclasses import dataclass, field

BLOCK = 16


@dataclass
class Job:
    index: int
    arrival: float
    prompt: int
    output: int
    priority: int = 0
    generated: int = 0
    prefilled: int = 0
    first: float = math.nan
    finish: float = math.nan
    preempted: int = 0
    admitted: int = 0
    reserved: int = 0

    @property
    def length(self):
        """Tokens that the next step of this job has in the cache, its own included."""
        return self.prompt + self.generated


@dataclass
class Engine:
    """One replica, continuous batching with chunked prefill, recompute on preemption, no prefix cache."""

    spec: object
    waiting: list = field(default_factory=list)
    running: list = field(default_factory=list)
    filling: list = field(default_factory=list)
    free: int = 0
    sequence: int = 0
    unlooked: int = 0
    looked: float = 0.0
    done: int = 0
    since: int | None = None
    ahead: float = 0.0

    def __post_init__(self):
        self.free = self.spec.kv_tokens // BLOCK

    def play(self, jobs):
        """All jobs to their end; arrivals ascending."""
        now, todo = 0.0, list(jobs)
        while todo or self.waiting or self.running or self.filling:
            while todo and todo[0].arrival <= now:
                self.enqueue(todo.pop(0))
            length = self.step(now)
            if length is None:
                now = todo[0].arrival
                continue
            end = now + length
            # What arrives while a step runs waits for the next one.
            while todo and todo[0].arrival <= end:
                self.enqueue(todo.pop(0))
            self.book(end)
            now = end

    def enqueue(self, job):
        at = next((i for i, other in enumerate(self.waiting) if other.priority > job.priority), len(self.waiting))
        self.waiting.insert(at, job)

    @property
    def whole(self):
        return self.spec.whole_prompts or self.spec.spared > 0

    def held(self, tokens):
        return -(-tokens // BLOCK)

    def beside(self, job):
        """Blocks for its windows and states, as long as it is in the batch."""
        return math.ceil(self.spec.beside.tokens(min(job.prompt + job.output, self.spec.times.window)) / BLOCK)

    def unborn(self, job, held, most=math.inf):
        """Blocks that it takes beyond `held` tokens until its answer is there; the last token is never in the cache."""
        return self.held(job.prompt + min(job.output, job.generated + most) - 1) - self.held(held)

    def crowded(self, job, need):
        """Whether admitting it leaves too little for those that run, and for its own answer."""
        if not self.spec.spared or not (self.running or self.filling):
            return False
        owed = sum(self.unborn(other, other.length - 1) for other in self.running)
        owed += sum(self.unborn(other, other.length) for other in self.filling)
        return need + self.unborn(job, job.length, 4096) + self.spec.spared * owed > self.free

    def growth(self):
        return sum(self.held(job.length) - self.held(job.length - 1) for job in self.running)

    def preempt(self):
        while self.running and self.growth() > self.free:
            self.put_back(self.filling)

    def put_back(self, filling):
        """The last of those that run or, where prompts have blocks by the chunk, of those that fill; it waits again."""
        victim = max([*self.running, *([] if self.whole else filling)], key=lambda job: (job.priority, job.admitted))
        if victim in self.running:
            self.running.remove(victim)
            self.free += self.held(victim.length - 1) + self.beside(victim)
        else:
            self.filling.remove(victim)
            self.free += self.held(victim.reserved) + self.beside(victim)
        victim.preempted += 1
        victim.prefilled = 0
        at = next((i for i, other in enumerate(self.waiting) if other.priority >= victim.priority), len(self.waiting))
        self.waiting.insert(at, victim)

    def looks(self):
        """Whether those that came since the last look are considered."""
        if not self.running or self.filling:
            return True
        if not self.spec.balance_steps or self.spec.times.groups == 1:
            return self.unlooked == 0
        late = self.since is not None and self.done - self.since >= self.spec.balance_steps
        return late or len(self.waiting) >= self.spec.times.groups

    def admit(self, budget, now):
        """Takes waiting requests into the batch."""
        if self.looks():
            self.unlooked, self.looked, self.since = 0, now, None
        while self.waiting and budget > 0 and len(self.running) + len(self.filling) < self.spec.max_num_seqs:
            job = self.waiting[0]
            if job.arrival > self.looked:
                break
            need = self.held(job.length) + self.beside(job)
            if need > self.free - (0 if self.whole else self.growth()) or self.crowded(job, need):
                break
            self.waiting.pop(0)
            job.reserved = job.length if self.whole else min(job.length, budget)
            self.free -= self.held(job.reserved) + self.beside(job)
            self.sequence += 1
            job.admitted, job.prefilled = self.sequence, 0
            self.filling.append(job)
            self.chunks[job.index] = min(job.length, budget)
            budget -= self.chunks[job.index]
        self.preempt()
        if self.waiting and self.since is None:
            self.since = self.done

    def step(self, now):
        times = self.spec.times
        self.preempt()
        budget = self.spec.token_budget - (0 if self.spec.prefill_first else len(self.running) * times.queries)
        budget = self.deal(budget)
        self.admit(budget, now)
        if not self.running and not self.filling:
            return None
        return self.length()

    def deal(self, budget):
        """Tokens of the next step for the prompts that are being computed, and blocks for them; what is left."""
        self.chunks = {}
        for job in list(self.filling):
            if job not in self.filling:
                continue
            chunk = max(0, min(job.length - job.prefilled, budget))
            reserved = max(job.reserved, job.prefilled + chunk)
            more = self.held(reserved) - self.held(job.reserved)
            while job in self.filling and more and more + self.growth() > self.free:
                self.put_back(self.filling[self.filling.index(job) :])
            if job in self.filling:
                self.free -= more
                job.reserved = reserved
                self.chunks[job.index] = chunk
                budget -= chunk
        return budget

    def length(self):
        """Seconds of the next step."""
        spec, times = self.spec, self.spec.times
        decoding = len(self.running)
        read = sum(job.length for job in self.running)
        window = times.window
        read_window = sum(min(job.length, window) for job in self.running)
        self.stalled = spec.prefill_first and bool(self.filling)
        self.advance = 1
        if not self.filling:
            lanes = min(spec.lanes, decoding)
            return times.decode[decoding] + (read * times.read + read_window * times.read_window) / lanes
        tokens, sampled, pairs, pairs_window, chunks = 0, 0, 0.0, 0.0, 0
        for job in self.filling:
            chunk = self.chunks[job.index]
            if not chunk:
                continue
            chunks += 1
            tokens += chunk
            for at in range(job.prefilled, job.prefilled + chunk):
                pairs += at + 1
                pairs_window += min(at + 1, window)
            sampled += job.prefilled + chunk == job.length
        share = max(1, min(spec.lanes, chunks))
        length = -(-tokens // share)
        total = (pairs * times.pair + pairs_window * times.pair_window) / share
        if not spec.prefill_first:
            lanes = max(1, min(spec.lanes, decoding))
            computed = decoding * times.queries
            length += -(-computed // lanes)
            sampled += computed
            total += times.decoded * (read * times.read + read_window * times.read_window) / lanes
            total += times.draft[min(decoding, len(times.draft) - 1)]
            if self.running:
                self.ahead += times.decoded
                most = min(int(self.ahead + 1e-9), *(job.output - job.generated for job in self.running))
                while sum(self.held(j.length + most - 1) - self.held(j.length - 1) for j in self.running) > self.free:
                    most -= 1
                self.advance = most
                self.ahead = min(self.ahead - most, times.decoded)
        together = min(length * times.groups, tokens if spec.prefill_first else tokens + computed)
        tables = ((times.mixed, length), (times.shared, together), (times.sample, sampled))
        return total + sum(table[min(at, len(table) - 1)] for table, at in tables)

    def book(self, end):
        if self.running and not self.stalled:
            self.done += self.advance
            self.unlooked = (self.unlooked + self.advance) % self.spec.recv_interval
        if self.filling:
            self.unlooked = 0
        for _ in range(0 if self.stalled else self.advance):
            self.free -= self.growth()
            for job in list(self.running):
                job.generated += 1
                if job.generated >= job.output:
                    self.running.remove(job)
                    self.free += self.held(job.length - 1) + self.beside(job)
                    job.finish = end
        for job in list(self.filling):
            job.prefilled += self.chunks[job.index]
            if job.prefilled < job.length:
                continue
            self.filling.remove(job)
            if job.generated == 0:
                job.first = end
            length = job.length
            job.generated += 1
            if job.generated >= job.output:
                job.finish = end
                self.free += self.held(length) + self.beside(job)
            else:
                self.running.append(job)
