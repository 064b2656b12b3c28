"""From a reference to the secret, on the machine that needs it; the value is returned and written nowhere."""

from __future__ import annotations

import shutil
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import FabrictoolError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.domain.secrets import SecretRef

SOPS_SECONDS = 60.0
"""A key service may ask a person for a touch or a PIN."""


def resolve(ref: SecretRef, environment: Mapping[str, str]) -> str:
    """The secret, without line breaks at its end.

    Raises
    ------
    FabrictoolError
        FT1401 variable not set, FT1402 file not readable, FT1403 file open to others, FT1404 keyring not usable,
        FT1405 no such entry in the keyring, FT1406 sops not installed, FT1407 sops failed, FT1408 empty.
    """
    match ref.scheme:
        case "env":
            secret = _from_environment(ref, environment)
        case "file":
            secret = _from_file(ref)
        case "keyring":
            secret = _from_keyring(ref)
        case "sops":
            secret = _from_sops(ref, environment)
    secret = secret.rstrip("\r\n")
    if not secret:
        raise _failure("FT1408", ref, "is empty", "store the secret there")
    return secret


def _from_environment(ref: SecretRef, environment: Mapping[str, str]) -> str:
    if ref.name not in environment:
        hint = f"export {ref.name}=… in the shell that runs this command"
        raise _failure("FT1401", ref, f"the variable {ref.name} is not set", hint)
    return environment[ref.name]


def _from_file(ref: SecretRef) -> str:
    path = Path(ref.name).expanduser()
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            message = f"{path} can be read or changed by others (mode {stat.S_IMODE(mode):04o})"
            raise _failure("FT1403", ref, message, f"chmod 600 {path}")
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise _failure("FT1402", ref, f"cannot read {path}: {reason}", "create it, with mode 600") from error


def _from_keyring(ref: SecretRef) -> str:
    service, _, name = ref.name.partition("/")
    try:
        import keyring  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415 - an optional companion
    except ImportError as error:
        hint = "python -m pip install keyring, beside fabrictool"
        raise _failure("FT1404", ref, "the Python package keyring is not installed", hint) from error
    try:
        secret: str | None = keyring.get_password(service, name)
    except Exception as error:
        message = f"the keyring cannot be used: {type(error).__name__}"
        raise _failure("FT1404", ref, message, "unlock it, or use secret://file or secret://env") from error
    if secret is None:
        raise _failure("FT1405", ref, f"no entry {name} of {service}", f"keyring set {service} {name}")
    return secret


def _from_sops(ref: SecretRef, environment: Mapping[str, str]) -> str:
    program = shutil.which("sops", path=environment.get("PATH"))
    if program is None:
        raise _failure("FT1406", ref, "the command sops is not on the path", "install sops, or use another place")
    steps = "".join(f'["{step}"]' for step in ref.key.split("."))
    argv = [program, "decrypt", "--extract", steps, str(Path(ref.name).expanduser())]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=SOPS_SECONDS, check=False, env=dict(environment)
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
        raise _failure("FT1407", ref, f"sops did not finish: {type(error).__name__}", "run it by hand") from error
    if done.returncode != 0:
        complaint = done.stderr.strip().splitlines()
        message = f"sops ended with {done.returncode}" + (f": {complaint[-1][:200]}" if complaint else "")
        raise _failure("FT1407", ref, message, f"sops decrypt --extract '{steps}' {ref.name}, by hand")
    return done.stdout


def _failure(code: str, ref: SecretRef, message: str, hint: str) -> Any:
    return FabrictoolError.of(code, f"{ref}: {message}", thing=str(ref), hint=hint)
