"""What people see: a few pages without a script, which no other site can frame, and no cache keeps."""

from __future__ import annotations

import base64
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import Response

from fabrictool.gateway.keys import KEY_DIGITS
from fabrictool.gateway.login.people import label_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.gateway.keyrecords import KeyState
    from fabrictool.gateway.login.people import Person

_TEMPLATES = Path(__file__).parent / "templates"
_STYLE = (_TEMPLATES / "style.css").read_text("utf-8")
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; form-action 'self'; base-uri 'none';"
        " frame-ancestors 'none'"
    ),
    # Not `no-referrer`: with that, browsers send `Origin: null` with our own forms.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
_TO_DO = {
    "FT8141": "It may have ended meanwhile.",
    "FT8143": "Try again in a minute.",
    "FT8170": "Sign in again, in this browser and within some minutes.",
    "FT8171": "Try again in a minute. Keys that you have go on working.",
    "FT8172": "Ask the people who run this fabric to let you in.",
    "FT8173": "End one that you do not use any more.",
    "FT8174": "Nothing was changed. Go back, and send the form again.",
    "FT8175": "Try again in a few seconds.",
}
"""For who signs in; the reference of error codes says more, for who runs the fabric."""


class Pages:
    """Of one fabric's login."""

    def __init__(self, fabric: str, url: str, root: str) -> None:
        """`url`: by which people reach it; `root`: the path of that."""
        self._templates = Environment(
            loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
            lstrip_blocks=True,
        )  # fmt: skip
        self._templates.globals.update(fabric=fabric, url=url, root=root, style=Markup(_STYLE))  # noqa: S704 - our own file

    # Wide: whose keys, what may be done with them, and a new one.
    def keys(
        self, person: Person, keys: Sequence[KeyState], most: int, form: str, *, secret: str, label: str
    ) -> Response:
        """A person's keys; `secret` is that of the one that was just made."""
        rows = [
            {
                "label": label_of(state),
                "digits": state.sha256[:KEY_DIGITS],
                "sha256": state.sha256,
                "group": state.key.group,
                "made": _day(state.key.created_at),
                "ends": _day(state.key.terms.expires_at),
                "blocked": state.key.blocked,
            }
            for state in keys
        ]
        return self._page("keys.html", 200, person=person, keys=rows, most=most, form=form, secret=secret, label=label)

    def signed_out(self) -> Response:
        return self._page("signed_out.html", 200)

    def problem(self, status: int, code: str, text: str, *, back: bool = False) -> Response:
        """What went wrong, and what to do; `back`: to one's keys, else to signing in."""
        return self._page("problem.html", status, code=code, text=text, hint=_TO_DO[code], back=back)

    def _page(self, template: str, status: int, **values: Any) -> Response:
        body = self._templates.get_template(template).render(**values)
        return Response(body, status, _HEADERS, "text/html; charset=utf-8")


def _day(at: float | None) -> str:
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
