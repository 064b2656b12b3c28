"""Command lines for a login node whose shell, start-up files and locale are not known. Pure text.

What sshd hands to the user's login shell (bash, dash, tcsh, fish, …) is one line of plain ASCII that all of them read
alike. It replaces that shell by ``/bin/sh``, which decodes the real command. Before the command begins, a token is
printed on both outputs, so that whatever start-up files said can be cut off; after it has ended, its status comes on
stderr, so that an answer is told from a connection that broke.
"""

from __future__ import annotations

import re
import secrets
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fabrictool.clusters.connections.protocol import Completed

if TYPE_CHECKING:
    from collections.abc import Sequence

_PLAIN = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-./,:=@+")

# $1 is the token. The shell's own remarks ("Killed") go nowhere; fd 4 is the stderr that the caller reads. The subshell
# runs programs only: `echo` and `test` are the system's, not the shell's.
_RUN = """\
t=$1; shift
printf "%s %s\\n" "$t" "$$"; printf "%s\\n" "$t" >&2
exec 4>&2 2>/dev/null
(exec "$@") 2>&4 4>&-
s=$?
printf "%s-end %s\\n" "$t" "$s" >&4
exit $s"""

# Stdin is a life line: when it ends, because the caller left or the connection broke, the command's process group does.
_STREAM = """\
printf "%s %s\\n" "$1" "$$"; shift
exec 3<&0
{ trap "" TERM HUP; cat <&3; kill -s TERM -- -$$ || kill -s TERM $$; sleep 3; kill -s KILL -- -$$; } >/dev/null 2>&1 &
exec "$@" </dev/null 3<&- 2>/dev/null"""

END_GROUP = """\
kill -s TERM -- "-$1" || exit 0
i=0
while kill -s 0 -- "-$1"; do
  i=$((i+1)); [ $i -gt 20 ] && kill -s KILL -- "-$1"; [ $i -gt 30 ] && exit 1
  sleep 0.1
done"""
"""Ends the process group $1: asked first, forced after two seconds; status 1 when it is still there."""


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A command line to send, and how to read what comes back."""

    text: str
    """What goes to sshd."""
    token: bytes
    """Printed before the command's own output."""

    def begun(self, stdout: bytes) -> int | None:
        """The command's process group, or None when it is not known to have begun."""
        match = re.search(re.escape(self.token) + rb" ([0-9]+)\n", stdout)
        return int(match[1]) if match else None

    def completed(self, stdout: bytes, stderr: bytes, status: int | None) -> Completed | None:
        """The command's own answer, without the login shell's noise; None when it is not known to have ended."""
        begin = re.search(re.escape(self.token) + rb" [0-9]+\n", stdout)
        if begin is None:
            return None
        _, _, errors = stderr.partition(self.token + b"\n")
        trailer = re.search(re.escape(self.token) + rb"-end ([0-9]+)\n", errors)
        if trailer is not None:
            return Completed(int(trailer[1]), stdout[begin.end() :], errors[: trailer.start()])
        return None if status is None else Completed(status, stdout[begin.end() :], errors)


def wrap(argv: Sequence[str]) -> Wrapped:
    """For a command that runs to its end and reads its stdin."""
    return _wrap(_RUN, argv)


def wrap_stream(argv: Sequence[str]) -> Wrapped:
    """For a command without stdin that ends when the channel's stdin does; its stderr is dropped."""
    return _wrap(_STREAM, argv)


def _wrap(script: str, argv: Sequence[str]) -> Wrapped:
    if not argv or not argv[0] or argv[0].startswith("-") or any("\0" in word for word in argv):
        message = "a command has a name that is no option, and no NUL in its words"
        raise ValueError(message)
    token = fresh_token()
    return Wrapped(portable(shlex.join(["exec", "/bin/sh", "-c", script, "sh", token, *argv])), token.encode())


def fresh_token() -> str:
    """A word that no output holds by chance."""
    return f"ft-{secrets.token_hex(8)}"


def portable(script: str) -> str:
    r"""A line that makes any login shell run `script` in ``/bin/sh``.

    The script travels as an argument of ``printf %b`` with every byte that some shell might read in its own way as a
    ``\0ooo`` escape: quoting rules of csh (``!``, line ends) and fish (backslashes) differ from sh's.
    """
    encoded = "".join(chr(byte) if byte in _PLAIN else f"\\0{byte:03o}" for byte in _bytes(script))
    return f"""exec /bin/sh -c 'eval "$(printf %b "$1")"' sh '{encoded}'"""


def _bytes(text: str) -> bytes:
    """UTF-8; file names that are not come from `os.fsdecode` with surrogates, and go back to their bytes."""
    return text.encode("utf-8", "surrogateescape")
