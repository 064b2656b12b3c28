"""Plans that were saved for a review: the plan, and the id that stands in what was reviewed.

The id is the digest of all that is carried out, and is held against the rest of the file before anything is done. That
finds what was edited by hand or by accident; who edits on purpose can compute another id, and is found by a signature.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool import __version__
from fabrictool.base.errors import InvalidInputError
from fabrictool.base.files import file_error
from fabrictool.domain.plan import PLAN_API, decode_plan

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.domain.plan import Plan

NAMESPACE = "fabrictool-plan"
"""What a signature is for (``ssh-keygen -n``): one that was made for a Git commit is none of a plan."""
SECONDS = 30.0


class _Envelope(msgspec.Struct, frozen=True):
    """What a file has beside the plan."""

    id: str = ""
    release: str = ""


def plan_document(plan: Plan) -> dict[str, Any]:
    """The plan with its id and the release that made it, as JSON has it."""
    document: dict[str, Any] = msgspec.to_builtins(plan)
    return {"id": plan.id, "release": __version__, **document}


def encode_file(plan: Plan) -> bytes:
    """JSON with sorted keys, readable in a review; the same plan gives the same bytes."""
    return msgspec.json.format(msgspec.json.encode(plan_document(plan), order="sorted"), indent=1) + b"\n"


def read_plan(path: Path, signers: Path | None = None) -> Plan:
    """A saved plan that is as it was saved; with `signers`, one that somebody of that file has signed.

    Raises
    ------
    InvalidInputError
        FT4006 the file is something else, FT4021 it was edited, FT4022 not signed by one of `signers`.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise file_error(error, path) from error
    if signers is not None:
        check_signature(data, path, signers)
    hint = "make one with `fabrictool plan -o FILE`"
    try:
        plan, envelope = decode_plan(data), msgspec.json.decode(data, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError.of("FT4006", f"not a saved plan: {error}", file=str(path), hint=hint) from error
    if plan.api != PLAN_API:
        raise InvalidInputError.of("FT4006", f"the plan has version {plan.api}, not {PLAN_API}", file=str(path))
    if not envelope.id:
        message = "the plan has no id: an earlier release saved it, or it was edited"
        raise InvalidInputError.of("FT4006", message, file=str(path), hint=hint)
    if envelope.id != plan.id and envelope.release != __version__:
        message = f"release {envelope.release or 'before 0.1'} saved the plan, and this is {__version__}"
        raise InvalidInputError.of("FT4006", message, file=str(path), hint=hint)
    if envelope.id != plan.id:
        message = f"the plan was edited: its content has the id {plan.id[:8]}, the file says {envelope.id[:8]}"
        hint = "change the blueprint and run `fabrictool plan -o FILE` again; nothing was changed"
        raise InvalidInputError.of("FT4021", message, file=str(path), hint=hint)
    return plan


def check_signature(data: bytes, path: Path, signers: Path) -> str:
    """Who signed `data`, of those whom `signers` lists (``ssh-keygen``'s ALLOWED SIGNERS); ``PLAN.sig`` has it.

    Raises
    ------
    InvalidInputError
        FT4022 not signed, by nobody of the list, or for something else; FT4302 no such file.
    """
    signature = path.with_name(f"{path.name}.sig")
    hint = f"ssh-keygen -Y sign -n {NAMESPACE} -f KEY {path}, by somebody whom {signers} lists"
    for file in (signature, signers):
        try:
            file.read_bytes()
        except FileNotFoundError as error:
            if file is signature:
                message = f"the plan is not signed: there is no {signature}"
                raise InvalidInputError.of("FT4022", message, file=str(path), hint=hint) from error
            raise file_error(error, file) from error
        except OSError as error:
            raise file_error(error, file) from error
    who = _keygen("find-principals", data, signature, signers).stdout.decode(errors="replace").splitlines()
    for principal in who:
        done = _keygen("verify", data, signature, signers, "-I", principal, "-n", NAMESPACE)
        if done.returncode == 0:
            return principal
    why = "it is not theirs, or not of this file as it is now" if who else f"{signers} does not list its key"
    raise InvalidInputError.of("FT4022", f"the plan's signature is refused: {why}", file=str(signature), hint=hint)


def _keygen(
    verb: str, data: bytes, signature: Path, signers: Path, *options: str
) -> subprocess.CompletedProcess[bytes]:
    argv = ["ssh-keygen", "-Y", verb, "-s", str(signature), "-f", str(signers), *options]
    try:
        return subprocess.run(argv, input=data, capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"signatures are checked by ssh-keygen, which did not run: {type(error).__name__}"
        raise InvalidInputError.of("FT4022", message, hint="install OpenSSH 8.2 or newer") from error
