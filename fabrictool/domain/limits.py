"""What may be used at most: of the whole fabric, or of one provider, site, cluster or account."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from fabrictool.domain.quantities import Document, Name, Power, Spending, Text, problem

__all__ = ["Limit"]

SCOPES = ("provider", "site", "cluster", "account")
RESOURCES = ("devices", "device_hours_per_month", "power", "cost")


class Limit(Document):
    """No plan goes beyond it. Of one part of the fabric, or of all that it has where none is named."""

    provider: Name | None = None
    """Of all sites of this provider."""
    site: Name | None = None
    """Of all clusters of this site."""
    cluster: Name | None = None
    """Of this cluster."""
    account: Text | None = None
    """Of all partitions whose jobs are on this account of a scheduler: `account`, `A`, `P` or `project` in their
    `job.options`."""
    devices: Annotated[int, Field(ge=0, le=10**9)] | None = None
    """That replicas keep from others at the same time."""
    device_hours_per_month: Annotated[int, Field(ge=0, le=10**12)] | None = None
    """Such as GPU hours. A month has 730 hours, and what is placed is placed for all of them: 7,300 are 10 devices.
    ``plan --horizon`` keeps the sum of its hours within their share of the month."""
    power: Power | None = None
    """Of the replicas' share of their nodes, as `energy` counts it."""
    cost: Spending | None = None
    """Of the replicas' share of their nodes, by hour, day or month: ``400 CHF/h``, ``250000 CHF/month``. What is by the
    month, ``plan --horizon`` keeps in the sum of its hours."""

    @property
    def scope(self) -> tuple[str, str]:
        """(kind, name) of the part that is limited; two times "" where it is the whole fabric."""
        return next(((kind, getattr(self, kind)) for kind in SCOPES if getattr(self, kind) is not None), ("", ""))

    def holds(self, *, provider: str, site: str, cluster: str, account: str) -> bool:
        """Whether what stands there is limited by it."""
        kind, name = self.scope
        return not kind or {"provider": provider, "site": site, "cluster": cluster, "account": account}[kind] == name

    @model_validator(mode="after")
    def _sound(self) -> Limit:
        scopes = [name for name in SCOPES if getattr(self, name) is not None]
        if len(scopes) > 1:
            hint = "keep one of them, and write another limit for the other"
            raise problem("FT1283", f"a limit is of one part of the fabric, not of {' and '.join(scopes)}", hint)
        if all(getattr(self, name) is None for name in RESOURCES):
            raise problem("FT1283", "this limits nothing", f"write one of {', '.join(RESOURCES)}")
        return self
