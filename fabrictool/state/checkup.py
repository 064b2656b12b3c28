"""The checks of ``doctor``: each one a fact that a fabric on this machine needs."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from typing import TYPE_CHECKING

from fabrictool.blueprint.secrets import resolve as resolve_secret
from fabrictool.clusters.checks.result import Check, guarded
from fabrictool.engines.adapter import adapter
from fabrictool.engines.artifacts import resolve
from fabrictool.planner.units import GATEWAY

if TYPE_CHECKING:
    from pathlib import Path

    from fabrictool.base.settings import Settings
    from fabrictool.blueprint import Loaded
    from fabrictool.domain.observed import Observed
    from fabrictool.state.fabric import Fabric

LOW_SPACE = 2 * 1024**3
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
    observed = fabric.observe()
    return [*checks, *_clusters(observed), *_ports(observed, loaded)]


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
    missing = [name for name in loaded.inventory.providers if not fabric.trust.has_provider(name)]
    if missing:
        return [
            Check("trust", False, f"no certificate for {', '.join(missing)}", f"fabrictool trust issue {missing[0]}")
        ]
    checks = []
    for certificate in fabric.trust.described():
        name = certificate.claims.provider or "root"
        if name != "root":
            fabric.trust.provider(name)  # the key too is there, ours alone and readable
        left = certificate.end - time.time()
        if left < LOW_VALIDITY_S:
            text = f"the certificate of {name} " + ("has expired" if left <= 0 else f"ends in {left / 86400:.0f} days")
            checks.append(Check("trust", False, text, f"fabrictool trust issue {name}" if name != "root" else ""))
    if checks:
        return checks
    return [Check("trust", True, f"root and {len(loaded.inventory.providers)} providers in {fabric.trust.folder}")]


def _secrets(loaded: Loaded) -> list[Check]:
    for tenant in loaded.blueprint.tenants.values():
        resolve_secret(tenant.key, os.environ)
    return [Check("secrets", True, f"{len(loaded.blueprint.tenants)} tenants' keys resolve")]


def _models(loaded: Loaded) -> list[Check]:
    checks: list[Check] = []
    for name, model in loaded.blueprint.models.items():
        checks += guarded(f"model {name}", lambda n=name, m=model: [Check(f"model {n}", True, resolve(m.source))])  # type: ignore[misc]
    return checks


def _engines(loaded: Loaded) -> list[Check]:
    checks = []
    for name in sorted({model.engine for model in loaded.blueprint.models.values()}):
        program = adapter(name).capabilities.program
        where = shutil.which(program) if program else sys.executable
        checks.append(Check(f"engine {name}", where is not None, where or f"{program} is not on PATH", "install it"))
    return checks


def _clusters(observed: Observed) -> list[Check]:
    return [
        Check(f"cluster {name}", facts.known, f"{len(facts.units)} units" if facts.known else facts.reason, facts.hint)
        for name, facts in sorted(observed.clusters.items())
    ]


def _ports(observed: Observed, loaded: Loaded) -> list[Check]:
    gateway = loaded.blueprint.gateway
    if gateway is None or not loaded.inventory.clusters[gateway.cluster].here or GATEWAY in observed.running():
        return []
    checks = []
    for what, address in (("clients", gateway.listen), ("agents", gateway.mesh)):
        with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address.host, address.port))
            except OSError as error:
                text = f"{address}: {(error.strerror or str(error)).lower()}"
                checks.append(
                    Check(f"port for {what}", False, text, "choose another in the blueprint's gateway section")
                )
            else:
                checks.append(Check(f"port for {what}", True, f"{address} is free"))
    return checks
