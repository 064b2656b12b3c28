"""One table from what SSH implementations say to the tool's coded errors; whichever carries it, the code is the same.

The place of each is ``host/NAME:PORT`` (never the user's name, which may come from a secret).
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fabrictool.clusters.connections.protocol import Endpoint

LONGEST_QUOTE = 200


def thing(endpoint: Endpoint) -> str:
    """How a problem names a host: without the user's name."""
    return f"host/{endpoint.host}:{endpoint.port}"


# -- before anything ran ---------------------------------------------------------------------------------------


def unreachable(endpoint: Endpoint, why: str) -> FabrictoolError:
    """FT5301: refused, no route, no such name, or closed before anybody could log in."""
    hint = "check the name, the port, the jump hosts and your network; nothing on this cluster was touched"
    message = f"{endpoint.host}:{endpoint.port} cannot be reached: {quoted(_plain(why))}"
    return UnreachableError.of("FT5301", message, thing=thing(endpoint), hint=hint, transient=True)


def _plain(why: str) -> str:
    """Without the number of an operating system's error and the address, which stands before it."""
    number = re.match(r"\[Errno (\d+)\]", why)
    return os.strerror(int(number[1])).lower() if number else why


def no_answer(endpoint: Endpoint, what: str, seconds: float) -> FabrictoolError:
    """FT5302: `what` ("no connection", "no login") took too long."""
    message = f"{endpoint.host}:{endpoint.port}: {what} within {seconds:.0f} s"
    hint = "a firewall may drop packets, or the login node is overloaded; try `ssh` by hand"
    return UnreachableError.of("FT5302", message, thing=thing(endpoint), hint=hint, transient=True)


def wrong_host_key(endpoint: Endpoint, seen: str, pinned: Sequence[str], why: str = "") -> FabrictoolError:
    """FT5303: the key shown is none of the pinned ones, or its certificate is not to be believed."""
    message = (
        f"{endpoint.host}:{endpoint.port} shows the host key {seen or 'of another kind'}"
        f"{f' ({why})' if why else ''}; pinned: {', '.join(pinned)}"
    )
    hint = (
        f"do not connect before you know why. If the site announced a new key, "
        f"`fabrictool trust host {target(endpoint)}` prints its keys, to compare and to paste into the inventory"
    )
    return FabrictoolError.of("FT5303", message, thing=thing(endpoint), hint=hint)


def no_pins(endpoint: Endpoint) -> FabrictoolError:
    """FT5304: no key of this host is pinned."""
    hint = f"`fabrictool trust host {target(endpoint)}` prints its keys; compare them with what the site publishes"
    message = f"no host key is pinned for {endpoint.host}:{endpoint.port}"
    return FabrictoolError.of("FT5304", message, thing=thing(endpoint), hint=hint)


def bad_pin(endpoint: Endpoint, text: str) -> FabrictoolError:
    """FT5305: a pinned key cannot be read."""
    hint = f"`fabrictool trust host {target(endpoint)}` prints the lines to paste"
    message = f"the pinned host key `{text[:40]}…` is not a public key"
    return FabrictoolError.of("FT5305", message, thing=thing(endpoint), hint=hint)


def refused(endpoint: Endpoint, tried: str, offered: str = "", by_hand: str = "") -> FabrictoolError:
    """FT5306: the login node knows none of our keys, or wants what only a person can give."""
    wants_person = "keyboard-interactive" in offered or "partial" in offered
    hint = f"tried: {tried}; is the public key registered with the site, and is the user name right?"
    if by_hand:
        hint += (
            f" If the site asks for a password or a code, open a connection by hand and set `control_path`: {by_hand}"
        )
    elif wants_person:
        hint += " If the site asks for a code, set `transport: openssh` and `control_path` in the inventory"
    message = f"{endpoint.host}:{endpoint.port} refused the login{f' (it offers: {offered})' if offered else ''}"
    return FabrictoolError.of("FT5306", message, thing=thing(endpoint), hint=hint)


def certificate_unusable(endpoint: Endpoint, what: str) -> FabrictoolError:
    """FT5307: expired or not yet valid."""
    hint = "get a new one from your site's SSH key service, then run the command again"
    return FabrictoolError.of("FT5307", f"the SSH certificate {what}", thing=thing(endpoint), hint=hint)


def certificate_ends_soon(endpoint: Endpoint, what: str) -> FabrictoolError:
    """FT5308: this one would expire before the work is done."""
    hint = "get a new one from your site's SSH key service first: this one would expire before the work is done"
    return FabrictoolError.of("FT5308", f"the SSH certificate {what}", thing=thing(endpoint), hint=hint)


def no_identity(endpoint: Endpoint, what: str, hint: str) -> FabrictoolError:
    """FT5309: the private key that the inventory names cannot be used."""
    return FabrictoolError.of("FT5309", what, thing=thing(endpoint), hint=hint)


def no_protocol(endpoint: Endpoint, why: str) -> FabrictoolError:
    """FT5310: no SSH server, or no algorithm in common."""
    hint = "is the port right? An old server may offer no safe algorithm: ask the site"
    message = f"cannot agree on an SSH protocol with {endpoint.host}:{endpoint.port}: {quoted(why)}"
    return FabrictoolError.of("FT5310", message, thing=thing(endpoint), hint=hint)


def not_open(endpoint: Endpoint, path: str, by_hand: str) -> FabrictoolError:
    """FT5311: the connection that a person opens by hand is not there."""
    message = f"no open connection at {path}"
    return UnreachableError.of(
        "FT5311", message, thing=thing(endpoint), hint=f"open one and leave it open: {by_hand}", transient=True
    )


def no_program(endpoint: Endpoint, name: str) -> FabrictoolError:
    """FT5312: OpenSSH's client is missing here."""
    return FabrictoolError.of(
        "FT5312", f"the program `{name}` is not installed here", thing=thing(endpoint), hint="install OpenSSH's client"
    )


def bad_name(what: str, text: str) -> FabrictoolError:
    """FT5313: a host or user that could be taken for an option or a second line."""
    message = f"`{quoted(text)}` is not a {what}"
    return FabrictoolError.of("FT5313", message, thing="host", hint="correct the login node in the inventory")


# -- commands --------------------------------------------------------------------------------------------------


def lost(endpoint: Endpoint, what: str, why: str) -> FabrictoolError:
    """FT5321: the connection broke during `what`; whether it has run is not known."""
    message = f"the connection broke during {what} ({quoted(why) or 'no reason given'}); whether it ran is not known"
    hint = "the next command connects again; check what happened before you repeat it"
    return UnreachableError.of("FT5321", message, thing=thing(endpoint), hint=hint, transient=True)


def channel_refused(endpoint: Endpoint, why: str) -> FabrictoolError:
    """FT5322: the server opens no further session; nothing ran."""
    message = f"the login node opened no session ({quoted(why)}); nothing ran"
    hint = "the limit of sessions (MaxSessions) or of processes is reached there; try later"
    return UnreachableError.of("FT5322", message, thing=thing(endpoint), hint=hint, transient=True)


def timed_out(endpoint: Endpoint, what: str, seconds: float, *, ended: bool) -> FabrictoolError:
    """FT5323: a command took too long; `ended`: it does not run any more."""
    after = "it was stopped" if ended else "it may still be running"
    message = f"{what} did not end within {seconds:g} s; {after}"
    hint = "the login node may be overloaded, or a file system hangs there; try later"
    return UnreachableError.of("FT5323", message, thing=thing(endpoint), hint=hint, transient=True)


def no_shell(endpoint: Endpoint, status: int | None, output: bytes) -> FabrictoolError:
    """FT5324: the login shell answered, and did not run the command."""
    text = quoted(output.decode(errors="replace")) or "nothing"
    message = f"the login shell ran no command (status {status}) and said: {text}"
    hint = "the account may be closed or restricted, or its start-up files may end the shell"
    return FabrictoolError.of("FT5324", message, thing=thing(endpoint), hint=hint)


def named(argv: Sequence[str]) -> str:
    """A command for a message: a program of ours by its name, others by their first words; no secrets are in them."""
    if list(argv[:2]) == ["sh", "-c"] and len(argv) > 3:
        return f"`{argv[3]}`"
    text = shlex.join(argv[:4]) + (" …" if len(argv) > 4 else "")
    return f"`{text if len(text) <= 80 else text[:79] + '…'}`"


# -- what the libraries say, for failures of which their own types tell all --------------------------------------

_NOT_SSH = r"no match|matching|protocol|unsupported|incompatible|not negotiate|Unable to negotiate|bad packet|version"


def of_connecting(endpoint: Endpoint, error: BaseException | str) -> FabrictoolError:
    """For any failure before a login that is no host key's and no identity's: FT5301 or FT5310.

    A server that hangs up before it has shown a key is overloaded or not ready (FT5301, transient); one whose answer
    is no SSH, or with which no algorithm is common, will be the same next time (FT5310).
    """
    why = str(getattr(error, "reason", "") or error) or type(error).__name__
    if isinstance(error, OSError) or re.search(
        r"connection (lost|closed|reset|refused)|open failed", why, re.IGNORECASE
    ):
        return unreachable(endpoint, why)
    return no_protocol(endpoint, why) if re.search(_NOT_SSH, why, re.IGNORECASE) else unreachable(endpoint, why)


# -- files: (pattern of the C locale's and dash's words, code, what) ----------------------------------------------

_FILE_WORDS = (
    (r"No space left|quota exceeded|File too large", "FT5333", "no space left there", "free space or raise the quota"),
    (r"Permission denied|Read-only|not permitted", "FT5332", "access is denied", "choose a folder of your own"),
    (r"No such file|nonexistent|Not a directory", "FT5331", "no such file or folder", "check the path"),
)


def file_failure(endpoint: Endpoint, path: str, stderr: bytes) -> FabrictoolError:
    """FT5331 missing, FT5332 no rights, FT5333 no space or quota, FT5334 anything else."""
    text = stderr.decode(errors="replace").strip()
    for pattern, code, what, hint in _FILE_WORDS:
        if re.search(pattern, text, re.IGNORECASE):
            return FabrictoolError.of(code, f"{path}: {what}", thing=thing(endpoint), hint=hint)
    message = f"{path}: {quoted(text) or 'could not be read or written'}"
    return FabrictoolError.of("FT5334", message, thing=thing(endpoint), hint="check the path on the login node")


def quoted(text: str) -> str:
    """Foreign words for a message: one line, printable, not long."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= LONGEST_QUOTE else line[: LONGEST_QUOTE - 1] + "…"


def alone(endpoint: Endpoint) -> Endpoint:
    """The same host, without those on the way to it."""
    return replace(endpoint, jumps=())


def target(endpoint: Endpoint) -> str:
    """``HOST`` or ``HOST:PORT``, as `trust host` takes it."""
    return endpoint.host if endpoint.port == 22 else f"{endpoint.host}:{endpoint.port}"
