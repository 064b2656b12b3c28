"""How long the steps of an engine take, asked of it by its agent before anybody else may (LLM-Mesh, section 5.2).

Streams of a few tokens, with prompts of powers of two, and in batches of powers of two: to the first token it takes a
prompt's time, from then on a step's. The prompts are drawn at random, so that no engine has them in a cache. What was
measured is kept for the next start of the same engine with the same model on the same machine, and checked there by one
stream.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import aiohttp
import msgspec

from fabrictool import __version__
from fabrictool.base.kept import facts_key, keep, kept, processor
from fabrictool.domain.steps import SHORTEST, MeasuredSteps, microseconds
from fabrictool.sharing.quantified import LONG_S, SAMPLES, still_true
from fabrictool.status.documents import StepsStatus

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator
    from pathlib import Path

    from fabrictool.base.clock import Clock
    from fabrictool.domain.specs import AgentSpec

ANSWER_TOKENS = 16
"""Of each stream: enough steps to see one's length."""
_LEAST_TOKENS = 2
"""That an answer must have to tell a step's length."""
_UNKNOWN_CONTEXT = 512
"""What is measured up to where nobody says how much a request may hold."""
_TOKENS = (32, 224)
"""Of which prompts are made: every vocabulary has them."""
_FORMAT = 1


class Sample(msgspec.Struct, frozen=True):
    """Of streams that ran together."""

    first_s: float
    """To the first token of the last one to have one."""
    step_s: float
    """Between two tokens of a stream, from then on; on average."""
    took_s: float


class SampledEngine(Protocol):
    """Something that answers streams."""

    async def sample(self, batch: int, tokens: int) -> Sample | None:
        """`batch` streams at once with prompts of so many tokens; None: it does not answer such."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What came of it."""

    steps: MeasuredSteps | None
    """None: too little for anybody to go by."""
    took_s: float
    samples: int
    was_kept: bool = False
    """It was measured at an earlier start, and still holds."""

    def row(self) -> StepsStatus | None:
        if self.steps is None:
            return None
        return StepsStatus(
            prompts={str(tokens): seconds for tokens, seconds in self.steps.of_prompts()},
            batches={str(requests): seconds for requests, seconds in self.steps.of_batches()},
            took_s=self.took_s,
            was_kept=self.was_kept,
        )

    def words(self) -> str:
        """As an event says it."""
        if self.steps is None:
            return f"nothing that routing could go by, after {self.samples} samples in {self.took_s:.1f} s"
        prompts, batches = list(self.steps.of_prompts()), list(self.steps.of_batches())
        how = "as measured at an earlier start" if self.was_kept else "measured"
        (first, first_s), (last, last_s) = prompts[0], prompts[-1]
        (_, one_s), (many, many_s) = batches[0], batches[-1]
        return (
            f"{how}, {self.samples} samples in {self.took_s:.1f} s: a prompt of {first} tokens takes "
            f"{1000 * first_s:.0f} ms and one of {last} {1000 * last_s:.0f} ms, a token {1000 * one_s:.1f} ms alone "
            f"and {1000 * many_s:.1f} ms for {many} requests"
        )


class Quantifier:
    """Measures one endpoint within so many seconds, or finds what was measured before."""

    def __init__(self, endpoint: SampledEngine, clock: Clock, budget_s: float, place: Path | None) -> None:
        """`place`: the file in which it is kept."""
        self._endpoint, self._clock, self._budget_s, self._place = endpoint, clock, budget_s, place
        self._began = clock.monotonic()
        self._samples = 0

    async def run(self, context: int, places: int) -> Measurement:
        """Of prompts up to `context` tokens and batches up to `places` requests; never longer than the budget."""
        self._began = self._clock.monotonic()
        before = await asyncio.to_thread(kept, self._place, MeasuredSteps)
        prompts: list[float] = []
        batches: list[float] = []
        try:
            async with asyncio.timeout(self._budget_s):
                if before is not None and await self._still_true(before):
                    return self._measurement(before, was_kept=True)
                await self._measure(context, places, prompts, batches)
        except (TimeoutError, aiohttp.ClientError, OSError):
            pass  # what was measured until then is known
        if len(prompts) < 2 or not batches:
            return self._measurement(None)
        steps = MeasuredSteps(tuple(map(microseconds, prompts)), tuple(map(microseconds, batches)))
        await asyncio.to_thread(keep, self._place, steps)
        return self._measurement(steps)

    # -- internals --------------------------------------------------------------------------------------------

    async def _still_true(self, before: MeasuredSteps) -> bool:
        sample = await self._least(1, SHORTEST)
        if sample is None:
            return False
        (_, first_s), (_, step_s) = next(before.of_prompts()), next(before.of_batches())
        return still_true(((sample.first_s, first_s), (sample.step_s, step_s)))

    async def _measure(self, context: int, places: int, prompts: list[float], batches: list[float]) -> None:
        """Alternately a longer prompt and a larger batch, so that both are known when time is up."""
        lengths = list(_doubling(SHORTEST, (context or _UNKNOWN_CONTEXT) - ANSWER_TOKENS))
        middling = lengths[len(lengths) // 2] if lengths else SHORTEST
        sizes = _doubling(1, places)
        await self._least(1, SHORTEST)  # whatever an engine does at its first request it does once
        for length, size in itertools.zip_longest(lengths, sizes):
            alone = None if length is None else await self._least(1, length)
            if length is not None and alone is None:
                return  # it does not take as much
            if alone is not None:
                prompts.append(alone.first_s)
            together = None if size is None else await self._least(size, middling)
            if size is not None and together is None:  # its context is smaller than was said
                middling = SHORTEST
                together = await self._least(size, middling)
            if together is not None:
                batches.append(together.step_s)

    async def _least(self, batch: int, tokens: int) -> Sample | None:
        best: Sample | None = None
        for _ in range(SAMPLES):
            sample = await self._endpoint.sample(batch, tokens)
            if sample is None:
                return None
            self._samples += 1
            if best is None:
                best = sample
            best = Sample(min(best.first_s, sample.first_s), min(best.step_s, sample.step_s), sample.took_s)
            if sample.took_s >= LONG_S:
                break
        return best

    def _measurement(self, steps: MeasuredSteps | None, *, was_kept: bool = False) -> Measurement:
        return Measurement(steps, self._clock.monotonic() - self._began, self._samples, was_kept)


class EngineEndpoint:
    """An engine's ``/v1/completions``, at the address that only its agent knows."""

    def __init__(self, http: aiohttp.ClientSession, url: str, model: str, clock: Clock, rng: random.Random) -> None:
        self._http, self._url, self._model, self._clock, self._rng = http, url, model, clock, rng

    async def sample(self, batch: int, tokens: int) -> Sample | None:
        began = self._clock.monotonic()
        streams = await asyncio.gather(*(self._stream(tokens) for _ in range(batch)))
        took_s = self._clock.monotonic() - began
        heard = [stream for stream in streams if stream is not None and len(stream) >= _LEAST_TOKENS]
        if len(heard) < batch:
            return None
        first = max(stream[0] for stream in heard)
        paces = [_pace([at for at in stream if at >= first]) for stream in heard]
        known = [pace for pace in paces if pace is not None] or [_pace(stream) or 0.0 for stream in heard]
        return Sample(first - began, sum(known) / len(known), took_s)

    async def _stream(self, tokens: int) -> list[float] | None:
        """When its tokens came; None: it was refused."""
        body = {
            "model": self._model,
            "prompt": [self._rng.randrange(*_TOKENS) for _ in range(tokens)],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with self._http.post(f"{self._url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                return None
            return [
                self._clock.monotonic()
                async for line in answer.content
                if line.startswith(b"data:") and b'"choices"' in line
            ]


async def version_of(http: aiohttp.ClientSession, url: str) -> str:
    """What an engine says of its release at `url`; "" where it does not."""
    try:
        async with http.get(url) as answer:
            return str((await answer.json())["version"])
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
        return ""


def steps_file(cache: Path, spec: AgentSpec, version: str) -> Path:
    """Where the figures are kept of such an engine, of that release, on this machine."""
    facts = (
        _FORMAT, __version__, spec.engine, version, spec.source, spec.precision, str(spec.kv_precision), spec.context,
        spec.tp, spec.pp, spec.dp, spec.max_num_seqs, spec.on_nodes, sorted(spec.options.items()), str(spec.install),
        spec.device, processor(), os.cpu_count(),
    )  # fmt: skip
    return cache / "steps" / f"{facts_key(facts)}.json"


def _doubling(first: int, most: int) -> Iterator[int]:
    return itertools.takewhile(lambda value: value <= most, (first << place for place in itertools.count()))


def _pace(came: list[float]) -> float | None:
    """Seconds between two of them on average; None: there are no two."""
    return (came[-1] - came[0]) / (len(came) - 1) if len(came) > 1 else None
