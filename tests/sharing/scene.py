"""Small nodes and models: one octet is one token's cache, iterations take round times."""

import itertools

from fabrictool.sharing.core import NodeSharing
from fabrictool.sharing.ledger import MemoryLedger
from fabrictool.sharing.placement import MemoryTimes, SharingOptions
from fabrictool.sharing.quantified import IterationTable
from fabrictool.sharing.replicas import SharedModel, SharedNode, SharedReplica, SharedRequest

NUMBERS = itertools.count(1000)
AT_ONCE = MemoryTimes(0.0, 0.0, 0.0, {"cpu": 1e12, "gpu": 1e12}, 0.0)


def table(prefill=0.001, decode=0.02, more=0.0):
    """Seconds of a prompt's token, of a step, and of a step for each request in it."""
    return IterationTable.sampled(lambda n: prefill * n, lambda batch, _: decode + more * batch, 4096, 64)


def model(name="a", *, weights=1000, longest=100, cpu=None, gpu=None, answer=10.0):
    tables = {"cpu": cpu or table(0.002, 0.05), "gpu": gpu or table()}
    return SharedModel(name, weights, 1, longest, tables, answer)


def node(number, kind="gpu", memory=10_000):
    return SharedNode(number, kind, MemoryLedger(memory))


def request(name="a", prompt=50, began=0.0, *, ttft=2.0, tpot=0.25, emitted=0):
    return SharedRequest(next(NUMBERS), name, prompt, began, ttft, tpot, emitted)


def loaded(where, what, *requests, cache=1000, waiting=(), number=None):
    """A replica whose memory is as it should be."""
    replica = SharedReplica(next(NUMBERS) if number is None else number, what, where)
    where.ledger.grant(replica.id, what.weights + cache, 0.0)
    where.ledger.changed(replica.id, 0.0)
    where.replicas[replica.id] = replica
    replica.running += requests
    replica.waiting += waiting
    return replica


def sharing(nodes, *models, **options):
    options.setdefault("times", AT_ONCE)
    return NodeSharing(nodes, models, SharingOptions(**options))
