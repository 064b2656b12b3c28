"""The tables that pass from the step model to the event loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """How long a replica's steps take, seconds; index = sequences or tokens."""

    decode: Floats
    """(sequences + 1) A step that only decodes, without reading the cache."""
    mixed: Floats
    """(tokens + 1) A step with prompts in it, of one lane, without attention and sampling; the last one stands for
    all longer steps."""
    sample: Floats
    """(tokens + 1) Logits and sampling of a mixed step; the last one stands for all more."""
    read: float = 0.0
    """For each cached token that a decode step reads."""
    pair: float = 0.0
    """For each (query, key) pair of a prefill."""
    read_window: float = 0.0
    """`read` and `pair` of sliding-window layers, which look back `window` tokens."""
    pair_window: float = 0.0
    window: int = 0
    swap: float = 0.0
    """For each token moved to or from host memory."""
    hand: float = 0.0
    """For each token handed from prefill to decode, and once for each hand-over."""
    hand_latency: float = 0.0
    queries: int = 1
    """Tokens of each sequence that a step computes: above 1 where drafts are verified. `decode` and `read` are what one
    token has of such a step."""
    decoded: float = 1.0
    """Tokens of each sequence that a step decodes, on average."""
    draft: Floats = field(default_factory=lambda: np.zeros(1))
    """(sequences + 1) Guessing, in a step with prompts in it; the last one stands for all more."""
    groups: int = 1
    """Groups of devices that have attention of their own and share the experts."""
    shared: Floats = field(default_factory=lambda: np.zeros(1))
    """(tokens + 1) What they share in a step with prompts in it, by the tokens of all groups; not part of `mixed`."""
