"""Paths of an engine's API that clients may reach: gateways offer them, and agents let nothing else pass."""

from __future__ import annotations

from typing import Final

CHAT_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Those whose streams end with figures of usage if one asks for them."""
MODEL_PATHS: Final = CHAT_PATHS | {
    "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/score", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize",
}  # fmt: skip
"""What is passed on to a replica of the model that the body names."""
