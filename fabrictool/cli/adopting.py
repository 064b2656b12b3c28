"""``adopt``, behind its arguments."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError, UsageError
from fabrictool.cli.answers import Adoption, ReleaseAnswer
from fabrictool.cli.output import data, json_data, say
from fabrictool.clusters.adopting import AdoptingCluster
from fabrictool.clusters.connections.factory import connect_login, login_of
from fabrictool.domain.specs import AgentSpec, BroughtEngine
from fabrictool.mesh.identity import chain_of, claims_of
from fabrictool.planner.egress import egress_of
from fabrictool.planner.units import trust_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fabrictool.cli.source import Source
    from fabrictool.domain.inventory import ClusterSpec

LOOK_S = 2.0
AFTER_END_S = 2 * 3600.0
"""A certificate outlives its job by that: clocks differ, and jobs are prolonged."""
WITHOUT_END_S = 26 * 3600.0


# Wide: which server, and what is said of it.
def adopt_server(
    source: Source,
    cluster: str,
    number: str,
    url: str,
    model: str,
    partition: str,
    devices: int,
    wait_s: float,
    *,
    as_json: bool,
) -> None:
    """Start the agent, and wait until it serves.

    Raises
    ------
    FabrictoolError
        FT5418 not on such a cluster, FT5419 no such job, FT5420 the agent ended, FT5421 it does not serve yet, FT5423
        there is one already.
    """
    from fabrictool.agent.join import ENGINE, port_of

    described = _described(source, cluster)
    if partition and partition not in described.partitions:
        known = ", ".join(described.partitions)
        raise UsageError.of("FT5511", f"{cluster} has no partition `{partition}`", hint=f"one of: {known}")
    if not partition and len(described.partitions) > 1:
        known = ", ".join(described.partitions)
        raise UsageError.of("FT5511", f"{cluster} has several partitions", hint=f"--partition, one of: {known}")
    name = partition or next(iter(described.partitions))
    port = port_of(url)
    blueprint, inventory, fabric = source.blueprint, source.inventory, source.fabric()
    provider = inventory.provider_of(cluster)
    with _reached(source, cluster) as there:
        job = there.job(number)
        now = time.time()
        lasts = WITHOUT_END_S if job.ends_at is None else job.ends_at - now + AFTER_END_S
        identity = fabric.trust.session_files(provider, "agent", now=now, seconds=lasts)
        session = claims_of(chain_of(identity["identity/session.crt"])[0]).session
        spec = AgentSpec(
            fabric=blueprint.fabric,
            provider=provider,
            site=described.site,
            cluster=cluster,
            partition=job.node,
            replica=f"joined/{session[:8]}",
            model=model,
            source="",
            engine=ENGINE,
            device=described.partitions[name].device,
            devices=devices,
            hubs=tuple(gateway.hub for gateway in blueprint.every_gateway.values()),
            egress=egress_of(described.egress),
            trust=trust_of(blueprint, inventory, provider, blueprint.models.get(model)),
            brought=BroughtEngine(port=port),
        )
        there.start(spec, _step_name(number), job, identity)
        say(f"an agent starts in job {number} on {job.node}")
        _wait(there, number, wait_s)
    if as_json:
        json_data(Adoption(cluster=cluster, job=number, node=job.node, session=session, ready=wait_s > 0))
    else:
        served = model or "its model"
        data(f"job {number} on {job.node} serves {served}, as joined/{session[:8]}" if wait_s else "started")


def release_server(source: Source, cluster: str, number: str, *, as_json: bool) -> None:
    """Ask the agent to leave; raises FT5422 where there is none."""
    _described(source, cluster)
    with _reached(source, cluster) as there:
        left = there.leave(number, _step_name(number))
    if not left:
        message = f"no agent of `adopt` runs in job {number} of {cluster}"
        raise FabrictoolError.of("FT5422", message, thing=f"cluster/{cluster}")
    if as_json:
        json_data(ReleaseAnswer(cluster=cluster, job=number))
    else:
        data(f"the agent in job {number} leaves; the server and the job go on")


# -- internals ------------------------------------------------------------------------------------------------


def _described(source: Source, cluster: str) -> ClusterSpec:
    """Raises FT5341 or FT5342 where no login node of that cluster can be reached."""
    login_of(source.inventory, cluster)
    return source.inventory.clusters[cluster]


@contextmanager
def _reached(source: Source, cluster: str) -> Iterator[AdoptingCluster]:
    described = source.inventory.clusters[cluster]
    with connect_login(described.login[0]) as connection:
        yield AdoptingCluster(cluster, source.blueprint.fabric, described, connection)


def _step_name(number: str) -> str:
    """Of the agent's folder and its step: in one job there is one."""
    return f"ft-adopted-{number}"


def _wait(there: AdoptingCluster, number: str, wait_s: float) -> None:
    """Until it serves; nothing of it is taken back where that takes longer."""
    until, told = time.monotonic() + wait_s, ""
    while wait_s:
        agent = there.look(_step_name(number))
        if agent.over:
            hint = (
                "does the server listen there, in the job's first node, and list the model? nothing of it was changed"
            )
            raise FabrictoolError.of("FT5420", f"the agent in job {number} ended: {agent.over}", hint=hint)
        if agent.ready:
            return
        if agent.text != told:
            told = agent.text
            say(f"job {number}: {told}")
        if time.monotonic() > until:
            hint = f"it goes on; `fabrictool status` shows it, `fabrictool adopt … {number} --release` ends it"
            message = f"the agent in job {number} does not serve yet: {told}"
            raise FabrictoolError.of("FT5421", message, hint=hint, transient=True)
        time.sleep(LOOK_S)
