"""The checks of ``doctor CLUSTER``: over SSH, and in one short job."""

from __future__ import annotations

import contextlib
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fabrictool.base.clock import duration_text
from fabrictool.base.errors import FabrictoolError, UsageError
from fabrictool.clusters.checks.certificates import NEEDED_S
from fabrictool.clusters.checks.login import (
    SLOW_SHELL_S,
    clock,
    cron_check,
    folder_checks,
    noise,
    partition_checks,
    scheduler_checks,
)
from fabrictool.clusters.checks.node import Visit, in_a_job, partition_for
from fabrictool.clusters.checks.promises import file_of, promises_of
from fabrictool.clusters.checks.result import Check, failed, guarded
from fabrictool.clusters.connections.commands import wrap
from fabrictool.clusters.connections.factory import at_keyboard, connect_login, endpoint_of, login_of
from fabrictool.clusters.connections.identities import certificate_end, check_certificate
from fabrictool.clusters.connections.pins import pins
from fabrictool.clusters.connections.settings import ConnectionLimits
from fabrictool.clusters.connections.shell_verbs import ShellVerbs
from fabrictool.clusters.environment.interpreter import python_of
from fabrictool.clusters.environment.site import EnvironmentFolder
from fabrictool.clusters.kinds import scheduler_of
from fabrictool.clusters.schedulers import shell
from fabrictool.clusters.survey import read_survey

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabrictool.clusters.connections.protocol import Connection, Endpoint
    from fabrictool.clusters.schedulers.protocol import Scheduler
    from fabrictool.clusters.survey import Survey
    from fabrictool.domain.inventory import ClusterSpec, Inventory, Login
    from fabrictool.domain.specs import HostPort

CHANNELS = 4
"""As many commands as `plan` and `apply` have at a time on one connection."""
SOON_S = 3600.0
"""One that ends sooner is worth a word."""


@dataclass(frozen=True, slots=True)
class SiteCheckup:
    """How far a site is checked."""

    jobs: bool = True
    partition: str = ""
    wait_s: float = 60.0
    hubs: tuple[HostPort, ...] = ()
    """Where agents will connect to; none without a gateway."""


def check_clusters(
    inventory: Inventory, names: list[str], wanted: SiteCheckup, show: Callable[[Check], None]
) -> list[Check]:
    """Each line is shown when it is known; a cluster that cannot be reached does not end the others."""
    every: list[Check] = []

    def add(checks: list[Check], cluster: str) -> None:
        for check in checks:
            named = replace(check, name=f"{cluster}: {check.name}")
            every.append(named)
            show(named)

    for name in names:
        login_of(inventory, name)  # raises for a name that is none
        if wanted.partition and wanted.partition not in inventory.clusters[name].partitions:
            known = ", ".join(inventory.clusters[name].partitions)
            raise UsageError.of("FT5511", f"{name} has no partition `{wanted.partition}`", hint=f"one of: {known}")
    for name in names:
        try:
            _cluster(name, inventory.clusters[name], wanted, lambda checks, n=name: add(checks, n))  # type: ignore[misc]
        except FabrictoolError as error:
            add([failed("login", problem) for problem in error.problems], name)
    return every


def _cluster(name: str, described: ClusterSpec, wanted: SiteCheckup, add: Callable[[list[Check]], None]) -> None:
    with contextlib.ExitStack() as stack:
        connection = _reached(described, stack, add)
        if connection is None:
            return
        add(guarded("sessions", lambda: _sessions(described.login[0])))
        add(guarded("clock", lambda: _clock(connection)))
        add(guarded("login noise", lambda: _noise(connection)))
        scheduler, token = scheduler_of(described.kind), secrets.token_hex(6)
        try:
            text = _run(connection, "doctor-login", described, token, *scheduler.commands)
            checks, folder = folder_checks(text, thing=f"cluster/{name}")
            add([*checks, cron_check(text)] if described.after_reboot == "cron" else checks)
            survey = _survey(name, described, connection, scheduler, text, add)
            if survey is None:
                return
            add(guarded("environment", lambda: _environment(name, described, connection, survey)))
            add(guarded("engines", lambda: engine_checks(described, connection)))
            if described.weights is not None:
                add(guarded("weights", lambda: [weights_check(described.weights or "", connection)]))
            if wanted.jobs and folder:
                visit = _visit(name, described, survey, wanted, connection, token, folder)
                add(guarded("job", lambda: in_a_job(visit, described, survey, scheduler, connection, wanted.wait_s)))
        finally:
            with contextlib.suppress(FabrictoolError):
                _run(connection, "doctor-end", described, token)


def _reached(
    described: ClusterSpec, stack: contextlib.ExitStack, add: Callable[[list[Check]], None]
) -> Connection | None:
    """The first login node that lets us in; every one of them is tried."""
    first = None
    for login in described.login:
        where = f" {login.host}" if len(described.login) > 1 else ""
        connection = stack.enter_context(at_keyboard(login))
        try:
            endpoint = endpoint_of(login)
            began = time.monotonic()
            connection.run(["true"])
            entered = time.monotonic()
            connection.run(["true"])
            again = time.monotonic() - entered
        except FabrictoolError as error:
            add([failed(f"login{where}", problem) for problem in error.problems])
            continue
        slow = again > SLOW_SHELL_S
        text = f"{endpoint.host}:{endpoint.port} in {entered - began:.1f} s, a command in {again:.2f} s"
        hint = "a slow start-up file, or a login node under load"
        add([Check(f"login{where}", True, text, hint, slow), _pinned(endpoint, login, where)])
        add(guarded(f"certificate{where}", lambda e=endpoint, w=where: [_certificate(e, w)]))  # type: ignore[misc]
        first = first or connection
    return first


def _pinned(endpoint: Endpoint, login: Login, where: str) -> Check:
    if login.opened_by_hand:
        return Check(f"host key{where}", True, "the one that your own ssh accepted")
    return Check(f"host key{where}", True, f"pinned: {', '.join(str(pin) for pin in pins(endpoint))}")


def _certificate(endpoint: Endpoint, where: str) -> Check:
    now = time.time()
    check_certificate(endpoint, now, NEEDED_S)
    end = certificate_end(endpoint)
    if end is None:
        return Check(f"certificate{where}", True, "none; a key that never expires may be used")
    if end == float("inf"):
        return Check(f"certificate{where}", True, "one that never expires")
    left = end - now
    text = f"valid for {duration_text(left)}"
    return Check(f"certificate{where}", True, text, "get a new one before a long apply", left < SOON_S)


def _sessions(login: Login) -> list[Check]:
    """With the connection that `plan` and `apply` use; a refused channel is not tried again."""
    with (
        connect_login(login, limits=ConnectionLimits(refused_s=0.0)) as connection,
        ThreadPoolExecutor(CHANNELS) as pool,
    ):
        connection.run(["true"])
        began = time.monotonic()
        for done in [pool.submit(connection.run, ["sleep", "1"]) for _ in range(CHANNELS)]:
            done.result()
        took = time.monotonic() - began
    text = f"{CHANNELS} commands of 1 s at once on one connection took {took:.1f} s"
    return [Check("sessions", True, text)]


def _clock(connection: Connection) -> list[Check]:
    before = time.time()
    stamp = connection.run(["date", "+%s.%N"]).stdout.decode(errors="replace").strip()
    after = time.time()
    whole, _, part = stamp.partition(".")
    if not whole.isdecimal():
        return [Check("clock", True, f"date says {stamp[:40]!r}", "check its clock by hand", warning=True)]
    exact = part.isdecimal()
    there = float(stamp) if exact else float(whole) + 0.5
    return [clock(there - (before + after) / 2, (after - before) / 2 + (0.0 if exact else 0.5))]


def _noise(connection: Connection) -> list[Check]:
    """What comes before a command's own output, which a connection cuts off for everybody else."""
    if not isinstance(connection, ShellVerbs):
        return []
    wrapped = wrap(["true"])
    outcome = connection._carry(wrapped.text, b"", 60.0)  # noqa: SLF001 - the one place that wants it uncut
    return [noise(outcome.stdout.partition(wrapped.token)[0])]


def _survey(
    name: str,
    described: ClusterSpec,
    connection: Connection,
    scheduler: Scheduler,
    text: str,
    add: Callable[[list[Check]], None],
) -> Survey | None:
    argv = ["sh", "-c", shell.survey_program(scheduler, brief=False), "ft-survey", described.folder, "-"]
    done = connection.run(argv)
    if done.status != 0:
        why = done.stderr.decode(errors="replace").strip()[-200:] or f"exit {done.status}"
        add([Check("scheduler", False, f"it does not answer: {why}", "try its commands there by hand")])
        return None
    survey = read_survey(done.stdout.decode(errors="replace"), scheduler, thing=f"cluster/{name}")
    add(scheduler_checks(text, scheduler, survey.scheduler))
    if described.queues:
        add(partition_checks(described, survey.scheduler))
    return survey


def _environment(name: str, described: ClusterSpec, connection: Connection, survey: Survey) -> list[Check]:
    words, _ = python_of(described, name, survey)  # raises FT5403 when there is none
    release = survey.environment.removeprefix("rel/")
    if not release or survey.environment not in words[0]:
        return [Check("environment", True, f"the inventory's own: {' '.join(words)}")]
    state, bad = EnvironmentFolder(name, described.folder, connection).verify(release)
    hint = f"fabrictool bootstrap {name}"
    if state != "whole":
        what = f": {', '.join(bad[:3])}" if bad else ""
        return [Check("environment", False, f"release {release} is {state}{what}", hint)]
    return [Check("environment", True, f"release {release} is whole")]


def engine_checks(described: ClusterSpec, connection: Connection) -> list[Check]:
    """Each engine of the inventory where it says that it is: a file of the site's. What only a job can load is said."""
    files = {engine: file_of(install) for engine, install in described.software.engines.items()}
    argv = ["sh", "-c", 'for p; do [ -e "$p" ] && echo "$p"; done; true', "ft-engines", *filter(None, files.values())]
    there = set(connection.run(argv).stdout.decode(errors="replace").splitlines()) if any(files.values()) else set()
    checks = []
    for engine, install in described.software.engines.items():
        label, file = f"engine {engine}", files[engine]
        way = f"{install.ways[0]} {getattr(install, install.ways[0])}" if install.ways else "in the agents' Python"
        if file and file not in there:
            hint = "correct `software.engines` in the inventory, or have it installed there"
            checks.append(Check(label, False, f"{way}: {file} does not exist", hint))
        else:
            checks.append(
                Check(label, True, way if file or not install.ways else f"{way}: not checked, only a job can load it")
            )
    return checks


def weights_check(folder: str, connection: Connection) -> Check:
    """Where sets are staged: it is made with the first of them, where that may be."""
    look = 'at=$0; while [ ! -e "$at" ]; do at=$(dirname "$at"); done; echo "$at"; [ -d "$at" ] && [ -w "$at" ]'
    done = connection.run(["sh", "-c", look, folder])
    nearest = done.stdout.decode(errors="replace").strip()
    where = folder if nearest == folder else f"{folder}, which is made in {nearest}"
    if done.status == 0:
        return Check("weights folder", True, where)
    return Check(
        "weights folder",
        False,
        f"{nearest} is no folder that can be written",
        "choose another `weights` in the inventory",
    )


# Wide: what is known by then of the site, and where the job may write.
def _visit(
    name: str,
    described: ClusterSpec,
    survey: Survey,
    wanted: SiteCheckup,
    connection: Connection,
    token: str,
    folder: str,
) -> Visit:
    try:
        python, setup = python_of(described, name, survey)
    except FabrictoolError:
        python, setup = (), ()
    partition = partition_for(described, survey, wanted.partition)
    staged = described.weights is not None and connection.run(["test", "-d", described.weights]).status == 0
    promises = tuple(promises_of(described, described.partitions[partition], weights=staged))
    return Visit(token, folder, partition, python, setup, wanted.hubs, promises)


def _run(connection: Connection, name: str, described: ClusterSpec, *arguments: str) -> str:
    argv = ["sh", "-c", shell.program(name), f"ft-{name}", described.folder, "-", *arguments]
    return connection.run(argv).stdout.decode(errors="replace")
