"""The checks that all adapters share: what no engine may be asked for, whatever it is."""

from __future__ import annotations

import difflib
import ipaddress
import re
from typing import TYPE_CHECKING

from fabrictool.base.errors import InvalidInputError, Place, Problem
from fabrictool.domain.secrets import NAMED_LIKE_ONE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fabrictool.engines.protocol import Capabilities, EngineLaunch, NodeOfSeveral

_FLAG = re.compile(r"[a-z0-9][a-z0-9-]*")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_SECRET_FLAGS = ("admin-api-key", "api-key", "api-key-file", "hf-token", "ssl-keyfile-password")
SAID_BY_AGENTS = "the agents of a replica's nodes say this"
"""Of an option that says which node of several a process is for."""
_GGUF_PRECISION = re.compile(r"i?q[1-8](_[a-z0-9]+)*")


def check_launch(
    launch: EngineLaunch,
    can: Capabilities,
    *,
    fields: Mapping[str, str],
    refused: Mapping[str, str],
    known: frozenset[str] | None = None,
) -> None:
    """Raise all that is wrong with `launch` for an engine that can `can`.

    `fields` maps the engine's flags that follow from a field of the launch to that field's name, `refused` flags and
    variables to the reason why nobody may set them, and `known` is the whole set of options where it is closed.

    Raises
    ------
    InvalidInputError
        FT7002 bad option, FT7003 secret, FT7004 option that belongs to a field, FT7005 not supported, FT7006 public
        host, FT7007 number out of range.
    """
    problems = [*_field_problems(launch, can), *_option_problems(launch, fields, refused, known)]
    if problems:
        raise InvalidInputError(problems)


def flags(options: Mapping[str, str]) -> list[str]:
    """Pass-through options as arguments, sorted by name: same launch, same command line.

    An empty value or ``true`` gives the bare flag, ``false`` leaves it out.
    """
    argv: list[str] = []
    for name, value in sorted(options.items()):
        if _VARIABLE.fullmatch(name) or value == "false":
            continue
        argv.append(f"--{name}")
        if value not in ("", "true"):
            argv.append(value)
    return argv


def variables(options: Mapping[str, str]) -> dict[str, str]:
    """Pass-through options that are environment variables."""
    return {name: value for name, value in sorted(options.items()) if _VARIABLE.fullmatch(name)}


def socket_interfaces(node: NodeOfSeveral) -> dict[str, str]:
    """Variables by which the libraries under an engine choose the interface on which its nodes find each other."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME") if node.interface else ()
    return dict.fromkeys(names, node.interface)


def compile_folders(launch: EngineLaunch) -> dict[str, str]:
    """Variables by which the compilers under an engine choose where they keep what they made."""
    folders = {
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "TRITON_CACHE_DIR": "triton",
    }
    return {name: f"{launch.compile_dir}/{folder}" for name, folder in folders.items()} if launch.compile_dir else {}


def offline(launch: EngineLaunch) -> dict[str, str]:
    """A model that lies in a folder needs no hub: no name is looked up, and no stale lock of a cache is waited for."""
    return {"HF_HUB_OFFLINE": "1"} if launch.model.startswith("/") else {}


def nearest(name: str, among: Mapping[str, object] | frozenset[str] | tuple[str, ...]) -> str:
    """A hint: the nearest valid name, and all of them."""
    close = difflib.get_close_matches(name, sorted(among), n=1)
    return (f"did you mean {close[0]}? " if close else "") + f"valid: {', '.join(sorted(among))}"


def _field_problems(launch: EngineLaunch, can: Capabilities) -> Iterator[Problem]:
    place = Place(thing=f"engine/{launch.engine}")
    if not _is_loopback(launch.host):
        yield Problem(
            "FT7006",
            f"engine {launch.engine} would listen on {launch.host}, which others can reach",
            place,
            "engines have no authentication and some have administrative routes: let them listen on 127.0.0.1",
        )
    yield from _value_problems(launch, place)
    yield from _capability_problems(launch, can, place)


def _value_problems(launch: EngineLaunch, place: Place) -> Iterator[Problem]:
    # The interpreter would take a model or name that starts with a dash for a flag of its own.
    named = [("adapters", text) for pair in launch.adapters.items() for text in pair]
    named += [("companions", text) for pair in launch.companions.items() for text in pair]
    named += [("socket", launch.socket)] if launch.socket else []
    for field, text in (("model", launch.model), ("served_name", launch.served_name), *named):
        if not text or text.startswith("-") or not text.isprintable():
            yield Problem("FT7007", f"{field} {text!r} cannot be put on a command line", place)
    for field, number, least, most in (
        ("port", launch.port, 1, 65535),
        ("tp", launch.tp, 1, 1024),
        ("pp", launch.pp, 1, 1024),
        ("dp", launch.dp, 1, 1024),
        ("context", launch.context, 1, 1 << 30),
        ("max_num_seqs", launch.max_num_seqs, 1, 1 << 20),
    ):
        if number is not None and not least <= number <= most:
            yield Problem("FT7007", f"{field} is {number}, not from {least} to {most}", place)


# Long: a line for each thing that an engine may lack.
def _capability_problems(launch: EngineLaunch, can: Capabilities, place: Place) -> Iterator[Problem]:
    for wanted, able, text, hint in (
        (launch.pp > 1, can.pipeline_parallel, f"has no pipeline parallelism, but pp is {launch.pp}", "set pp to 1"),
        (launch.tp > 1, can.tensor_parallel, f"has no tensor parallelism, but tp is {launch.tp}", "set tp to 1"),
        (
            launch.dp > 1,
            launch.dp in can.live_tp_switch,
            f"cannot merge {launch.dp} engines while they answer",
            f"set dp to {', '.join(map(str, sorted({1, *can.live_tp_switch})))}",
        ),
        (
            launch.node is not None,
            can.several_nodes,
            "runs on one node only",
            "let the model fit a node: fewer bits, a shorter context or larger nodes",
        ),
        (
            launch.handover is not None,
            can.hands_over,
            "cannot compute prompts for another, or have them computed",
            "set the model's `phases` to unified",
        ),
        (
            bool(launch.loader),
            launch.loader in can.loaders,
            f"cannot load weights by `{launch.loader}`",
            f"set the model's `loader` to {', '.join(sorted({'default', *can.loaders}))}",
        ),
        (bool(launch.socket), can.sockets, "has no API at a Unix socket", "give it a port of loopback"),
        (
            bool(launch.adapters),
            can.serves_adapters,
            "serves no adapters by name",
            "merge each into weights of its own, and serve these as models",
        ),
        (
            bool(launch.companions),
            can.shares_memory and launch.dp == 1,
            "does not serve several models out of one memory" + ("" if launch.dp == 1 else " while its engines merge"),
            "serve each as a model of its own",
        ),
    ):
        if wanted and not able:
            yield Problem("FT7005", f"engine {launch.engine} {text}", place, hint)
    for field, precision, valid in (
        ("precision", launch.precision, can.precisions),
        ("kv_precision", launch.kv_precision, can.kv_precisions),
    ):
        if precision is None or precision in valid:
            continue
        if field == "precision" and can.gguf and _GGUF_PRECISION.fullmatch(precision):
            continue
        text = f"engine {launch.engine} does not support {field} {precision}"
        yield Problem("FT7005", text, place, nearest(precision, valid))
    if not can.hub_models and not launch.model.startswith("/"):
        yield Problem(
            "FT7005",
            f"engine {launch.engine} loads files only, and {launch.model} is not an absolute path",
            place,
            "name the model's source as file:///… or pypi://…",
        )


def _option_problems(
    launch: EngineLaunch, fields: Mapping[str, str], refused: Mapping[str, str], known: frozenset[str] | None
) -> Iterator[Problem]:
    for name, value in sorted(launch.options.items()):
        place = Place(thing=f"engine/{launch.engine}.options.{name}")
        if not (_FLAG.fullmatch(name) or _VARIABLE.fullmatch(name)):
            yield Problem(
                "FT7002",
                f"{name!r} is not an option name",
                place,
                "write a flag in small letters without its dashes, or an environment variable in capitals",
            )
        elif _is_secret(name):
            yield Problem(
                "FT7003",
                f"option {name} holds a secret, but others can read command lines and plans",
                place,
                "put it in the environment of the agent on its node",
            )
        elif name in refused:
            yield Problem("FT7002", f"option {name} is not allowed: {refused[name]}", place)
        elif name in fields:
            yield Problem(
                "FT7004", f"option {name} repeats the field {fields[name]}", place, f"set {fields[name]} instead"
            )
        elif known is not None and _FLAG.fullmatch(name) and name not in known:
            yield Problem("FT7002", f"engine {launch.engine} has no option {name}", place, nearest(name, known))
        elif not value.isprintable() or re.match(r"-+[a-zA-Z]", value):
            yield Problem(
                "FT7002",
                f"the value of option {name} looks like another flag or holds control characters",
                place,
                "one option, one value",
            )


def _is_secret(name: str) -> bool:
    # Argument parsers accept unambiguous beginnings of a flag, so a beginning is as bad as the flag.
    if _VARIABLE.fullmatch(name):
        return NAMED_LIKE_ONE.fullmatch(name) is not None
    return any(secret.startswith(name) and len(name) > 2 for secret in _SECRET_FLAGS)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
