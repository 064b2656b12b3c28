"""The checks of ``doctor``: each one a fact that a fabric on this machine needs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from fabrictool.base.clock import duration_text
from fabrictool.base.errors import FabrictoolError
from fabrictool.blueprint.secrets import resolve as resolve_secret
from fabrictool.catalog import startable
from fabrictool.clusters.checks.result import Check, failed, guarded
from fabrictool.domain.address import Address
from fabrictool.domain.specs import EngineInstall
from fabrictool.engines.adapter import EngineLaunch, adapter
from fabrictool.engines.intact import check_intact
from fabrictool.mesh.identity import CLOCK_SKEW_S
from fabrictool.planner.drift import drift_of
from fabrictool.planner.healing import cannot_stay
from fabrictool.planner.units import install_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from fabrictool.base.settings import Settings
    from fabrictool.blueprint import Loaded
    from fabrictool.domain.evidence import Evidence
    from fabrictool.domain.inventory import ClusterSpec
    from fabrictool.domain.observed import Observed
    from fabrictool.domain.specs import HostPort
    from fabrictool.state.fabric import Fabric

LOW_SPACE = 2 * 1024**3
PROBE_S = 60.0
"""To see whether an engine is there."""
LOW_VALIDITY_S = 7 * 86400.0
"""A certificate that ends sooner is worth a word."""


def machine_checks(settings: Settings) -> list[Check]:
    return [_python(), _writable("state folder", settings.state_path), _writable("cache folder", settings.cache_path)]


def fabric_checks(fabric: Fabric, loaded: Loaded) -> list[Check]:
    """What the blueprint needs of this machine and of the clusters."""
    checks = [Check("blueprint", True, f"{fabric.name}: {len(loaded.blueprint.models)} models")]
    for name, check in (
        ("trust", lambda: _trust(fabric, loaded)),
        ("secrets", lambda: _secrets(loaded)),
        ("models", lambda: _models(loaded)),
        ("engines", lambda: _engines(loaded)),
    ):
        checks += guarded(name, check)
    now = time.time()
    try:
        evidence = fabric.gather(now=now)
    except FabrictoolError as error:
        return [*checks, *(failed("units", problem) for problem in error.problems)]
    observed = evidence.observed
    units = _units(evidence, now)
    return [*checks, *_clusters(observed), *units, *_clocks(observed, now), *_ports(observed, loaded)]


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", sys.version_info >= (3, 11), f"{version} at {sys.executable}", "3.11 or newer")


def _writable(name: str, path: Path) -> Check:
    there = path
    try:
        while not there.exists():
            there = there.parent
    except OSError as error:
        return Check(
            name, False, f"{path}: {(error.strerror or str(error)).lower()}", "check the rights of its folders"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(
            name, False, f"{path}: you may not write there", "choose another folder: see docs/reference/settings.md"
        )
    free = shutil.disk_usage(there).free
    enough = free > LOW_SPACE
    return Check(name, enough, f"{path}: {free / 1024**3:.1f} GiB free", "free some space")


def _trust(fabric: Fabric, loaded: Loaded) -> list[Check]:
    if not fabric.trust.exists:
        return [Check("trust", False, "this fabric has no federation root", "fabrictool trust init")]
    missing = [name for name in loaded.inventory.providers if not fabric.trust.may_start(name)]
    if missing:
        return [
            Check("trust", False, f"no certificate for {', '.join(missing)}", f"fabrictool trust issue {missing[0]}")
        ]
    checks = []
    for certificate in fabric.trust.described():
        name = certificate.claims.provider or "root"
        if name != "root" and not fabric.trust.others(name):
            fabric.trust.provider(name)  # the key too is there, ours alone and readable
        now = time.time()
        left = certificate.end - now
        if certificate.begin > now + CLOCK_SKEW_S:
            ahead = duration_text(certificate.begin - now)
            text = f"the certificate of {name} is valid only in {ahead}: the clock of this machine is behind"
            checks.append(Check("trust", False, text, "set this machine's clock, best by NTP"))
        elif left < LOW_VALIDITY_S:
            text = f"the certificate of {name} " + ("has expired" if left <= 0 else f"ends in {left / 86400:.0f} days")
            checks.append(Check("trust", False, text, f"fabrictool trust issue {name}" if name != "root" else ""))
    if checks:
        return checks
    return [Check("trust", True, f"root and {len(loaded.inventory.providers)} providers in {fabric.trust.folder}")]


def _secrets(loaded: Loaded) -> list[Check]:
    for tenant in loaded.blueprint.tenants.values():
        resolve_secret(tenant.key, os.environ)
    if loaded.blueprint.key_api is not None:
        resolve_secret(loaded.blueprint.key_api.key, os.environ)
    return [Check("secrets", True, f"{len(loaded.blueprint.tenants)} tenants' keys resolve")]


def _models(loaded: Loaded) -> list[Check]:
    checks: list[Check] = []
    every = [
        (f"model {name}" + (f" as {variant}" if variant else ""), its)
        for name, model in loaded.blueprint.models.items()
        for variant, its in model.each_variant.items()
    ]
    for label, model in every:
        if not _clusters_with(loaded, model.engine, here=True):
            where = ", ".join(_clusters_with(loaded, model.engine, here=False)) or "no enabled cluster"
            checks.append(Check(label, True, f"{model.source}: read on {where}, not on this machine"))
            continue
        checks += guarded(label, lambda n=label, m=model: [Check(n, True, check_intact(m.source))])  # type: ignore[misc]
    return checks


def _engines(loaded: Loaded) -> list[Check]:
    """An engine has to be where it runs: here for clusters of this machine, there for others."""
    checks = []
    for name in sorted({its.engine for m in loaded.blueprint.models.values() for its in m.each_variant.values()}):
        label = f"engine {name}"
        for cluster in _clusters_with(loaded, name, here=True):
            checks += guarded(label, lambda n=name, c=cluster: [_engine_here(loaded, n, c)])  # type: ignore[misc]
        away = _clusters_with(loaded, name, here=False)
        if away:
            ways = [f"{cluster} ({_way(loaded.inventory.clusters[cluster], name)})" for cluster in away]
            hint = f"`fabrictool doctor {away[0]}` looks there"
            checks.append(Check(label, True, f"runs on {', '.join(ways)}; not looked for on this machine", hint))
    return checks


def _engine_here(loaded: Loaded, name: str, cluster: str) -> Check:
    """Whether an agent of a cluster of this machine would find it, looked for as the agent does."""
    described = loaded.inventory.clusters[cluster]
    partition = next(iter(described.partitions.values()))
    install = install_of(described.software, name, partition.device)
    way = f"{_way(described, name)} of {cluster}"
    launch = EngineLaunch(
        engine=name, model="/model", served_name="model", host="127.0.0.1", port=1, python=sys.executable,
        install=EngineInstall() if isinstance(install, msgspec.UnsetType) else install,
    )  # fmt: skip
    command = adapter(name).command(launch)
    environment = {key: value for key, value in os.environ.items() if key not in command.unset} | command.env
    there = not command.probe or _succeeds(command.probe, environment)
    hint = "correct `software.engines` of the cluster, or install it there"
    return Check(f"engine {name}", there, way if there else f"not there: {way}", "" if there else hint)


def _succeeds(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    try:
        done = subprocess.run(
            argv, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _clusters_with(loaded: Loaded, engine: str, *, here: bool) -> list[str]:
    """Enabled clusters that can run the engine, on this machine or elsewhere."""
    return [
        name
        for name, cluster in loaded.inventory.clusters.items()
        if cluster.enabled and cluster.here == here and engine in (cluster.software.engines or startable())
    ]


def _way(cluster: ClusterSpec, engine: str) -> str:
    install = cluster.software.engines.get(engine)
    if install is None or not install.ways:
        return "in the agents' Python"
    return f"{install.ways[0]} {getattr(install, install.ways[0])}"


def _clusters(observed: Observed) -> list[Check]:
    return [
        Check(f"cluster {name}", facts.known, f"{len(facts.units)} units" if facts.known else facts.reason, facts.hint)
        for name, facts in sorted(observed.clusters.items())
    ]


def _units(evidence: Evidence, now: float) -> list[Check]:
    """What was applied beside what is there."""
    applied = len(evidence.state.applied_units)
    drift = [d for d in drift_of(evidence, cannot_stay(evidence, now)) if d.kind != "unreachable"]
    if not drift:
        return [Check("units", True, "as applied last")] if applied else []
    hint = "`fabrictool logs UNIT` may tell why; `fabrictool reconcile` mends what can be mended"
    return [Check(f"unit {d.address}", False, d.text, hint) for d in drift]


def _clocks(observed: Observed, now: float) -> list[Check]:
    """Of the clusters beside ours: certificates are good for both only while the clocks agree to some minutes."""
    checks = []
    for name, facts in sorted(observed.clusters.items()):
        if facts.now is None or abs(facts.now - now) <= CLOCK_SKEW_S / 5:
            continue
        off = abs(facts.now - now)
        where = "ahead of" if facts.now > now else "behind"
        text = f"{duration_text(off)} {where} this machine's"
        bad = off > CLOCK_SKEW_S
        text += f"; certificates are refused beyond {CLOCK_SKEW_S} s" if bad else ""
        checks.append(
            Check(f"clock of {name}", not bad, text, "set the clock that is wrong, best by NTP", warning=True)
        )
    return checks


def _ports(observed: Observed, loaded: Loaded) -> list[Check]:
    """Of gateways on this machine that do not run yet."""
    running = observed.running()
    return [
        _port("clients" if what == "listen" else "agents", address)
        for name, gateway in loaded.blueprint.written_gateways.items()
        if loaded.inventory.clusters[gateway.cluster].here and str(Address("gateway", name)) not in running
        for what, address in gateway.listeners.items()
    ]


def _port(what: str, address: HostPort) -> Check:
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            text = f"{address}: {(error.strerror or str(error)).lower()}"
            return Check(f"port for {what}", False, text, "choose another in the blueprint's gateway section")
    return Check(f"port for {what}", True, f"{address} is free")
