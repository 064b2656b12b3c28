"""Which nodes a job leaves out, so that a replica is on none with others of its model (`domain.node_parts`); pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.schedulers.protocol import Apart
from fabrictool.domain.hostlist import hostlist_of
from fabrictool.domain.node_parts import devices_of, left_out_by, nodes_of
from fabrictool.domain.observed import Queue
from fabrictool.domain.specs import AgentSpec, NodePart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fabrictool.clusters.schedulers.protocol import Job, SchedulerFacts
    from fabrictool.domain.inventory import ClusterSpec
    from fabrictool.domain.observed import ObservedUnit
    from fabrictool.domain.specs import UnitSpec

LONGEST = 100_000
"""Octets of an expression; Linux takes 131,072 for one word of a command (MAX_ARG_STRLEN)."""
_PLAN_AGAIN = "run `fabrictool plan` again: it gives each replica the part in which it stands"


# Wide: a unit, its place, and who else is there.
def apart_of(
    address: str,
    spec: AgentSpec,
    described: ClusterSpec,
    units: Iterable[ObservedUnit],
    specs: Mapping[str, UnitSpec],
) -> Apart | None:
    """None: it may be anywhere.

    Raises
    ------
    FabrictoolError
        FT5424 where the inventory names the nodes of jobs by itself.
    """
    part = spec.node_part
    if not isinstance(part, NodePart) or not described.leaves_out_nodes:
        return None
    partition = described.partitions[spec.partition]
    if partition.job.names_nodes:
        message = f"{address} is to be on {part} of the nodes, and `job.options` of {spec.partition} says which it has"
        hint = "take `nodelist`, `nodefile` or a file in `exclude` out of them, or `spread: node` out of the blueprint"
        raise FabrictoolError.of("FT5424", message, thing=address, hint=hint)
    beside, near = set[str](), set[str]()
    for unit in units:
        other = specs.get(unit.operation)
        if unit.state != "running" or unit.address == address or not isinstance(other, AgentSpec):
            continue
        if other.model == spec.model and other.phase != "prefill":
            (beside if isinstance(other.node_part, NodePart) else near).update(filter(None, unit.node.split(",")))
    return Apart(
        part,
        devices=devices_of(partition),
        left_out=left_out_by(partition),
        beside=frozenset(beside),
        near=frozenset(near),
    )


def avoided(facts: SchedulerFacts, job: Job) -> str:
    """All nodes of the job's partition but those on which it may be, as one expression.

    Raises
    ------
    FabrictoolError
        FT5424 where no such node is left, or nobody can say which these are.
    """
    apart = job.apart
    queue = facts.queues.get(job.partition, Queue())
    if apart is None:
        return ""
    nodes = nodes_of(queue, apart.devices, apart.left_out)
    if not nodes.names or len(nodes.names) + len(nodes.others) < queue.nodes:
        why = f"the scheduler does not name all nodes of {job.partition} in a way that can be read"
        raise _refused(job, why, "report it with the output of `sinfo -h -o '%R|%D|%N'`")
    if len(nodes.names) < apart.part.of:
        devices = f" with {apart.devices} devices or more" if apart.devices else ""
        why = f"{job.partition} has {len(nodes.names)} nodes{devices}"
        raise _refused(job, why, "correct `nodes` and `devices_per_node` in the inventory, and plan again")
    own = nodes.nodes_of(apart.part.numbers, apart.part.of)
    free = own - apart.beside
    if len(free) < job.nodes:
        why = f"others of its model run on {hostlist_of(own & apart.beside)}, and no further node of that part is left"
        raise _refused(job, why, _PLAN_AGAIN)
    left = free - apart.near
    left = free if len(left) < job.nodes else left
    # Those without enough devices, too: more of them may be written there than the scheduler counts.
    expression = hostlist_of([*(set(nodes.names) - left), *nodes.others, *apart.left_out])
    if len(expression) > LONGEST:
        why = f"the names of the other nodes are {len(expression)} octets long, more than a command takes"
        raise _refused(job, why, "place it on a smaller partition, or leave out `spread: node`")
    return expression


def awaited(facts: SchedulerFacts, job: Job) -> str:
    """What of its part has to come back before the job can start, in words; "": nothing."""
    queue = facts.queues.get(job.partition)
    if job.apart is None or queue is None:
        return ""
    nodes = nodes_of(queue, job.apart.devices, job.apart.left_out)
    own = nodes.nodes_of(job.apart.part.numbers, job.apart.part.of)
    if len(own) < job.nodes or len(own - nodes.away) >= job.nodes:
        return ""
    where = f"{job.apart.part} of the nodes of {job.partition}, {hostlist_of(own)}"
    return f"{job.address} waits until a node is back: {where}, is down or drained (`spread: node`)"


def _refused(job: Job, why: str, hint: str) -> FabrictoolError:
    part = "" if job.apart is None else str(job.apart.part)
    message = f"{job.address} is to be on {part} of the nodes of {job.partition} (`spread: node`): {why}"
    return FabrictoolError.of("FT5424", message, thing=job.address, hint=hint)
