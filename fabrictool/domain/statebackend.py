"""Where the state is kept when not on the operator's machine: the blueprint's ``state``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema, model_validator

from fabrictool.domain.quantities import Document, SecretRef, Text, problem

__all__ = ["GitState", "HttpState", "StateBackend"]

_REPOSITORY = re.compile(r"(?:https?|ssh|git|file)://[^\s]+|/[^\s]*|[A-Za-z0-9_][\w.-]*@?[\w.-]*:[^\s:][^\s]*")
_BRANCH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(?:[./][A-Za-z0-9_-]+)*")
_ADDRESS = re.compile(
    r"(https?)://(?:[^/?#\s@]*@)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?(?:[/?][^\s#]*)?"
)
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
_FORMS = "such as `ssh://git@HOST/GROUP/NAME.git` or `https://HOST/GROUP/NAME.git`"


def _repository(value: Any) -> str:
    if not isinstance(value, str) or not _REPOSITORY.fullmatch(value) or "::" in value.partition("/")[0]:
        raise problem("FT4222", "expected the URL of a Git repository", _FORMS)
    _no_password(value)
    return value


def _branch(value: Any) -> str:
    if not isinstance(value, str) or not _BRANCH.fullmatch(value) or len(value) > 200:
        raise problem("FT4222", "expected the name of a branch", "letters, digits, `_`, `-`, and single `.` and `/`")
    return value


def _address(value: Any) -> str:
    if not isinstance(value, str) or not _ADDRESS.fullmatch(value):
        raise problem("FT4222", "expected an address: http:// or https://", "such as `https://HOST/state/NAME`")
    _no_password(value)
    return value


def _no_password(value: str) -> None:
    """A user's name may stand in a URL of ssh, which needs it there."""
    head = value.partition("://")[2].partition("/")[0]
    user, at, _ = head.rpartition("@")
    if at and (":" in user or not value.startswith("ssh://")):
        hint = "leave it out: git has credential helpers, and `http` has `token: secret://…`"
        raise problem("FT4223", "a URL with credentials in it ends up in logs", hint)


def _schema(form: re.Pattern[str], title: str, example: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^(?:{form.pattern})$", "examples": [example], "title": title})


Repository = Annotated[
    str,
    PlainValidator(_repository),
    _schema(_REPOSITORY, "URL of a repository", "ssh://git@git.example.org/fabrics/demo.git"),
]
Branch = Annotated[str, PlainValidator(_branch), _schema(_BRANCH, "branch", "states/demo")]
Url = Annotated[str, PlainValidator(_address), _schema(_ADDRESS, "address", "https://state.example.org/demo")]


class GitState(Document):
    """A branch of a Git repository; a push is the compare-and-set."""

    url: Repository
    """The repository, as `git clone` takes it; no password in it."""
    branch: Branch = "fabrictool-state"
    """Its branch, made with the first write; each fabric needs one of its own."""


class HttpState(Document):
    """A server with the verbs of Terraform's ``http`` backend, such as GitLab's."""

    address: Url
    """Where the state is read (GET) and written (POST)."""
    lock_address: Url | None = None
    """Where it is locked; absent: `address`."""
    unlock_address: Url | None = None
    """Where it is unlocked; absent: `lock_address`."""
    lock_method: Literal["LOCK", "POST", "PUT"] = "LOCK"
    """GitLab's is POST."""
    unlock_method: Literal["UNLOCK", "DELETE", "POST", "PUT"] = "UNLOCK"
    """GitLab's is DELETE."""
    user: Text | None = None
    """With it the token goes as this user's password (Basic), without it as a bearer token."""
    token: SecretRef | None = None
    """Reference to the token, never the token; absent: none is sent."""

    @model_validator(mode="after")
    def _safe(self) -> HttpState:
        for address in (self.address, self.lock_address, self.unlock_address):
            parts = _ADDRESS.fullmatch(address or "")
            plain = parts is not None and parts[1] == "http" and parts[2] not in _LOOPBACK
            if self.token is not None and plain:
                raise problem("FT4224", "a token would travel unencrypted", "use https://")
        if self.user is not None and self.token is None:
            raise problem("FT4225", "a `user` without a `token` is of no use", "add `token: secret://…`")
        return self


class StateBackend(Document):
    """Where the state is kept: one of the two."""

    git: GitState | None = None
    """On a branch of a Git repository."""
    http: HttpState | None = None
    """Behind an HTTP server."""

    @model_validator(mode="after")
    def _one(self) -> StateBackend:
        if (self.git is None) == (self.http is None):
            raise problem("FT4221", "give one of `git` and `http`", "leave `state` out to keep it on this machine")
        return self
