"""``python -m fabrictool.agent.join TOKENFILE …``: an agent that a job starts by itself; 0 when it left in order.

It offers one OpenAI-compatible server, which runs already or is started here, to the federation that the token names;
or the node itself, idle, to be assigned a model later.
No machine of an operator takes part: the token's issuer signs its key, the token says where the gateways are.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from fabrictool.agent.admission import ask_issuer, private_folder, private_text
from fabrictool.agent.bodies import check_sayable
from fabrictool.agent.hardware import read_hardware
from fabrictool.agent.renewing import RenewalWatch
from fabrictool.agent.running import run_agent
from fabrictool.agent.unit import run_unit
from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import FabrictoolError, UsageError
from fabrictool.base.files import write_atomic
from fabrictool.base.runfolder import RunFolder
from fabrictool.base.settings import Settings
from fabrictool.domain.specs import AgentSpec, AgentTrust, BroughtEngine, IdleOffer, encode_spec
from fabrictool.engines.adapter import adapter
from fabrictool.mesh.identity import Credential
from fabrictool.mesh.jointoken import JoinTokenError, check_time, read_token
from fabrictool.mesh.records import RecordError
from fabrictool.mesh.transport.tls import IdentityFiles

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fabrictool.base.clock import Clock
    from fabrictool.mesh.jointoken import JoinToken
    from fabrictool.mesh.records import NodeHardware

ENGINE = "external"
LOOPBACK = ("127.0.0.1", "localhost")
"""Where a server that is offered may listen: agents forward to 127.0.0.1 alone."""
_NAMES = ("SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID")


_TEXTS = (
    "model", "url", "provider", "folder", "site", "cluster", "device", "groups", "gateways-of", "engines", "allow",
)  # fmt: skip


class JoinOptions(argparse.Namespace):
    """The command line, read."""

    token: str
    model: str
    url: str
    command: list[str]
    provider: str
    bind: str | None
    bind_file: str
    groups: str
    gateways_of: str
    folder: str
    site: str
    cluster: str
    device: str
    devices: int
    no_site_links: bool
    drain: float
    start_timeout: float
    idle: bool
    engines: str
    allow: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # it raises instead of ending the process
        raise UsageError.of("FT9001", message, hint="fabrictool agent join --help")


def read_options(arguments: Sequence[str]) -> JoinOptions:
    """Raises FT9001 for what is no command line of ours, FT6414 for one that names no server."""
    own, command = list(arguments), []
    if "--" in own:
        cut = own.index("--")
        own, command = own[:cut], own[cut + 1 :]
    parser = _Parser(prog="fabrictool agent join", allow_abbrev=False)
    parser.add_argument("token")
    for name in _TEXTS:
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--idle", action="store_true")
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument("--bind")
    bound.add_argument("--bind-file", default="")
    parser.add_argument("--no-site-links", action="store_true")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--drain", type=float, default=20.0)
    parser.add_argument("--start-timeout", type=float, default=600.0)
    options = parser.parse_args(own, JoinOptions())
    options.command = command
    if options.idle:
        if options.url or command or options.model:
            message = "an idle node has no server and no model yet: `--idle` goes with none of these"
            raise JoinTokenError.of("FT6414", message)
        return options
    if options.engines or options.allow:
        raise JoinTokenError.of(
            "FT6414", "`--engines` and `--allow` say what an idle node may be assigned: add `--idle`"
        )
    if bool(options.url) == bool(command):
        message = "name one server: `--url` of a running one, or `-- COMMAND` that starts one, or none with `--idle`"
        raise JoinTokenError.of("FT6414", message)
    if command and not any("{port}" in word for word in command):
        message = "the command does not say where the port goes"
        raise JoinTokenError.of("FT6414", message, hint="write {port}, such as: -- vllm serve MODEL --port {port}")
    return options


def join_spec(
    options: JoinOptions, token: JoinToken, session: str, environment: Mapping[str, str], host: str
) -> AgentSpec:
    """What the agent is told, as `apply` would have written it."""
    claims = token.claims
    if options.model and token.models and options.model not in token.models:
        message = f"the join token allows {', '.join(token.models)}, not {options.model}"
        raise JoinTokenError.of("FT6407", message)
    return AgentSpec(
        fabric=token.fabric,
        provider=claims.provider,
        site=options.site or claims.provider,
        cluster=options.cluster or environment.get("SLURM_CLUSTER_NAME", "") or host,
        partition=environment.get("SLURMD_NODENAME", "") or host,
        replica=f"joined/{session[:8]}",
        model=options.model,
        source="",
        engine=ENGINE,
        device=options.device or ("" if options.idle else "unknown"),
        devices=options.devices,
        hubs=token.gateways,
        drain_s=options.drain,
        start_timeout_s=options.start_timeout,
        brought=BroughtEngine(port=port_of(options.url), command=tuple(options.command), models=token.models),
        trust=AgentTrust(groups=_names(options.groups) or None, gateways=_names(options.gateways_of)),
        site_links=False if options.no_site_links else msgspec.UNSET,
        idle=_offer(options) if options.idle else msgspec.UNSET,
    )


def _offer(options: JoinOptions) -> IdleOffer:
    """Raises FT7001 for an engine that there is not, FT6414 for one that cannot be assigned."""
    for name in _names(options.engines):
        if adapter(name).capabilities.brought:
            raise JoinTokenError.of("FT6414", f"engine {name} starts a command of the job: nobody can assign it")
    return IdleOffer(engines=_names(options.engines), sources=_names(options.allow))


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in listed.split(",") if name.strip())


def check_names(spec: AgentSpec, federation: str, hardware: NodeHardware | None = None) -> None:
    """Raises FT9001 when the federation would refuse what the agent says of itself: before a use is spent on it."""
    longest = max((spec.model, spec.site, spec.cluster, spec.partition, spec.device), key=len)
    try:
        check_sayable(spec, federation, hardware)
    except RecordError as error:
        message = f"the names are too long for the registry, such as {longest[:40]!r}: {error.problems[0].message}"
        hint = "give shorter ones with --model, --site, --cluster and --device"
        raise UsageError.of("FT9001", message, hint=hint) from error


def port_of(url: str) -> int:
    """Of a server on this machine's loopback, 0 for ""; raises FT6414 for any other address."""
    if not url:
        return 0
    try:
        parts = urlsplit(url)
        usable = parts.scheme == "http" and parts.hostname in LOOPBACK and parts.path in ("", "/", "/v1", "/v1/")
        port = parts.port
    except ValueError:
        usable, port = False, None
    if not usable or not port:
        hint = "write http://127.0.0.1:PORT; a server that listens elsewhere would be open to other users, too"
        raise JoinTokenError.of("FT6414", f"{url} is not a server on this machine's loopback", hint=hint)
    return port


def job_end(environment: Mapping[str, str]) -> float | None:
    """Wall seconds at which the Slurm job ends that we are in."""
    told = environment.get("SLURM_JOB_END_TIME", "")
    return float(told) if told.isdecimal() and int(told) else None


def shown_text(bind: str | None, environment: Mapping[str, str]) -> str:
    """What is shown to an issuer whose token is bound: what is given, or the job's id, of an array the array's."""
    return bind if bind is not None else next((environment[name] for name in _NAMES if environment.get(name)), "")


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Join, serve, leave; the key and all that belongs to it are gone when this returns."""
    folder = None
    try:
        options = read_options(arguments)
        text = private_text(options.token, "token")
        token = read_token(text).token
        check_time(token, now=time.time())
        if token.role != "agent":
            raise JoinTokenError.of("FT6407", f"the join token starts a {token.role}, not an agent")
        if options.provider not in ("", token.claims.provider):
            message = f"the join token is provider {token.claims.provider}'s, not {options.provider}'s"
            raise JoinTokenError.of("FT6403", message)
        ends_at = job_end(environment)
        host = socket.gethostname()
        # What is wrong with it is said before a use is spent.
        wanted = join_spec(options, token, "0" * 32, environment, host)
        check_names(wanted, token.claims.federation, read_hardware(environment) if options.idle else None)
        bind = private_text(options.bind_file, "text") if options.bind_file else options.bind
        folder = private_folder(options.folder, environment)
        session = ask_issuer(token, text, ends_at=ends_at, shown=shown_text(bind, environment))
        spec = join_spec(options, token, session.claims.session, environment, host)
        _write(folder, spec, session, token)
        cache = Settings.from_environment().cache_path
        clock = SystemClock()
        return run_unit(
            RunFolder(folder),
            AgentSpec,
            lambda wanted, here: _run(wanted, here, RenewalWatch(token, here, clock, ends_at), clock, cache, ends_at),
            stays=True,
        )
    except FabrictoolError as error:
        for problem in error.problems:
            print(problem.render(), file=sys.stderr)  # noqa: T201 - the program's last words, before there is a log
        return error.exit_code
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


# Wide: as `run_agent`, and what renews its certificate meanwhile.
async def _run(
    spec: AgentSpec, folder: RunFolder, renewal: RenewalWatch, clock: Clock, cache: Path, ends_at: float | None
) -> str:
    renewing = asyncio.create_task(renewal.run())
    try:
        return await run_agent(spec, folder, clock, cache, ends_at)
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)


def _write(folder: Path, spec: AgentSpec, session: Credential, token: JoinToken) -> None:
    """The run folder, as a cluster would have it."""
    here = RunFolder(folder)
    write_atomic(here.spec, encode_spec(spec), mode=0o600)
    IdentityFiles(here.identity).write(session, Credential(session.key, (token.root,)))


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # until the agent listens to them: clear away and go
        signal.signal(number, lambda heard, _: sys.exit(128 + heard))
    sys.exit(main(sys.argv[1:], os.environ))
