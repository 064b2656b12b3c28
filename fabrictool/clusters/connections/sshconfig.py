"""A host as the operator's own OpenSSH knows it: where its configuration leads, and the keys in ``known_hosts``."""

from __future__ import annotations

import subprocess
from pathlib import Path

from fabrictool.base.errors import UnreachableError, UsageError
from fabrictool.clusters.connections.pins import SIGNATURES
from fabrictool.clusters.connections.protocol import Endpoint

ASK_S = 10.0


def config_file() -> Path | None:
    """The operator's, where there is one."""
    path = Path("~/.ssh/config").expanduser()
    return path if path.is_file() else None


def endpoint_by_config(host: str, user: str = "", port: int | None = None) -> Endpoint:
    """Where `ssh [USER@]HOST` goes, with the host keys that the operator has accepted before: no other one will do.

    Raises
    ------
    UsageError
        FT5304 when no file of known hosts has a key of it.
    UnreachableError
        FT5312 when OpenSSH's client is missing here, FT5343 when it does not understand its own configuration.
    """
    config = config_file()
    words = ["-F", str(config) if config else "none", *(["-l", user] if user else [])]
    words += ["-p", str(port)] if port is not None else []
    known: dict[str, str] = {}
    for line in _said(["ssh", "-G", *words, "--", host]).splitlines():
        key, _, value = line.partition(" ")
        known.setdefault(key, value)
    name, number = known.get("hostname", host), int(known.get("port", "22"))
    alias = known.get("hostkeyalias") or (name if number == 22 else f"[{name}]:{number}")
    files = f"{known.get('userknownhostsfile', '')} {known.get('globalknownhostsfile', '')}".split()
    keys = _keys(alias, [Path(file).expanduser() for file in files])
    if not keys:
        message = f"no host key of {host} is known: your known_hosts has none of {alias}"
        accept = " ".join(
            ["ssh", *(["-l", user] if user else []), *(["-p", str(port)] if port is not None else []), host]
        )
        hint = f"compare it first (`fabrictool trust host {name}:{number}`), then accept it once with `{accept}`"
        raise UsageError.of("FT5304", message, hint=hint)
    return Endpoint(host, number, known.get("user", user), keys)


def _keys(alias: str, files: list[Path]) -> tuple[str, ...]:
    """Those of a kind that is supported and not revoked; hashed names are found, too."""
    keys: dict[str, None] = {}
    revoked = set()
    for file in files:
        if not file.is_file():
            continue
        for line in _said(["ssh-keygen", "-F", alias, "-f", str(file)], failing=True).splitlines():
            words = line.split()
            if not words or words[0] == "#":
                continue
            marker = words.pop(0) if words[0].startswith("@") else ""
            if len(words) >= 3:
                key = f"{words[1]} {words[2]}"
                revoked.update([key] if marker == "@revoked" else [])
                keys[f"{marker} {key}".strip()] = None
    usable = [key for key in keys if key.split()[-2] in SIGNATURES and " ".join(key.split()[-2:]) not in revoked]
    # A certificate of a revoked key would pass by its authority alone.
    return tuple(key for key in usable if not (revoked and key.startswith("@")))


def _said(argv: list[str], *, failing: bool = False) -> str:
    """`failing`: its exit status is no answer, for it says whether something was found."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False
        )
    except FileNotFoundError as error:
        raise UnreachableError.of("FT5312", f"the program `{argv[0]}` is not installed here") from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError.of("FT5343", f"`{argv[0]}` does not answer") from error
    if done.returncode != 0 and not failing:
        words = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise UnreachableError.of("FT5343", f"`{' '.join(argv[:2])}` failed: {words[-1]}")
    return done.stdout
