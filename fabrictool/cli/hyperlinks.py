"""Links in terminals that are known to have them (OSC 8): a diagnostic's place opens its file.

An error code has none: where this release's documentation lies is not known, and `fabrictool explain` needs no network.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PROGRAMS = frozenset({"iTerm.app", "WezTerm", "vscode", "ghostty", "mintty", "Tabby", "rio"})
"""What TERM_PROGRAM says in terminals with links."""
TERMS = frozenset({"xterm-kitty", "xterm-ghostty", "alacritty", "foot", "foot-extra", "wezterm", "contour"})
VARIABLES = ("WT_SESSION", "KONSOLE_VERSION", "DOMTERM")
"""Each is set by a terminal with links alone."""
FIRST_VTE = 5001
"""GNOME's terminals crashed on links in the release before."""


def hyperlinks(environment: Mapping[str, str]) -> bool:
    """Whether the terminal shows links; FORCE_HYPERLINK, as other programs know it, goes before what is known of it."""
    if forced := environment.get("FORCE_HYPERLINK"):
        return forced != "0"
    if environment.get("STY"):  # GNU screen would show what it does not know
        return False
    vte = environment.get("VTE_VERSION", "")
    return (
        environment.get("TERM_PROGRAM") in PROGRAMS
        or environment.get("TERM") in TERMS
        or any(environment.get(variable) for variable in VARIABLES)
        or (vte.isdecimal() and int(vte) >= FIRST_VTE)
    )


def linked(text: str, place: str, file: Path) -> str:
    """`text`, in which `place` leads to `file`. It is made fit for a terminal before: no text of others gets a link."""
    if not hyperlinks(os.environ) or not _is_there(file):
        return text
    path = file.absolute().as_uri().removeprefix("file://")
    before, named, after = text.partition(place)
    # With this machine's name a terminal knows that the file of a remote shell is none of its own.
    return f"{before}\x1b]8;;file://{os.uname().nodename}{path}\x1b\\{named}\x1b]8;;\x1b\\{after}" if named else text


def _is_there(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # in a folder of somebody else's, or with too long a name
        return False
