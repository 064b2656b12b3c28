"""Small plans, made by hand."""

from fabrictool.domain.plan import (
    Action,
    Band,
    Certificate,
    Forecast,
    ModelForecast,
    Placement,
    Plan,
    ReplicaPlacement,
)
from fabrictool.domain.specs import AgentSpec, HostPort

BAND = Band(1.0, 0.5, 2.0)


def spec(replica="m/0", *, provider="p", cluster="c", partition="n", model="m", **changes):
    return AgentSpec(
        fabric="f", provider=provider, site="s", cluster=cluster, partition=partition, replica=replica, model=model,
        source="x",
        engine="vllm", hubs=(HostPort("h", 1),), **changes,
    )  # fmt: skip


def action(kind, replica="m/0", **changes):
    values = {"cluster": "c", "summary": "c/n"} | changes
    if kind in ("create", "replace") and "spec" not in changes:
        values["spec"] = spec(replica, cluster=values["cluster"], model=replica.rpartition("/")[0])
    return Action(kind=kind, address=f"replica/{replica}", **values)


def replica(name, provider="p"):
    return ReplicaPlacement(
        replica=name, model=name.rpartition("/")[0], provider=provider, site="s", cluster="c", partition="n",
        device="cpu", tp=1,
    )  # fmt: skip


def forecast(model, *, misses=(), **changes):
    return ModelForecast(
        model=model, replicas=1, utilisation=0.5, served=1.0, ttft_p95_s=BAND, tpot_p95_s=BAND, e2e_p95_s=BAND,
        misses=tuple(misses), **changes,
    )  # fmt: skip


def plan(*actions, replicas=(), models=(), cost=0.0, currency="", **changes):
    values = {
        "fabric": "f", "lineage": "", "blueprint_digest": "0123456789abcdef", "read_set": {"cluster/c": "known"},
        "actions": actions, "placement": Placement(replicas=tuple(replicas)),
        "forecast": Forecast(models=tuple(models), cost_per_hour=cost, currency=currency, power_w=0.0, basis="by hand"),
        "certificate": Certificate(solver="none", seed=0, optimal=True, stages=(), tables_sha256=""),
    }  # fmt: skip
    return Plan(**values | changes)
