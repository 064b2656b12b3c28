"""What a node of several models goes by where nobody says: the paper's targets (LLM-Mesh, section 8.1), and ours."""

from __future__ import annotations

TTFT_S, TPOT_S = 2.0, 0.25
"""The paper's; a first token may take longer where the prompt has more than `TTFT_TOKENS` a second."""
TTFT_TOKENS = 512
KEEP_ALIVE_S = 60.0
"""For which a model without requests stays in memory."""
ASSUMED_ANSWER = 64.0
"""Tokens of a mean answer before any was given."""


def usual_ttft_s(prompt: int) -> float:
    """Seconds that the first token may take after a prompt of so many tokens."""
    return max(TTFT_S, prompt / TTFT_TOKENS)
