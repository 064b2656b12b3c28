"""Text to tokens and back, and chats to prompts, all from the model file's metadata.

Byte-level BPE only (``tokenizer.ggml.model = gpt2``): every token is a string of bytes, so text is put together from
bytes and a character that spans tokens never breaks.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.sandbox
import tokenizers

from fabrictool.base.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CONTROL, _USER_DEFINED = 3, 4
# How each family splits text before merging, under the names that GGUF files use. The pattern of llama-bpe is the one
# published with Llama 3's tokenizer.
_DIGITS_THEN_WORDS = frozenset({"smollm"})
_WORDS = frozenset({"default", "gpt-2"})
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TemplateError(Exception):
    """The chat cannot be put into the model's form; the message is for the client."""


class Tokenizer:
    """One model's vocabulary, special tokens and chat template."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Build from GGUF metadata.

        Raises
        ------
        InvalidInputError
            FT7021 another kind of tokenizer, FT7020 incomplete or broken metadata.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise InvalidInputError.of("FT7021", f"the reference engine has no {kind} tokenizer")
        try:
            tokens: list[str] = metadata["tokenizer.ggml.tokens"]
            kinds: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
            merges = [_merge(text) for text in metadata["tokenizer.ggml.merges"]]
            self._template = _template(metadata.get("tokenizer.chat_template"))
        except (KeyError, ValueError, TypeError, jinja2.TemplateError) as error:
            raise InvalidInputError.of("FT7020", f"tokenizer metadata is broken: {error}") from error
        numbers = {token: i for i, token in enumerate(tokens)}
        self._encoder = tokenizers.Tokenizer(tokenizers.models.BPE(numbers, merges))
        self._encoder.pre_tokenizer = _pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "default")))
        special = [t for t, k in zip(tokens, kinds, strict=True) if k in (_CONTROL, _USER_DEFINED)]
        self._encoder.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in special])
        octets = {letter: octet for octet, letter in byte_letters().items()}
        self._bytes = [
            b"" if k == _CONTROL else t.encode() if k == _USER_DEFINED else bytes(octets.get(c, 63) for c in t)
            for t, k in zip(tokens, kinds, strict=True)
        ]
        self.vocab = len(tokens)
        ends = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
        self.ends = frozenset(int(end) for end in ends if end is not None)
        """Tokens that end an answer."""
        begin = metadata.get("tokenizer.ggml.bos_token_id")
        self._begin = int(begin) if begin is not None and metadata.get("tokenizer.ggml.add_bos_token") else None
        self._named = {
            "bos_token": "" if begin is None else tokens[int(begin)],
            "eos_token": "" if ends[0] is None else tokens[int(ends[0])],
        }

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt; special tokens may be written out in it."""
        numbers: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return numbers if self._begin is None else [self._begin, *numbers]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a chat, up to where the assistant answers; raises TemplateError."""
        if self._template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        try:
            text = self._template.render(messages=list(messages), add_generation_prompt=True, **self._named)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error
        # The template writes the beginning itself where it wants one.
        numbers: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return numbers

    def octets(self, token: int) -> bytes:
        """The bytes that a token stands for; empty for control tokens."""
        return self._bytes[token]


class TextStream:
    """Puts the text of one answer together as its tokens arrive, and finds stop strings in it.

    Text that may still turn out to be the beginning of a stop string, and bytes that are not a whole character yet,
    are held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped = False

    def push(self, token: int, *, last: bool = False) -> str:
        """Text that is certain after this token. After a stop string `stopped` is set and the rest is dropped."""
        return self._sift(self._decoder.decode(self._tokenizer.octets(token), final=last), last=last)

    def finish(self) -> str:
        """What was held back, at the end of an answer that ends without another token of text."""
        return self._sift(self._decoder.decode(b"", final=True), last=True)

    def _sift(self, new: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        matches = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if matches:
            self.stopped, self._held = True, ""
            return text[: min(matches)]
        keep = 0 if last else self._doubtful(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _doubtful(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = min(len(text), max((len(stop) - 1 for stop in self._stop), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


def _merge(text: str) -> tuple[str, str]:
    left, _, right = text.partition(" ")
    return left, right


def _pre_tokenizer(name: str) -> Any:
    pre = tokenizers.pre_tokenizers
    words = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in _WORDS:
        return words
    if name in _DIGITS_THEN_WORDS:
        return pre.Sequence([pre.Digits(individual_digits=True), words])
    if name == "llama-bpe":
        split = pre.Split(tokenizers.Regex(_LLAMA3), "isolated")
        return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise InvalidInputError.of("FT7021", f"the reference engine does not know how {name} splits text")


def _template(source: object) -> jinja2.Template | None:
    if source is None:
        return None
    # A model file is foreign input: its template runs in jinja's sandbox, without access to attributes or mutation.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(str(source))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def byte_letters() -> dict[int, str]:
    """The printable letter that byte-level vocabularies write for each byte (GPT-2's table, rebuilt from its rule).

    Printable Latin-1 bytes are themselves; the others are counted off from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [octet for octet in range(256) if octet not in set(printable)]
    return {o: chr(o) for o in printable} | {o: chr(0x100 + i) for i, o in enumerate(others)}
