"""What ``kubectl get … -o json`` printed → units; pure.

A unit's ConfigMap says what it was told, and outlives its Job: a unit that was stopped is not one that was never
started. A pod that is being deleted still runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.kubernetes.names import ADDRESS, LINEAGE, OPERATION, STARTED, STOPPED
from fabrictool.domain.observed import LIVING, ObservedUnit, UnitState
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import UnitSpec, decode_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KINDS = ("ConfigMap", "Job", "Deployment", "Pod")


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """What one look at the namespace showed."""

    units: tuple[ObservedUnit, ...] = ()
    specs: Mapping[str, UnitSpec] = field(default_factory=dict)
    begun: frozenset[str] = frozenset()
    """Operations that have, or had, a Job or a Deployment."""
    configured: frozenset[str] = frozenset()
    """Operations that have a ConfigMap."""


@dataclass(slots=True)
class _Parts:
    config: dict[str, Any] | None = None
    workload: dict[str, Any] | None = None
    pods: list[dict[str, Any]] = field(default_factory=list)


def read_objects(text: str, *, thing: str) -> NamespaceFacts:
    """Raises FT5401 for what cannot be read."""
    try:
        items = msgspec.json.decode(text.encode())["items"]
        operations = _by_operation(items)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        message = f"unexpected output of kubectl: {text[:120]!r}"
        raise FabrictoolError.of("FT5401", message, thing=thing, hint="report it with `kubectl version`") from error
    specs = {name: spec for name, parts in operations.items() if (spec := _spec(parts)) is not None}
    return NamespaceFacts(
        units=tuple(_unit(name, parts, specs.get(name)) for name, parts in sorted(operations.items())),
        specs=specs,
        begun=frozenset(name for name, parts in operations.items() if _begun(parts)),
        configured=frozenset(name for name, parts in operations.items() if parts.config is not None),
    )


def _by_operation(items: Sequence[dict[str, Any]]) -> dict[str, _Parts]:
    grouped: dict[str, _Parts] = {}
    for item in items:
        operation = _annotations(item).get(OPERATION, "")
        if not operation or item["kind"] not in _KINDS:
            continue
        parts = grouped.setdefault(operation, _Parts())
        if item["kind"] == "ConfigMap":
            parts.config = item
        elif item["kind"] == "Pod":
            parts.pods.append(item)
        else:
            parts.workload = item
    return grouped


def _annotations(item: Mapping[str, Any]) -> dict[str, str]:
    return item["metadata"].get("annotations") or {}


def _begun(parts: _Parts) -> bool:
    noted = _annotations(parts.config) if parts.config is not None else {}
    return parts.workload is not None or bool(parts.pods) or STARTED in noted or STOPPED in noted


def _spec(parts: _Parts) -> UnitSpec | None:
    try:
        return decode_spec(((parts.config or {}).get("data") or {}).get("spec.json", "").encode())
    except msgspec.DecodeError:
        return None


def _unit(operation: str, parts: _Parts, spec: UnitSpec | None) -> ObservedUnit:
    any_part = parts.config or parts.workload or parts.pods[0]
    pod = max(parts.pods, key=lambda pod: (not _over(pod), pod["metadata"].get("creationTimestamp", "")), default={})
    state, reason, detail = _state(parts, pod)
    status, meta = pod.get("status") or {}, _meta(parts)
    holds = spec is None and state in LIVING
    begun = _time(status.get("startTime"))
    deadline = (pod.get("spec") or {}).get("activeDeadlineSeconds")
    return ObservedUnit(
        address=_annotations(any_part).get(ADDRESS, f"damaged/{operation}"),
        operation=operation,
        state=state if spec is not None else "damaged",
        spec_digest=spec_digest(spec) if spec is not None else "",
        reason=reason or ("" if spec is not None else "its ConfigMap is gone or cannot be read"),
        holds=holds,
        certificate_begins_at=meta.get("certificate_begins_at") or 0.0,
        certificate_ends_at=meta.get("certificate_ends_at"),
        ends_at=begun + deadline if state == "running" and begun is not None and deadline else None,
        ready=state == "running" and _ready(status) and "deletionTimestamp" not in pod["metadata"],
        detail=detail,
        job=parts.workload["metadata"]["name"] if parts.workload is not None else "",
        lineage=(any_part["metadata"].get("labels") or {}).get(LINEAGE, ""),
        submitted_at=_time(parts.workload["metadata"].get("creationTimestamp")) if parts.workload else None,
        begins_at=begun if state == "running" else None,
    )


def _meta(parts: _Parts) -> dict[str, Any]:
    try:
        meta = msgspec.json.decode(((parts.config or {}).get("data") or {}).get("meta.json", "").encode())
    except msgspec.DecodeError:
        return {}
    return meta if isinstance(meta, dict) else {}


def _over(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def _ready(status: Mapping[str, Any]) -> bool:
    return any(
        condition.get("type") == "Ready" and condition.get("status") == "True"
        for condition in status.get("conditions") or ()
    )


def _state(parts: _Parts, pod: Mapping[str, Any]) -> tuple[UnitState, str, str]:
    """State, how it ended, and what is to be said of it."""
    if pod and not _over(pod):
        leaving = "it is leaving" if "deletionTimestamp" in pod["metadata"] else ""
        if (pod.get("status") or {}).get("phase") in ("Running", "Unknown"):
            return "running", "", leaving or _waiting(pod) or "starting" * (not _ready(pod["status"]))
        return "pending", "", leaving or _waiting(pod) or "waits for a node"
    noted = _annotations(parts.config) if parts.config is not None else {}
    if pod and parts.workload is not None and parts.workload["kind"] == "Deployment":
        return "pending", "", "its pod ended; another one follows"
    if pod:
        return _ending(pod)
    if parts.workload is not None:
        for condition in (parts.workload.get("status") or {}).get("conditions") or ():
            if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
                why = condition.get("message") or condition.get("reason") or ""
                return ("ended", "its pod is gone", "") if condition["type"] == "Complete" else ("killed", why, "")
        return "pending", "", "it has no pod yet"
    if STOPPED in noted:
        return "ended", "it was told to stop", ""
    if STARTED in noted:
        return "killed", "its Job or Deployment was deleted by somebody else", ""
    return "prepared", "", ""


def _ending(pod: Mapping[str, Any]) -> tuple[UnitState, str, str]:
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated")
        if ended is not None and ended.get("exitCode") == 0:
            return "ended", "it left in order", ""
        if ended is not None:
            message = (ended.get("message") or "").strip()[-200:]
            why = status.get("reason") or ended.get("reason") or ""
            return "killed", f"exit {ended.get('exitCode')}: {why} {message}".strip(), ""
    if status.get("phase") == "Succeeded":
        return "ended", "it left in order", ""
    return "killed", status.get("message") or status.get("reason") or "its pod failed", ""


def _waiting(pod: Mapping[str, Any]) -> str:
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        waits = (container.get("state") or {}).get("waiting")
        if waits is not None:
            return ": ".join(filter(None, (waits.get("reason"), waits.get("message"))))[:200]
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return str(condition.get("message") or condition.get("reason") or "")[:200]
    return ""


def _time(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
