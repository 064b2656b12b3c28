"""``catalogue add``: what a ``config.json`` says, in the catalogue's words."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fabrictool.base.errors import FabrictoolError, InvalidInputError, UsageError
from fabrictool.base.files import file_error
from fabrictool.base.text import visible
from fabrictool.catalog import ModelArchitecture, model
from fabrictool.catalog.huggingface import architecture
from fabrictool.domain.architectures import MODEL_ID
from fabrictool.simulator.operators import Parallelism, kv_elements_per_token

MOST_OCTETS = 16 << 20
"""Of a config.json; released ones have some thousand octets, those of quantised models some hundred thousand."""
CACHE_OCTETS = 2
"""Of a number in the cache, as engines keep it unless they are told otherwise."""
_OTHER_PARTS = ("vision_config", "audio_config", "image_token_index", "image_token_id")


@dataclass(frozen=True)
class ReadConfig:
    """A ``config.json`` and the architecture that it describes."""

    origin: str
    """What was read, as the user named it, in one line."""
    entry: ModelArchitecture
    others: bool
    """Whether the model has parts for images or sound, which are not in the entry."""
    quantised: str
    """How its weights are quantised, in the word of its configuration; "": not."""

    @property
    def known(self) -> ModelArchitecture | None:
        """The catalogue's entry of this id."""
        return model(self.entry.id)


def read_config(path: Path, model_id: str) -> ReadConfig:
    """The file at `path`, ``-`` for standard input; `model_id` "": the id that the file itself names.

    Raises
    ------
    UsageError
        FT9001 when there is no id.
    InvalidInputError
        FT1420 to FT1423 for what is no configuration of a language model that we can read.
    FabrictoolError
        FT4302 for a file that cannot be read.
    """
    origin, raw, config = _read(path)
    entry = architecture(config, origin)
    chosen = model_id or _own_id(config)
    if not re.fullmatch(MODEL_ID, chosen):
        what = f"{chosen!r} is not the id of a model" if chosen else f"{origin} does not say which model it is of"
        raise UsageError.of(
            "FT9001", what, hint="--id ORGANISATION/NAME, as Hugging Face has it in the model's address"
        )
    source = f"config.json of {chosen}, sha256 {hashlib.sha256(raw).hexdigest()[:16]}"
    entry = msgspec.structs.replace(entry, id=chosen, source=source, published_parameters=entry.parameters)
    quantised = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    method = str(quantised.get("quant_method", "in a way that it does not name")) if isinstance(quantised, dict) else ""
    return ReadConfig(origin, entry, any(name in config for name in _OTHER_PARTS), visible(method)[:40])


def architecture_in(path: Path) -> ModelArchitecture:
    """The model of a ``config.json``, whatever its id. Raises what `read_config` raises of a file."""
    origin, _, config = _read(path)
    return architecture(config, origin)


def refuse_another(read: ReadConfig) -> None:
    """Raises InvalidInputError FT1281 when the catalogue knows the id with other numbers."""
    if read.known is None:
        return
    others = read.entry.differences(read.known)
    if others:
        message = f"the catalogue knows {read.entry.id} with other numbers than {read.origin}: {'; '.join(others)}"
        hint = "for weights of another shape choose another --id, and name it by the model's `architecture:`"
        raise InvalidInputError.of("FT1281", message, hint=hint)


def sentence(entry: ModelArchitecture) -> str:
    """What an operator can compare with the model's page: layers, weights, cache and context."""
    weights = f"{entry.parameters / 1e9:.4g} billion parameters"
    if entry.experts:
        chosen = f"{entry.active_experts} of {entry.experts} experts"
        weights += f", {entry.active_parameters / 1e9:.3g} billion of them at work on a token ({chosen})"
    cache = f"{kv_octets(entry) / 1000:.4g} KB of KV cache a token"
    if entry.kv_layers < entry.layers:
        rest = "a fixed state" if entry.linear_key_heads else f"the last {entry.sliding_window:,} tokens"
        cache += f" in {entry.kv_layers} of the layers, {rest} in the others"
    return f"{entry.id}: {entry.layers} layers; {weights}; {cache}; a context of {entry.max_context:,} tokens"


def kv_octets(entry: ModelArchitecture) -> float:
    """Octets of cache that a token takes at 16 bits, in the layers that keep the whole context."""
    return kv_elements_per_token(entry, Parallelism()) * CACHE_OCTETS


def _read(path: Path) -> tuple[str, bytes, Any]:
    """(what was read, in words; its octets; what they hold)"""
    origin = "standard input" if str(path) == "-" else " ".join(visible(str(path)).split())
    raw = _octets(path, origin)
    return origin, raw, _parsed(raw, origin)


def _octets(path: Path, origin: str) -> bytes:
    try:
        if str(path) == "-":
            raw = sys.stdin.buffer.read(MOST_OCTETS + 1)
        else:
            with path.open("rb") as file:
                raw = file.read(MOST_OCTETS + 1)
    except (OSError, ValueError) as error:
        raise file_error(error if isinstance(error, OSError) else OSError(str(error)), path) from error
    if len(raw) > MOST_OCTETS:
        raise _no_config(origin, f"is larger than {MOST_OCTETS >> 20} MiB")
    return raw


def _parsed(raw: bytes, origin: str) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _no_config(origin, "is not text in UTF-8") from error
    except RecursionError as error:
        raise _no_config(origin, "is nested too deep") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise _no_config(
            origin, f"is not JSON: {error.msg.lower()} in {where}" if raw.strip() else "is empty"
        ) from error
    except ValueError as error:
        raise _no_config(origin, "holds a number with too many digits") from error


def _no_config(origin: str, what: str) -> FabrictoolError:
    hint = "give the config.json of the model's repository, which lies beside its weights"
    return InvalidInputError.of("FT1423", f"{origin} {what}", hint=hint)


def _own_id(config: Any) -> str:
    name = config.get("_name_or_path", "")
    return name if isinstance(name, str) and re.fullmatch(MODEL_ID, name) else ""
