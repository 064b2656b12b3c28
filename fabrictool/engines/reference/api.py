"""The OpenAI bodies: what a client may ask, checked; and the shapes of the answers. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from fabrictool.engines.reference.answers import ORDINARY, GenerationRequest, LatencyTargets
from fabrictool.engines.reference.sampling import Sampling
from fabrictool.engines.reference.tokenizer import TemplateError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.engines.reference.answers import AnsweredModel
    from fabrictool.engines.reference.tokenizer import Tokenizer

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    # Parameter → values that mean "not used". Ignoring any other would answer another question than was asked.
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "min_p": (None, 0),
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}

LONGEST_S = 86_400
"""That a token may be waited for."""
_Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class ApiError(Exception):
    """An answer in OpenAI's error envelope."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers: dict[str, str] = {}
        self.body = error_body(status, message, code=code, param=param)


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error envelope; the type follows from the status."""
    kinds = {404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Targets(msgspec.Struct):
    ttft_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)]
    tpot_s: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_S)]


class _Body(msgspec.Struct, kw_only=True):
    model: str
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    seed: _Seed | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    priority: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """As vLLM has it: the smaller, the sooner."""
    fabric: _Targets | None = None
    """What this request wants of latency; an engine with one model has no use for it."""


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None


class _ChatBody(_Body, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[int | str]


class _Form(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw()


# msgspec learns a type when it is first used, and a second thread that uses it meanwhile reads what is half there and
# crashes the process. Requests are parsed in threads, so it learns these here.
for _kind in (_ChatBody, _CompletionBody, _Form):
    msgspec.json.Decoder(_kind)


class Ask(msgspec.Struct, frozen=True):
    """A checked request and how it wants its answer."""

    model: str
    request: GenerationRequest
    stream: bool
    include_usage: bool
    chat: bool


def is_chat(raw: bytes) -> bool:
    """Whether a body has messages, and not a prompt."""
    try:
        return bool(msgspec.json.decode(raw, type=_Form).messages)
    except (msgspec.DecodeError, RecursionError):
        return False


def parse(raw: bytes, *, chat: bool, models: Mapping[str, AnsweredModel]) -> Ask:
    """The request in a body, for one of `models`.

    Raises
    ------
    ApiError
        400 malformed, unsupported or too long; 404 another model.
    """
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(document, dict):
        raise ApiError(400, "the body is not a JSON object", code="invalid_json")
    try:
        body: _ChatBody | _CompletionBody
        body = msgspec.convert(document, _ChatBody) if chat else msgspec.convert(document, _CompletionBody)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        raise ApiError(
            400, f"{text} (at {where.rstrip('`')})" if where else text, param=where.rstrip("`") or None
        ) from error
    model = models.get(body.model)
    if model is None:
        raise ApiError(404, f"the model {body.model!r} does not exist here", code="model_not_found", param="model")
    for name, unused in _UNSUPPORTED.items():
        if document.get(name) not in unused:
            raise ApiError(400, f"this engine does not support {name}", code="unsupported_parameter", param=name)
    prompt = _chat_prompt(body, model.tokenizer) if isinstance(body, _ChatBody) else _prompt(body, model.tokenizer)
    return Ask(
        model=body.model,
        request=GenerationRequest(
            prompt,
            _answer_length(body, len(prompt), model.context),
            _sampling(body),
            _stop(body),
            ORDINARY if body.priority is None else body.priority,
            None if body.fabric is None else LatencyTargets(body.fabric.ttft_s, body.fabric.tpot_s),
        ),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        chat=chat,
    )


def _chat_prompt(body: _ChatBody, tokenizer: Tokenizer) -> list[int]:
    messages = []
    for i, message in enumerate(body.messages):
        content = message.content
        if isinstance(content, list):
            for part in content:
                if part.type != "text":
                    raise ApiError(
                        400, f"content of type {part.type!r} is not supported", param=f"messages[{i}].content"
                    )
            content = "".join(part.text for part in content)
        messages.append({"role": message.role, "content": content or ""})
    try:
        return tokenizer.encode_chat(messages)
    except TemplateError as error:
        raise ApiError(400, str(error), param="messages") from error


def _prompt(body: _CompletionBody, tokenizer: Tokenizer) -> list[int]:
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        numbers = tokenizer.encode(prompt)
    else:
        numbers = [token for token in prompt if isinstance(token, int)]
        if len(numbers) != len(prompt):
            raise ApiError(400, "one prompt per request", code="unsupported_parameter", param="prompt")
    if not numbers:
        raise ApiError(400, "the prompt is empty", param="prompt")
    for token in numbers:
        if not 0 <= token < tokenizer.vocab:
            raise ApiError(400, f"token {token} is not in the vocabulary of {tokenizer.vocab}", param="prompt")
    return numbers


def _answer_length(body: _Body, prompt: int, context: int) -> int:
    wanted, param = body.max_tokens, "max_tokens"
    if isinstance(body, _ChatBody) and body.max_completion_tokens is not None:
        wanted, param = body.max_completion_tokens, "max_completion_tokens"
    room = context - prompt
    if room < 1 or (wanted is not None and wanted > room):
        asked = "" if wanted is None else f" and {wanted} for the answer"
        raise ApiError(
            400,
            f"this model's context is {context} tokens; the prompt has {prompt}{asked}",
            code="context_length_exceeded",
            param=("messages" if isinstance(body, _ChatBody) else "prompt") if room < 1 else param,
        )
    # The API's defaults: 16 tokens for a completion, all that fits for a chat.
    return wanted if wanted is not None else room if isinstance(body, _ChatBody) else min(16, room)


def _sampling(body: _Body) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=0 if body.top_k is None else max(0, body.top_k),
        seed=body.seed,
    )


def _stop(body: _Body) -> tuple[str, ...]:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stop) > 4:
        raise ApiError(400, "at most 4 stop strings", param="stop")
    if "" in stop:
        raise ApiError(400, "a stop string is empty", param="stop")
    return tuple(stop)


class Reply(msgspec.Struct, frozen=True):
    """Builds the documents of one answer."""

    identifier: str
    created: int
    model: str
    chat: bool
    prompt_tokens: int
    include_usage: bool = False

    def usage(self, tokens: int) -> dict[str, int]:
        """The usage object for that many generated tokens."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
        }

    def whole(self, text: str, finish: str, tokens: int) -> dict[str, Any]:
        answer = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **answer, "logprobs": None, "finish_reason": finish}
        return self._document(choice, chunk=False) | {"usage": self.usage(tokens)}

    def opening(self) -> dict[str, Any]:
        """The first chunk of a streamed chat."""
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, text: str, finish: str | None) -> dict[str, Any]:
        if not self.chat:
            return self._chunk({"text": text}, finish)
        return self._chunk({"delta": {"content": text} if text else {}}, finish)

    def closing(self, tokens: int) -> dict[str, Any]:
        """The chunk after the last, when the client asked for usage."""
        return self._document(None, chunk=True) | {"usage": self.usage(tokens)}

    def _chunk(self, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
        return self._document(choice, chunk=True) | ({"usage": None} if self.include_usage else {})

    def _document(self, choice: dict[str, Any] | None, *, chunk: bool) -> dict[str, Any]:
        kind = "text_completion" if not self.chat else "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.identifier,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [] if choice is None else [choice],
        }
