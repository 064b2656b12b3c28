"""The JSON that clients and engines write, as far as the gateway reads it. The rest is passed on octet for octet."""

from __future__ import annotations

import msgspec


class StreamOptions(msgspec.Struct, frozen=True):
    """Whether the stream's last event is to hold the figures of usage."""

    include_usage: bool | None = None


class Message(msgspec.Struct, frozen=True):
    """As far as it tells conversations apart."""

    role: str = ""
    content: msgspec.Raw = msgspec.Raw(b"")


class RequestBody(msgspec.Struct, frozen=True):
    """The fields of a request that the gateway needs."""

    model: str
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    """Anthropic's."""
    instructions: msgspec.Raw = msgspec.Raw(b"")
    """Of the responses API."""
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | msgspec.UnsetType | None = msgspec.UNSET
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    priority: msgspec.Raw = msgspec.Raw(b"")
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")
    bootstrap_host: msgspec.Raw = msgspec.Raw(b"")
    bootstrap_port: msgspec.Raw = msgspec.Raw(b"")
    bootstrap_room: msgspec.Raw = msgspec.Raw(b"")


class Prompted(msgspec.Struct, frozen=True):
    """What a replica answers that computed a prompt for another one."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Ended(msgspec.Struct, frozen=True):
    """A choice, as far as it says why it has no more tokens."""

    finish_reason: msgspec.Raw = msgspec.Raw(b"null")


class Computed(msgspec.Struct, frozen=True):
    """What a replica answers that computed a prompt which another one fetches meanwhile."""

    choices: list[_Ended] = []

    @property
    def given_up(self) -> bool:
        """SGLang's word for a request that it let go of."""
        return any(bytes(choice.finish_reason) == b'"abort"' for choice in self.choices)
