"""What keys may do at this gateway: their models, their limits, and their budgets, of which it holds purses.

A request is admitted without waiting: what it may cost is set aside out of a purse that is in memory, and purses are
filled from the ledger beside it. A key without terms, and a model without limits, cost a request nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.gateway.density import OCTETS_A_TOKEN
from fabrictool.gateway.openai import GatewayResponse, error_response
from fabrictool.routing.allowances import Allowance, Purse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fabrictool.base.clock import Clock
    from fabrictool.domain.terms import BudgetTerms, KeyLimits
    from fabrictool.gateway.directory import Directory
    from fabrictool.gateway.keys import Consumer
    from fabrictool.gateway.openai import Peek
    from fabrictool.gateway.records import RequestRecord

BLOCKS: Final = 50
"""A purse holds this part of a budget, or what its largest request needs."""
TURN_S: Final = 5.0
DAY_S: Final = 86400
IDLE_S: Final = 60.0
"""A purse that nobody has used for so long is given back: another gateway's clients may want it."""
TEMPLATE_TOKENS: Final = 1024
"""Of what an engine puts around a prompt by itself, such as a default system message and the frame of tools."""
_MEDIA: Final = re.compile(
    rb'"(?:image(?:_url|_embeds|_pil)?|audio_embeds|input_(?:image|audio|file)|audio_url|video_url|file)"'
)
"""Their tokens are not bounded by the octets that name them."""
_ESCAPES: Final = re.compile(rb"\\u00(?:5[fF]|[46][1-9a-fA-F]|[57][0-9aA])")
"""A letter that is written so may hide one of these names. Two expressions, each with octets that it begins with: such
a one is looked for ten times as fast."""
_LIMITED_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
"""What is asked there has answers of many tokens. Only a path's own limit holds: another's is passed over by some
engines."""
_OWN_LIMIT: Final = b'"n_predict"'
"""Of one engine, and stronger than ours."""
_PAIRED_PATHS: Final = frozenset({"/v1/rerank", "/v1/score"})
"""A text is computed anew with each of the others."""

_log = logging.getLogger("fabrictool.gateway")


class Ledger(Protocol):
    """Of all gateways' budgets; its methods block and raise FabrictoolError."""

    def take(self, account: str, period: str, *, wanted: int, limit: int) -> int:
        """Up to `wanted`, of what is left; see `RecordStore.take`."""

    def give(self, account: str, period: str, tokens: int) -> None: ...


class Ticket:
    """Of an admitted request, to be settled with its record, once."""

    __slots__ = ("allowances", "most", "octets", "purse", "used")

    def __init__(
        self,
        allowances: tuple[Allowance, ...],
        purse: Purse | None,
        most: int,
        octets: int,
    ) -> None:
        self.allowances: tuple[Allowance, ...] = allowances
        self.purse: Purse | None = purse
        self.most = most
        """Tokens that were set aside."""
        self.octets = octets
        self.used = 0
        """As it was settled."""

    def settle(self, record: RequestRecord) -> None:
        self._end(self._used(record))

    def correct(self, record: RequestRecord) -> None:
        """Once it is settled: by what was learned since."""
        more = self._used(record) - self.used
        for allowance in self.allowances:
            allowance.correct(more)
        if self.purse is not None:
            self.purse.correct(more)

    def give_back(self) -> None:
        """Of a request that came to nothing before it began."""
        self._end(0)

    def _end(self, used: int) -> None:
        self.used = used
        for allowance in self.allowances:
            allowance.end(used)
        if self.purse is not None:
            self.purse.settle(self.most, used)

    def _used(self, record: RequestRecord) -> int:
        """What the engine says; where it could not say it, no more than was set aside, and all of that where it ended
        its answer without a word of it.
        """
        if record.counted:
            return record.prompt_tokens + record.completion_tokens
        if record.end == "refused" or not record.provider or (record.end == "answered" and record.status >= 400):
            return 0
        if record.end == "answered" and self.purse is not None:
            return self.most
        estimated = (record.prompt_tokens or self.octets // OCTETS_A_TOKEN) + record.completion_tokens
        return estimated if self.purse is None else min(estimated, self.most)


@dataclass(frozen=True, slots=True)
class Unfilled:
    """The ledger was not asked yet for what a request may cost."""

    refusal: GatewayResponse
    """Of one that cannot wait for it."""


class KeyAccounts:
    """`admit` on the event loop, `run` beside it."""

    def __init__(self, clock: Clock, fabric: str) -> None:
        self._clock = clock
        self._fabric = fabric
        self._keys: dict[str, Allowance] = {}
        """By account, once it has asked for something."""
        self._models: dict[str, Allowance] = {}
        self._model_limits: Mapping[str, KeyLimits] = {}
        self.bases: Mapping[str, str] = {}
        """Adapter → the model whose limits and keys count for it."""
        self._purses: dict[tuple[str, str], tuple[Purse, BudgetTerms]] = {}
        """By account and period."""
        self._limits: Mapping[str, KeyLimits] = {}
        """By account."""
        self._budgets: Mapping[str, BudgetTerms] = {}
        """By account, as they were told last."""
        self._empty: set[tuple[str, str]] = set()
        """Purses of which the ledger has nothing more."""
        self._woken = asyncio.Event()
        self._after_turn: list[Callable[[], None]] = []
        self._ending = False
        self._day = -1
        """Since 1970, in UTC."""
        self._places: dict[str, tuple[str, tuple[str, str]]] = {}
        """Account → its kind of budget, and the place of its purse on that day."""

    def limit_models(self, limits: Mapping[str, KeyLimits]) -> None:
        """Whoever asks; from now on."""
        now = self._clock.monotonic()
        for model, allowance in list(self._models.items()):
            if model in limits:
                allowance.change(limits[model], now)
            else:
                del self._models[model]
        for model in limits.keys() - self._models.keys():
            self._models[model] = Allowance(limits[model], now)

    def change_terms(self, consumers: Mapping[str, Consumer]) -> None:
        """Account → one of its consumers; from now on. Their purses are filled before they ask, if `turn` is called."""
        now = self._clock.monotonic()
        for account, allowance in list(self._keys.items()):
            terms = consumers[account].terms if account in consumers else None
            if terms is None:
                del self._keys[account]
            else:
                allowance.change(terms.limits, now)
        budgets = {
            account: consumer.terms.budget
            for account, consumer in consumers.items()
            if consumer.terms is not None and consumer.terms.budget is not None
        }
        for account, budget in budgets.items():
            if self._budgets.get(account) != budget:  # of a thousand keys one was changed
                self._purse(self._place(account, budget), budget, now)
        self._budgets = budgets
        self._limits = {
            account: consumer.terms.limits for account, consumer in consumers.items() if consumer.terms is not None
        }
        self._woken.set()

    # Wide: who asks for what, and what is known of it.
    def admit(
        self, consumer: Consumer | None, peeked: Peek, path: str, body: bytes, directory: Directory
    ) -> Ticket | GatewayResponse | Unfilled | None:
        """The ticket of a request, or why it may not go on; None: nothing limits it.

        `directory`: of it the context of a model's replicas is asked for.
        """
        terms = consumer.terms if consumer is not None else None
        base = self.bases.get(peeked.model, peeked.model)
        model = self._models.get(base) if self._models else None
        if terms is None and model is None:
            return None
        allowances = () if model is None else (model,)
        if consumer is not None and terms is not None:
            models = terms.models
            if models is not None and peeked.model not in models and base not in models:
                text = f"this key may not use the model {peeked.model!r}"
                return error_response(403, "FT8124", text, param="model", path=path)
            allowances = (self._allowance(consumer.account, terms.limits), *allowances)
        now = self._clock.monotonic()
        for allowance in allowances:
            if refused := allowance.refusal(now):
                whose = "model" if allowance is model else "key"
                return _later(f"the {whose}'s limit of {refused[0]} is reached", refused[1], path)
        ticket = Ticket(allowances, None, 0, len(body))
        if consumer is not None and terms is not None and terms.budget is not None:
            known = directory.context(peeked.model)
            most = 0 if known is None else most_tokens(peeked, path, body, known)
            if most is None:
                return error_response(400, "FT8127", "this key has a budget: say max_tokens", path=path)
            if refusal := self._reserve(ticket, consumer.account, terms.budget, most, path, now):
                return refusal
        for allowance in allowances:
            allowance.begin()
        return ticket

    def shareable(self) -> Iterator[tuple[str, Allowance]]:
        """All limits that were used here, by names that other workers know."""
        yield from ((f"key {account}", allowance) for account, allowance in self._keys.items())
        yield from ((f"model {model}", allowance) for model, allowance in self._models.items())

    def shared(self, name: str) -> Allowance | None:
        """Of which another worker tells; None: it is not known here."""
        kind, _, of = name.partition(" ")
        if kind == "model":
            return self._models.get(of)
        limits = self._limits.get(of)
        return None if limits is None else self._allowance(of, limits)

    def _allowance(self, account: str, limits: KeyLimits) -> Allowance:
        allowance = self._keys.get(account)
        if allowance is None:
            allowance = self._keys[account] = Allowance(limits, self._clock.monotonic())
        return allowance

    # Wide: whose budget it is, and how much of it.
    def _reserve(
        self, ticket: Ticket, account: str, budget: BudgetTerms, most: int, path: str, now: float
    ) -> GatewayResponse | Unfilled | None:
        place = self._place(account, budget)
        if most <= budget.tokens:
            purse = self._purse(place, budget, now)
            reserved = purse.reserve(most, now)
            if place not in self._empty and purse.missing(_block(budget)):
                self._woken.set()
            if reserved:
                ticket.purse, ticket.most = purse, most
                return None
            if place not in self._empty:
                return Unfilled(_later("the key's budget is being fetched", 1.0, path))
        text = f"this could take {most} tokens, more than is left of the key's budget of {budget.tokens} ({budget.per})"
        return error_response(429, "FT8126", text, path=path)

    def _place(self, account: str, budget: BudgetTerms) -> tuple[str, str]:
        wall = self._clock.wall()
        day = int(wall // DAY_S)
        if day != self._day:
            self._day = day
            self._places.clear()
        known = self._places.get(account)
        if known is None or known[0] != budget.per:
            known = self._places[account] = budget.per, (f"{self._fabric}:{account}", period_of(budget, wall))
        return known[1]

    def _purse(self, place: tuple[str, str], budget: BudgetTerms, now: float) -> Purse:
        entry = self._purses.get(place)
        if entry is None or (entry[1] is not budget and entry[1] != budget):
            purse = entry[0] if entry is not None else Purse(now)
            self._purses[place] = purse, budget
            self._empty.discard(place)
            return purse
        return entry[0]

    def after_turn(self, call: Callable[[], None]) -> None:
        """Call it, once, when purses were filled, or could not be."""
        self._after_turn.append(call)

    # -- beside the requests ----------------------------------------------------------------------------------

    async def run(self, ledger: Ledger) -> None:
        """Until `end` is called; not to be cancelled, for what it has just taken would be lost to the budget."""
        while not self._ending:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN_S):
                    await self._woken.wait()
            self._woken.clear()
            try:
                await self.turn(ledger)
            except Exception:  # noqa: BLE001 - without its turns no key with a budget would be answered again
                _log.exception("purses could not be filled")
            calls, self._after_turn = self._after_turn, []
            for call in calls:
                call()

    def wake(self) -> None:
        """Have the next turn now."""
        self._woken.set()

    def end(self) -> None:
        self._ending = True
        self._woken.set()

    async def turn(self, ledger: Ledger) -> None:
        """Give back what lies idle, take what is missing."""
        now, wall = self._clock.monotonic(), self._clock.wall()
        idle, wanted = [], []
        for place, (purse, budget) in list(self._purses.items()):
            over = place[1] != period_of(budget, wall)
            if not purse.reserved and (over or now - purse.used_at > IDLE_S):
                del self._purses[place]
                self._empty.discard(place)
                idle.append((place, purse, budget))
            elif not over and (missing := purse.missing(_block(budget))):
                wanted.append((place, purse, missing, budget.tokens))
        if not idle and not wanted:
            return
        given, taken = await asyncio.to_thread(
            _exchange,
            ledger,
            [(place, purse.held) for place, purse, _ in idle],
            [(place, missing, limit) for place, _, missing, limit in wanted],
        )
        for place, purse, budget in idle[given:]:  # the ledger was away before their turn
            if place in self._purses:  # somebody has asked meanwhile
                self._purses[place][0].held += purse.held
            else:
                self._purses[place] = purse, budget
        for (place, purse, missing, _), granted in zip(wanted, taken, strict=False):
            purse.held += granted
            if granted < missing:
                self._empty.add(place)  # other gateways may give something back: it is asked again
            else:
                self._empty.discard(place)
            purse.wanted = 0

    async def close(self, ledger: Ledger) -> None:
        """Give back all purses."""
        purses, self._purses = self._purses, {}
        if purses:
            held = [(place, purse.held) for place, (purse, _) in purses.items()]
            await asyncio.to_thread(_exchange, ledger, held, [])


def _exchange(
    ledger: Ledger,
    idle: list[tuple[tuple[str, str], int]],
    wanted: list[tuple[tuple[str, str], int, int]],
) -> tuple[int, list[int]]:
    """How many of `idle` were given back, and what was granted, as far as the ledger answered. One that was given back
    and not heard of is lost to the budget: were it given twice, it could be spent twice.
    """
    given, taken = 0, list[int]()
    try:
        for (account, period), tokens in idle:
            given += 1
            if tokens:
                ledger.give(account, period, tokens)
        for (account, period), tokens, limit in wanted:
            taken.append(ledger.take(account, period, wanted=tokens, limit=limit))
    except FabrictoolError as error:
        _log.warning("budgets cannot be looked up: %s", error)
    return given, taken


def period_of(budget: BudgetTerms, wall: float) -> str:
    """The day or month of UTC, or ``total``."""
    if budget.per == "total":
        return "total"
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d" if budget.per == "day" else "%Y-%m")


def _block(budget: BudgetTerms) -> int:
    return max(1, budget.tokens // BLOCKS)


def may_have_media(body: bytes) -> bool:
    """Whether a request may hold what is no text."""
    hidden = body.find(b"\\u00") >= 0 and _ESCAPES.search(body) is not None
    return hidden or _MEDIA.search(body) is not None


def most_tokens(peeked: Peek, path: str, body: bytes, context: int) -> int | None:
    """How many tokens a request can cost: a token of a text has an octet or more. None: nothing bounds it."""
    media = bool(peeked.previous_response_id) or may_have_media(body)
    answers = peeked.answers * _prompts(peeked)
    if path in _PAIRED_PATHS:
        return None if media else _paired(body)
    answer = _answer(peeked, path, body)
    if media or answer is None:
        return answers * context if context else None
    most = len(body) + TEMPLATE_TOKENS * answers + answers * answer
    return min(most, answers * context) if context and path in _LIMITED_PATHS else most


def _answer(peeked: Peek, path: str, body: bytes) -> int | None:
    """Tokens of the longest answer; None: the request does not say, or engines do not agree on what it says."""
    if path not in _LIMITED_PATHS:
        return 0  # what is asked there is answered by a figure
    own, newer = peeked.max_tokens, None
    if path == "/v1/chat/completions":
        newer = peeked.max_completion_tokens
    elif path == "/v1/responses":
        own = peeked.max_output_tokens
    if (own is None and newer is None) or (own is not None and own < 0) or (newer is not None and newer < 0):
        return None
    return peeked.most_tokens if body.find(_OWN_LIMIT) < 0 else None  # `in` would ask first whether it is a number


def _paired(body: bytes) -> int | None:
    """Of texts that are each computed with another: the longest of all counts with every one of them."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        lists = [
            msgspec.json.decode(value, type=list[msgspec.Raw])
            for value in fields.values()
            if bytes(value).startswith(b"[")
        ]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    listed = [text for texts in lists for text in texts]
    longest = max((len(bytes(text)) for text in (*fields.values(), *listed) if bytes(text)[:1] in b'"{'), default=0)
    pairs = max((len(texts) for texts in lists), default=1)
    return len(body) + pairs * (longest + TEMPLATE_TOKENS)


def _prompts(peeked: Peek) -> int:
    """A completion may have many, each with an answer."""
    prompt = peeked.prompt
    if not prompt.startswith(b"["):
        return 1
    try:
        prompts = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 1
    return max(1, len(prompts)) if prompts and bytes(prompts[0])[:1] in (b'"', b"[") else 1


def _later(text: str, seconds: float, path: str) -> GatewayResponse:
    headers = (("retry-after", str(max(1, math.ceil(seconds)))),)
    return error_response(429, "FT8125", f"{text}; try again later", headers=headers, path=path)
