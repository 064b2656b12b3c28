"""From a unit and a look at its cluster to a job in no scheduler's words, and to the files of its run folder; pure."""

from __future__ import annotations

import io
import posixpath
import shlex
import tarfile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.allocation import allocation
from fabrictool.clusters.environment.interpreter import MODULES_THERE, python_of
from fabrictool.clusters.schedulers import shell
from fabrictool.clusters.schedulers.apart import apart_of
from fabrictool.clusters.schedulers.protocol import ENDS_AT, Job
from fabrictool.domain.observed import Away
from fabrictool.domain.specs import AgentSpec, GatewaySpec, encode_spec
from fabrictool.mesh.identity import describe_chain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.clusters.protocol import NewUnit
    from fabrictool.clusters.schedulers.protocol import Scheduler
    from fabrictool.clusters.survey import Survey
    from fabrictool.domain.inventory import ClusterSpec, NodeEnvironment, Partition
    from fabrictool.domain.specs import UnitSpec

WARNING_MARGIN_S = 120.0
"""A scheduler looks at its clocks every half minute, and sends its warning up to a minute early."""


# Wide: a unit, its place, and what is known of that.
def job_of(
    unit: NewUnit,
    described: ClusterSpec,
    cluster: str,
    fabric: str,
    survey: Survey,
    scheduler: Scheduler,
    *,
    later: bool = False,
) -> Job:
    """The job of one unit; one that is submitted `later` may not run into any window that is known now.

    Raises
    ------
    FabrictoolError
        FT5403 without a Python, FT5408 for what cannot run there.
    """
    spec, operation = unit.spec, unit.operation
    folder = posixpath.join(survey.base, "units", fabric, operation)
    python, setup = python_of(described, cluster, survey)
    cache = f"export FABRICTOOL_CACHE_DIR={shlex.quote(posixpath.join(survey.base, 'cache'))}"
    common: dict[str, Any] = {
        "operation": operation,
        "address": unit.address,
        "fabric": fabric,
        "lineage": unit.lineage,
        "serial": unit.serial,
        "folder": folder,
        "home": survey.home,
        "setup": (*environment_lines(described.environment), *setup, cache),
    }
    if isinstance(spec, GatewaySpec):
        if described.queues:
            message = f"{unit.address} cannot run as a job of {cluster}: its address would change"
            raise FabrictoolError.of("FT5408", message, thing=unit.address)
        return Job(**common, command=(*python, "-P", "-m", "fabrictool.gateway", folder))
    partition = described.partitions[spec.partition]
    if not scheduler.several_nodes:
        check_one_node(unit.address, spec, described.kind)
    on_each = _devices_of_a_node(unit, spec, partition)
    queue = partition.queue or spec.partition
    granted = allocation(
        operation,
        queue,
        spec.walltime_s,
        survey.scheduler.queues.get(queue),
        () if later else away(described, survey),
        survey.now,
    )
    request, devices = partition.job, max(1, on_each)
    return Job(
        **common,
        command=(*python, "-P", "-m", "fabrictool.agent", folder, ENDS_AT),
        partition=queue,
        nodes=spec.on_nodes,
        devices=0 if spec.device == "cpu" else on_each,
        devices_as=request.devices_as,
        whole_node=partition.whole_nodes,
        cpus=request.cpus_per_device * devices if request.cpus_per_device is not None else None,
        memory=int(request.memory_per_device) * devices if request.memory_per_device is not None else None,
        walltime_s=granted.walltime_s,
        begin_in_s=granted.begin_in_s,
        warning_s=spec.drain_s + WARNING_MARGIN_S,
        options=request.options,
        apart=apart_of(unit.address, spec, described, survey.units, survey.specs),
        step_options=request.step_options,
    )


def check_one_node(address: str, spec: UnitSpec, kind: str) -> None:
    """Raises FT5408 for a replica over several nodes, of a kind of cluster that can give only one."""
    if isinstance(spec, AgentSpec) and spec.on_nodes > 1:
        message = f"{address} stands on {spec.on_nodes} nodes, and a unit of a cluster of kind {kind} has one"
        hint = "set the model's `parallelism` so that a node holds it, or place it on a Slurm cluster"
        raise FabrictoolError.of("FT5408", message, thing=address, hint=hint)


def _devices_of_a_node(unit: NewUnit, spec: AgentSpec, partition: Partition) -> int:
    """Raises FT5408 where a node has not as many."""
    if spec.on_nodes > 1 and spec.phase != "unified":
        message = f"{unit.address} would hand caches over from {spec.on_nodes} nodes, which nobody has tried"
        hint = "set the model's `phases` to unified, or its `parallelism` so that a node holds it"
        raise FabrictoolError.of("FT5408", message, thing=unit.address, hint=hint)
    on_each = spec.devices // spec.on_nodes
    if on_each > partition.devices_per_node:
        message = f"{unit.address} needs {on_each} devices of one node, and a node of {spec.partition} has "
        raise FabrictoolError.of("FT5408", f"{message}{partition.devices_per_node}", thing=unit.address)
    return on_each


def environment_lines(wanted: NodeEnvironment) -> list[str]:
    """As lines of a shell; of all that only the loading of a module has to work."""
    lines = [MODULES_THERE] if wanted.purge or wanted.modules else []
    lines += ["module purge"] if wanted.purge else []
    lines += [f"module load {shlex.quote(module)} || exit 66" for module in wanted.modules]
    lines += [f"unset {name}" for name in wanted.unset]
    return lines + [f"export {name}={shlex.quote(value)}" for name, value in sorted(wanted.set.items())]


def away(described: ClusterSpec, survey: Survey) -> tuple[Away, ...]:
    """The scheduler's reservations, and the inventory's windows, of which it need not know."""
    windows = [
        Away(
            name=window.title or "maintenance",
            begin=float(window.begin),
            end=float(window.end),
            partitions=(partition.queue or name,),
            enforced=False,
        )
        for name, partition in described.partitions.items()
        for window in partition.maintenance
        if float(window.end) > survey.now
    ]
    return (*survey.scheduler.away, *windows)


def meta_of(unit: NewUnit) -> bytes:
    """One line of JSON that says whose a unit is and how long its certificate is valid; what a survey needs of it."""
    chain = unit.files.get("identity/session.crt")
    described = describe_chain(chain) if chain is not None else None
    meta = {
        "address": unit.address,
        "lineage": unit.lineage,
        "serial": unit.serial,
        "certificate_begins_at": described.begin if described is not None else 0.0,
        "certificate_ends_at": described.end if described is not None else None,
    }
    return msgspec.json.encode(meta)


def follower_files(unit: NewUnit, jobs: Sequence[Job], scheduler: Scheduler, survey: Survey) -> dict[str, bytes]:
    """Relative name → bytes of what may follow a unit: a run folder each, in order, and the program that submits the
    first of them from inside the unit's job.
    """
    files = {
        "next/lead": f"{unit.lead_s:.0f}\n".encode(),
        "next/submit.sh": shell.follow_program(scheduler).encode(),
    }
    for number, (follower, job) in enumerate(zip(unit.followers, jobs, strict=True), start=1):
        for name, data in run_folder(follower, job, scheduler, survey).items():
            files[f"next/{number}-{follower.operation}/{name}"] = data
    return files


def told_files(unit: NewUnit) -> dict[str, bytes]:
    """The same of a unit that runs; what says when its certificate ends changes with that."""
    meta = {"meta.json": meta_of(unit) + b"\n"} if "identity/session.crt" in unit.files else {}
    return {**unit.files, **meta, "spec.json": encode_spec(unit.spec) + b"\n"}


def run_folder(unit: NewUnit, job: Job, scheduler: Scheduler, survey: Survey) -> dict[str, bytes]:
    """Relative name → bytes of everything that is placed before the job is submitted."""
    submission = scheduler.submission(survey.scheduler, job)
    return {
        **unit.files,
        "spec.json": encode_spec(unit.spec) + b"\n",
        "meta.json": meta_of(unit) + b"\n",
        "job.sh": submission.script.encode(),
        "submit": f"{submission.line}\n".encode(),
    }


def tar(folders: Mapping[str, Mapping[str, bytes]], beside: Mapping[str, bytes] = MappingProxyType({})) -> bytes:
    """Operation → name → bytes, and what is `beside` them, as an archive: folders of mode 0700, files of mode 0600."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in sorted(beside.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
        for operation, files in sorted(folders.items()):
            folders_of = {posixpath.join(operation, posixpath.dirname(name)).rstrip("/") for name in files}
            for folder in sorted({operation, *folders_of}):
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o700
                archive.addfile(entry)
            for name, data in sorted(files.items()):
                entry = tarfile.TarInfo(posixpath.join(operation, name))
                entry.size, entry.mode = len(data), 0o600
                archive.addfile(entry, io.BytesIO(data))
    return out.getvalue()
