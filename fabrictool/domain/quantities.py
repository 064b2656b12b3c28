"""Field types of the YAML documents: how each is read from text, shown in the JSON Schema, and written back.

The annotated names carry a pydantic validator; the value is the plain class of `fabrictool.base.units`.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainSerializer, PlainValidator, StringConstraints, WithJsonSchema
from pydantic_core import PydanticCustomError

from fabrictool.base import units
from fabrictool.base.ids import NAME_PATTERN
from fabrictool.domain import secrets
from fabrictool.domain.specs import HostPort as _HostPort

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Attainment",
    "Bandwidth",
    "Carbon",
    "Document",
    "Duration",
    "Endpoint",
    "HostKey",
    "Instant",
    "Latency",
    "Memory",
    "Name",
    "Power",
    "Price",
    "Rate",
    "SecretRef",
    "Source",
    "Spending",
    "Text",
    "Tokens",
    "UserName",
]


class Document(BaseModel):
    """Base of every YAML object: frozen, no unknown keys, no silent conversions. Attributes' docstrings are editor help
    (`fabrictool.base.docstrings`); pydantic would read all sources for them whenever a command starts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def problem(code: str, message: str, hint: str = "") -> PydanticCustomError:
    """A validation error that carries our own code; braces are pydantic's placeholders, hence the context."""
    return PydanticCustomError(code, "{text}", {"text": message, "hint": hint})


def _reader(kind: Any, *, zero: bool = True) -> Callable[[Any], Any]:
    """Text → `kind`; a bare number and another type get their mend."""

    def read(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise problem("FT1112", f"expected {kind.NOUN}", f"such as `{kind.EXAMPLES[0]}`")
        text = value if isinstance(value, str) else repr(value)
        try:
            quantity = kind.parse(text)
        except units.UnitError as error:
            raise problem(error.code, error.message, error.hint) from error
        if not zero and float(quantity) == 0:
            raise problem("FT1113", f"{kind.NOUN} of zero has no meaning here", f"such as `{kind.EXAMPLES[0]}`")
        return quantity

    return read


def _text_schema(kind: Any, what: str) -> WithJsonSchema:
    pattern = kind.pattern() if hasattr(kind, "pattern") else kind.PATTERN
    return WithJsonSchema(
        {"type": "string", "pattern": pattern, "examples": list(kind.EXAMPLES), "description": what, "title": what}
    )


_AS_TEXT = PlainSerializer(str, return_type=str, when_used="json")

Duration = Annotated[
    units.Duration,
    PlainValidator(_reader(units.Duration, zero=False)),
    _AS_TEXT,
    _text_schema(units.Duration, "duration"),
]
Latency = Annotated[
    units.Duration, PlainValidator(_reader(units.Duration)), _AS_TEXT, _text_schema(units.Duration, "duration")
]
Memory = Annotated[
    units.Memory, PlainValidator(_reader(units.Memory, zero=False)), _AS_TEXT, _text_schema(units.Memory, "memory")
]
Tokens = Annotated[
    units.Tokens, PlainValidator(_reader(units.Tokens, zero=False)), _AS_TEXT, _text_schema(units.Tokens, "tokens")
]
Spread = Annotated[units.Tokens, PlainValidator(_reader(units.Tokens)), _AS_TEXT, _text_schema(units.Tokens, "tokens")]
Rate = Annotated[units.Rate, PlainValidator(_reader(units.Rate)), _AS_TEXT, _text_schema(units.Rate, "request rate")]
Bandwidth = Annotated[
    units.Bandwidth,
    PlainValidator(_reader(units.Bandwidth, zero=False)),
    _AS_TEXT,
    _text_schema(units.Bandwidth, "bandwidth"),
]
Power = Annotated[units.Power, PlainValidator(_reader(units.Power)), _AS_TEXT, _text_schema(units.Power, "power")]
Carbon = Annotated[
    units.Carbon, PlainValidator(_reader(units.Carbon)), _AS_TEXT, _text_schema(units.Carbon, "carbon intensity")
]
Attainment = Annotated[
    units.Share, PlainValidator(_reader(units.Share, zero=False)), _AS_TEXT, _text_schema(units.Share, "share")
]
Margin = Annotated[units.Share, PlainValidator(_reader(units.Share)), _AS_TEXT, _text_schema(units.Share, "share")]
Instant = Annotated[
    units.Instant, PlainValidator(_reader(units.Instant)), _AS_TEXT, _text_schema(units.Instant, "point in time")
]
Price = Annotated[units.Price, PlainValidator(_reader(units.Price)), _AS_TEXT, _text_schema(units.Price, "price")]

Spending = Annotated[
    units.Spending,
    PlainValidator(_reader(units.Spending)),
    _AS_TEXT,
    _text_schema(units.Spending, "money in a time"),
]


def _secret(value: Any) -> secrets.SecretRef:
    if isinstance(value, secrets.SecretRef):
        return value
    try:
        return secrets.SecretRef.parse(value if isinstance(value, str) else "")
    except units.UnitError as error:
        raise problem(error.code, error.message, error.hint) from error


_SECRET_SCHEMA: dict[str, Any] = {
    "type": "string",
    "pattern": secrets.SecretRef.PATTERN,
    "examples": ["secret://env/NAME", "secret://file/PATH"],
    "title": "secret reference",
}
SecretRef = Annotated[secrets.SecretRef, PlainValidator(_secret), _AS_TEXT, WithJsonSchema(_SECRET_SCHEMA)]

_ENDPOINT = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")


def _endpoint(value: Any) -> _HostPort:
    if isinstance(value, _HostPort):
        return value
    match = _ENDPOINT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise problem("FT1114", "expected HOST:PORT", "such as `127.0.0.1:8011`; IPv6 as `[::1]:8011`")
    if int(match[3]) > 65535:
        raise problem("FT1114", f"port {match[3]} does not exist", "ports are 0 (any free one) to 65535")
    return _HostPort(match[1] or match[2], int(match[3]))


Endpoint = Annotated[
    _HostPort,
    PlainValidator(_endpoint),
    _AS_TEXT,
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$",
            "examples": ["127.0.0.1:8011"],
            "title": "HOST:PORT",
        }
    ),
]

_AUTHORITY = "@cert-authority"
_KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")


def _host_key(value: Any) -> str:
    text = value if isinstance(value, str) else ""
    authority = f"{_AUTHORITY} " if text.startswith(f"{_AUTHORITY} ") else ""
    kind, _, rest = text.removeprefix(authority).partition(" ")
    hint = "`ssh-keyscan HOST` prints it; check it against what the site publishes: `ssh-ed25519 AAAA…`"
    if kind not in _KEY_TYPES:
        raise problem("FT1116", "expected a public host key: TYPE BASE64", hint)
    try:
        blob = base64.b64decode(rest.split(" ")[0], validate=True)
    except (binascii.Error, ValueError) as error:
        raise problem("FT1116", "the host key is not base64: perhaps it was cut", hint) from error
    # The blob repeats the key's type after a four-octet length; a mismatch is a paste mistake.
    if blob[4 : 4 + len(kind)] != kind.encode() or len(blob) < 40:
        raise problem("FT1116", f"the host key is not of type {kind}: perhaps it was cut", hint)
    return f"{authority}{kind} {rest.split(' ')[0]}"


def _build_signer(value: Any) -> str:
    hint = "`ssh-keygen -t ed25519 -N '' -f build-key` makes a pair; give the line in build-key.pub"
    if not isinstance(value, str) or not value.startswith("ssh-ed25519 "):
        raise problem("FT1116", "expected a public Ed25519 key: ssh-ed25519 AAAA…", hint)
    try:
        return _host_key(value)
    except PydanticCustomError as error:
        raise problem("FT1116", "the public key is not a whole one: perhaps it was cut", hint) from error


BuildSigner = Annotated[
    str,
    PlainValidator(_build_signer),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^ssh-ed25519 [A-Za-z0-9+\/]+=*( .*)?$",
            "examples": ["ssh-ed25519 AAAA…"],
            "title": "public key",
        }
    ),
]
HostKey = Annotated[
    str,
    PlainValidator(_host_key),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": rf"^({_AUTHORITY} )?({'|'.join(_KEY_TYPES)}) [A-Za-z0-9+\/]+=*( .*)?$",
            "examples": ["ssh-ed25519 AAAA…", "@cert-authority ssh-ed25519 AAAA…"],
            "title": "public host key",
        }
    ),
]

_SOURCES = (
    re.compile(r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9._-]+)?"),
    re.compile(r"pypi://[A-Za-z0-9][A-Za-z0-9._-]*/\S+"),
    re.compile(r"file:///\S+"),
    re.compile(r"weights://[a-z0-9][a-z0-9._-]*(/[A-Za-z0-9_+=@][A-Za-z0-9_.+=@/-]*)?"),
)


def _source(value: Any) -> str:
    if isinstance(value, str) and any(form.fullmatch(value) for form in _SOURCES):
        return value
    hint = "write hf://ORGANISATION/NAME, pypi://DISTRIBUTION/FILE, file:///ABSOLUTE/PATH or weights://NAME"
    if isinstance(value, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", value):
        hint = f"did you mean `hf://{value}`?"
    raise problem("FT1115", "expected a model source", hint)


Source = Annotated[
    str,
    PlainValidator(_source),
    WithJsonSchema(
        {
            "type": "string",
            "pattern": r"^(hf:\/\/[A-Za-z0-9][A-Za-z0-9._-]*\/[A-Za-z0-9][A-Za-z0-9._-]*(:[A-Za-z0-9._-]+)?"
            r"|pypi:\/\/[A-Za-z0-9][A-Za-z0-9._-]*\/\S+|file:\/\/\/\S+|weights:\/\/[a-z0-9][a-z0-9._-]*(\/\S+)?)$",
            "examples": ["hf://meta-llama/Llama-3.1-8B-Instruct"],
            "title": "model source",
        }
    ),
]

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, strict=True)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1000, strict=True)]


_COLLECTOR = re.compile(
    r"https?://[A-Za-z0-9.\-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~\-/]*)?|https?://\[[0-9a-fA-F:]+\](:[0-9]{1,5})?"
)


def _collector(value: Any) -> str:
    if not isinstance(value, str) or not _COLLECTOR.fullmatch(value):
        hint = "write http://HOST:4318 or https://HOST/PATH; passwords and tokens belong in `headers`, by reference"
        raise problem("FT1257", "expected the address of a collector", hint)
    return value


CollectorUrl = Annotated[
    str,
    PlainValidator(_collector),
    WithJsonSchema({
        "type": "string", "pattern": f"^({_COLLECTOR.pattern})$", "title": "address of a collector",
        "examples": ["http://collector:4318"],
    }),
]  # fmt: skip


_SIGN_IN = re.compile(
    r"https://[A-Za-z0-9.\-]+(:[0-9]{1,5})?(/[A-Za-z0-9._~\-/]*)?"
    r"|http://(localhost|127\.[0-9.]+|\[::1\])(:[0-9]{1,5})?(/[A-Za-z0-9._~\-/]*)?"
)


def _sign_in(value: Any) -> str:
    if not isinstance(value, str) or not _SIGN_IN.fullmatch(value):
        hint = "write https://HOST or https://HOST/PATH; http:// is for an address of one's own machine only"
        raise problem("FT1259", "expected an https address", hint)
    return value


SignInUrl = Annotated[
    str,
    PlainValidator(_sign_in),
    WithJsonSchema({
        "type": "string", "pattern": f"^({_SIGN_IN.pattern})$", "title": "https address",
        "examples": ["https://sso.example.org/realms/hpc"],
    }),
]  # fmt: skip


_HASH = re.compile(r"[0-9a-f]{64}")
_WEIGHTS_FOLDER = re.compile(r"/[A-Za-z0-9_./+@-]*[A-Za-z0-9_+@-]")


def _hash(value: Any) -> str:
    if isinstance(value, str) and _HASH.fullmatch(value):
        return value
    raise problem("FT1271", "expected the hash of a list of weights", "`fabrictool weights lock NAME` prints it")


def _weights_folder(value: Any) -> str:
    if isinstance(value, str) and _WEIGHTS_FOLDER.fullmatch(value) and ".." not in value:
        return value
    hint = "an absolute path of letters, digits and . _ - + @, such as /scratch/project/weights"
    raise problem("FT1272", "expected a folder for weights", hint)


ListHash = Annotated[
    str,
    PlainValidator(_hash),
    WithJsonSchema({"type": "string", "pattern": f"^{_HASH.pattern}$", "title": "hash of a list of weights"}),
]
WeightsFolder = Annotated[
    str,
    PlainValidator(_weights_folder),
    WithJsonSchema({
        "type": "string", "pattern": r"^\/[A-Za-z0-9_.\/+@-]*[A-Za-z0-9_+@-]$", "title": "folder for weights",
        "examples": ["/scratch/project/weights"],
    }),
]  # fmt: skip


def _user(value: Any) -> str | secrets.SecretRef:
    if isinstance(value, str) and value.startswith("secret://"):
        return _secret(value)
    if isinstance(value, secrets.SecretRef) or (
        isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", value)
    ):
        return value
    raise problem("FT1117", "expected a user's name on the login node", "a name, or a reference `secret://env/NAME`")


UserName = Annotated[
    str | secrets.SecretRef,
    PlainValidator(_user),
    _AS_TEXT,
    WithJsonSchema(
        {
            "type": "string",
            "pattern": rf"^[A-Za-z_][A-Za-z0-9_.-]{{0,63}}$|{secrets.SecretRef.PATTERN}",
            "examples": ["alice", "secret://env/ALPHA_USER"],
            "title": "user",
        }
    ),
]

_PINNED = re.compile(r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*@[0-9a-f]{40}")
_WEIGHTS_PLACE = re.compile(r"https?://[A-Za-z0-9.\-:\[\]]+/[^\s@]*|pypi://[A-Za-z0-9][A-Za-z0-9._-]*/\S+|(?!\w+://).+")


def _weights_source(value: Any) -> str:
    if isinstance(value, str) and (_PINNED.fullmatch(value) or _WEIGHTS_PLACE.fullmatch(value)):
        return value
    hint = "write hf://ORGANISATION/NAME@COMMIT, https://HOST/FILE, pypi://DISTRIBUTION/FILE or a path"
    if isinstance(value, str) and value.startswith("hf://"):
        hint = f"`fabrictool weights lock NAME {value}` says the commit, all 40 digits of it, and the hash"
        raise problem("FT1273", "weights of a hub are pinned to a commit", hint)
    raise problem("FT1273", "expected a source of weights", hint)


WeightsSource = Annotated[
    str,
    PlainValidator(_weights_source),
    WithJsonSchema({
        "type": "string", "pattern": f"^({_PINNED.pattern}|{_WEIGHTS_PLACE.pattern})$".replace("/", r"\/"),
        "title": "source of weights",
        "examples": ["hf://meta-llama/Llama-3.1-8B-Instruct@0e9e39f249a16976918f6564b8830bc894c89659"],
    }),
]  # fmt: skip
