"""References to secrets: where a secret is, never what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from fabrictool.base.units import UnitError

SecretScheme = Literal["env", "file", "keyring", "sops"]

_FORMS: dict[str, tuple[re.Pattern[str], str]] = {
    "env": (re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), "secret://env/NAME"),
    "file": (re.compile(r"[^\s#]+"), "secret://file/PATH"),
    "keyring": (re.compile(r"[^\s/#]+/[^\s/#]+"), "secret://keyring/SERVICE/NAME"),
    "sops": (re.compile(r"[^\s#]+#[^\s#]+"), "secret://sops/FILE#KEY"),
}

NAMED_LIKE_ONE = re.compile(r".*(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|CREDENTIAL).*", re.IGNORECASE)
"""A variable with such a name holds a secret: it stands in no command line and in no script."""


@dataclass(frozen=True, slots=True)
class SecretRef:
    """``secret://SCHEME/NAME``, with ``#KEY`` for sops; resolved only on the machine that needs the value."""

    scheme: SecretScheme
    name: str
    """A variable, a path, ``SERVICE/NAME``, or a sops file."""
    key: str = ""
    """The entry of a sops file; dots lead into maps."""

    PATTERN: ClassVar[str] = (
        r"^secret:\/\/(env\/[A-Za-z_][A-Za-z0-9_]*|file\/[^\s#]+|keyring\/[^\s\/#]+\/[^\s\/#]+|sops\/[^\s#]+#[^\s#]+)$"
    )

    @classmethod
    def parse(cls, text: str) -> SecretRef:
        """Read a reference.

        Raises
        ------
        UnitError
            FT1118 when it is no reference (perhaps the secret itself, so the message does not repeat it), FT1119 when
            the reference is malformed.
        """
        forms = ", ".join(form for _, form in _FORMS.values())
        if not text.startswith("secret://"):
            raise UnitError("FT1118", "a secret is given by reference, never by its value", f"write {forms}")
        scheme, _, rest = text.removeprefix("secret://").partition("/")
        if scheme not in _FORMS:
            raise UnitError("FT1119", f"`{scheme}` is not a place for secrets", f"write {forms}")
        pattern, form = _FORMS[scheme]
        if not pattern.fullmatch(rest):
            raise UnitError("FT1119", f"not a {scheme} reference: `{text}`", f"write {form}")
        name, _, key = rest.partition("#")
        return cls(cast("SecretScheme", scheme), name, key)

    def __str__(self) -> str:
        return f"secret://{self.scheme}/{self.name}" + (f"#{self.key}" if self.key else "")
