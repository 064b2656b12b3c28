"""How long a replica may be silent: declared for its model, or learned from what its model's answers took before.

A stopped engine takes requests and says nothing. A fixed limit that is safe for a model which thinks for minutes would
let everybody else wait for minutes, too; so each model has its own, for streams and for the whole answers of each path
(which begin when they end). Learned is what a replica took that answered, from when it was asked: what an attempt that
failed took before is what the limit is there to cut, and would raise it with each failure.

Models that reason are given more, and are asked again less: an attempt of theirs costs an engine minutes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.domain.specs import PatienceRule

KEPT: Final = 512
LEARNED: Final = 20
"""Answers from which on a model counts as known."""
TIMES: Final = 4.0
"""The longest of the last answers, so many times over, may be waited for."""
STREAM: Final = "stream"
"""The form of all streams; that of whole answers is their path, for an embedding says nothing of a chat."""
LENGTHS_KEPT: Final = 128
LOOK: Final = 16
"""Answers after which the lengths of the last ones are looked at again: sorting them is no work for each."""
REASONS_FROM: Final = 800
"""Tokens of a model's median answer from which on it counts as one that reasons. Paper 001 saw a median of 1782 with
reasoning models and of 87 with others, of whose answers one in twenty has over 828: half of the former, and as long as
an unusually long answer of the latter.
"""
REASONS_NO_MORE: Final = 400
"""Below this it counts as another one again: half of the way, so that a model between does not change all the time."""


class WaitLimits:
    """What a replica of some kind of model is given, in seconds, and its requests in second attempts."""

    __slots__ = (
        "deadline_s",
        "idle_s",
        "least_s",
        "least_whole_s",
        "most_s",
        "retries",
        "unknown_s",
        "unknown_whole_s",
    )

    # Wide: a number for each thing that may take too long.
    def __init__(
        self,
        *,
        unknown_s: float,
        unknown_whole_s: float,
        least_s: float,
        least_whole_s: float,
        most_s: float,
        idle_s: float,
        deadline_s: float,
        retries: int,
    ) -> None:
        self.unknown_s, self.unknown_whole_s = unknown_s, unknown_whole_s
        """To the first octet of a stream or of a whole answer, before the model is known."""
        self.least_s = least_s
        """Learned limits are at least this for streams: a queue that fills up must not look like a death."""
        self.least_whole_s = least_whole_s
        """A whole answer takes as long as it is long: that the last ones were short says little of the next one."""
        self.most_s = most_s
        self.idle_s = idle_s
        """Between two octets of an answer that has begun."""
        self.deadline_s = deadline_s
        """After this a request is not tried anew."""
        self.retries = retries
        """After slow failures, if `routing.retries` allows as many."""


UNKNOWN: Final = WaitLimits(
    unknown_s=120.0, unknown_whole_s=600.0, least_s=30.0, least_whole_s=120.0, most_s=600.0, idle_s=600.0,
    deadline_s=600.0, retries=10,
)  # fmt: skip
"""Until its answers' lengths are known: it may be one that reasons."""
PLAIN: Final = WaitLimits(
    unknown_s=120.0, unknown_whole_s=600.0, least_s=30.0, least_whole_s=120.0, most_s=600.0, idle_s=180.0,
    deadline_s=600.0, retries=10,
)  # fmt: skip
"""Such a model is silent between two tokens only where its engine has too much to do."""
REASONING: Final = WaitLimits(
    unknown_s=600.0, unknown_whole_s=1200.0, least_s=120.0, least_whole_s=600.0, most_s=1200.0, idle_s=1200.0,
    deadline_s=1200.0, retries=1,
)  # fmt: skip
"""In paper 001 one answer in twenty takes over 174 s, and a server may keep all of the thinking to itself."""


class Habits:
    """What a gateway saw of one model."""

    __slots__ = ("forms", "lengths", "reasons", "since")

    def __init__(self) -> None:
        self.forms: dict[str, deque[float]] = {}
        self.lengths: deque[int] = deque(maxlen=LENGTHS_KEPT)
        """Tokens of the last answers."""
        self.since = 0
        """Answers since these were looked at."""
        self.reasons = False

    def look(self) -> None:
        """Whether it is one that reasons, by the median of its last answers."""
        self.since = 0
        median = sorted(self.lengths)[len(self.lengths) // 2]
        self.reasons = median >= (REASONS_NO_MORE if self.reasons else REASONS_FROM)


class Patience:
    """Of one gateway, in seconds. `form`: `STREAM`, or a path without its query."""

    def __init__(self) -> None:
        self._habits: dict[str, Habits] = {}
        self._declared: Mapping[str, PatienceRule] = {}

    def declare(self, declared: Mapping[str, PatienceRule]) -> None:
        """Go by these, by model; what they leave open is learned."""
        self._declared = declared

    def learn(self, model: str, form: str, seconds: float, tokens: int = 0) -> None:
        """An answer began so long after its replica was asked; 0 `tokens`: they are unknown, or it has none."""
        habits = self._habits.get(model)
        if habits is None:
            habits = self._habits[model] = Habits()
        waits = habits.forms.get(form)
        if waits is None:
            waits = habits.forms[form] = deque(maxlen=KEPT)
        waits.append(seconds)
        if tokens:
            habits.lengths.append(tokens)
            habits.since += 1
            if habits.since >= LOOK and len(habits.lengths) >= LEARNED:
                habits.look()

    def reasons(self, model: str) -> bool | None:
        """Whether it is one that reasons; None: nobody said it, and too few of its answers were seen."""
        rule, habits = self._declared.get(model), self._habits.get(model)
        if rule is not None and rule.reasoning is not None:
            return rule.reasoning
        return None if habits is None or len(habits.lengths) < LEARNED else habits.reasons

    def kind(self, model: str) -> WaitLimits:
        """What holds for its like."""
        reasons = self.reasons(model)
        return UNKNOWN if reasons is None else REASONING if reasons else PLAIN

    def limit(self, model: str, form: str) -> float:
        """Of the wait for the first octet."""
        rule, habits, kind = self._declared.get(model), self._habits.get(model), self.kind(model)
        declared = None if rule is None else rule.first_byte_s if form == STREAM else rule.whole_s
        if declared is not None:
            return declared
        waits = None if habits is None else habits.forms.get(form)
        if waits is None or len(waits) < LEARNED:
            return kind.unknown_s if form == STREAM else kind.unknown_whole_s
        return min(kind.most_s, max(kind.least_s if form == STREAM else kind.least_whole_s, TIMES * max(waits)))

    def knows(self, model: str, form: str) -> bool:
        """Whether the limit of the wait for the first octet is more than a guess: declared, or learned."""
        if model in self._declared:
            return True
        habits = self._habits.get(model)
        waits = None if habits is None else habits.forms.get(form)
        return waits is not None and len(waits) >= LEARNED

    def idle(self, model: str) -> float:
        """Of the wait for the next octet."""
        rule = self._declared.get(model)
        return self.kind(model).idle_s if rule is None or rule.idle_s is None else rule.idle_s

    def deadline(self, model: str) -> float:
        """After which a request is not tried anew; what is declared leaves time for a second attempt."""
        rule, deadline_s = self._declared.get(model), self.kind(model).deadline_s
        return (
            deadline_s
            if rule is None
            else max(deadline_s, 2.0 * (rule.first_byte_s or 0.0), 2.0 * (rule.whole_s or 0.0))
        )
