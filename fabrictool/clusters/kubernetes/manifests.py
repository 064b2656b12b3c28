"""A unit → the objects that make it run: a Job for an agent, a Deployment of one and a Service for a gateway; pure.

The unit's credential is in a Secret that is mounted read-only; the container copies it into its run folder, because a
unit wants its files to be its own and nobody else's. What it was told is in a ConfigMap, where a later look finds it.
"""

from __future__ import annotations

import base64
import math
import posixpath
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.errors import FabrictoolError
from fabrictool.catalog import accelerators
from fabrictool.clusters.jobs import check_one_node, meta_of
from fabrictool.clusters.kubernetes.names import ADDRESS, FABRIC, LINEAGE, OPERATION, UNIT, label_value, object_name
from fabrictool.domain.specs import AgentSpec, GatewaySpec, encode_spec

if TYPE_CHECKING:
    from fabrictool.clusters.protocol import NewUnit
    from fabrictool.domain.inventory import ClusterSpec

Object = dict[str, Any]

ROOT = "/run/fabrictool"
UNIT_FOLDER, SECRET_FOLDER, CONFIG_FOLDER = f"{ROOT}/unit", f"{ROOT}/secret", f"{ROOT}/config"
CONTAINER = "unit"
USER = 10001
"""User and group of every container of ours."""
GATEWAY_GRACE_S = 30
LEAVE_S = 15
"""After the drain: saying goodbye, stopping the engine."""
_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu"}
"""Vendor → the name under which its device plugin offers devices."""
_READY = f"grep -q '\"ready\": *true' {UNIT_FOLDER}/health.json"


@dataclass(frozen=True, slots=True)
class UnitObjects:
    """The objects of one unit, in the order in which they are made."""

    config: Object
    secret: Object
    service: Object | None
    workload: Object
    """The Job or the Deployment: whether it exists decides whether the unit was started."""

    @property
    def all(self) -> list[Object]:
        """In the order in which they are made."""
        return [item for item in (self.config, self.secret, self.service, self.workload) if item is not None]


def objects_of(unit: NewUnit, described: ClusterSpec, cluster: str, fabric: str) -> UnitObjects:
    """The objects of one unit.

    Raises
    ------
    FabrictoolError
        FT5403 without an image, FT5408 for what cannot run there.
    """
    image = described.software.python.container
    if image is None:
        message = f"{cluster} has no image for units"
        hint = "`software.python.container` in the inventory: an image with fabrictool in it"
        raise FabrictoolError.of("FT5403", message, thing=f"cluster/{cluster}", hint=hint)
    meta = _meta(unit, fabric)
    told = msgspec.json.decode(encode_spec(unit.spec))
    if isinstance(unit.spec, GatewaySpec):
        _check_ports(unit.address, unit.spec)
        inside = told | {key: ["0.0.0.0", told[key][1]] for key in ("listen", "mesh")}  # noqa: S104 - the pod's own
        workload = _deployment(meta, _pod(unit, described, cluster, image, meta))
        service = _service(meta, unit.spec, fabric)
    else:
        inside, service = told, None
        workload = _job(meta, _pod(unit, described, cluster, image, meta))
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": meta,
        "immutable": True,
        "data": {
            "spec.json": encode_spec(unit.spec).decode() + "\n",
            "unit.json": msgspec.json.encode(inside, order="deterministic").decode() + "\n",
            "meta.json": meta_of(unit).decode() + "\n",
        },
    }
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": meta,
        "immutable": True,
        "type": "Opaque",
        "data": {_key(name): base64.b64encode(data).decode() for name, data in sorted(unit.files.items())},
    }
    return UnitObjects(config, secret, service, workload)


def _meta(unit: NewUnit, fabric: str) -> Object:
    return {
        "name": object_name(unit.operation),
        "labels": {
            "app.kubernetes.io/managed-by": "fabrictool",
            FABRIC: label_value(fabric),
            LINEAGE: label_value(unit.lineage),
            OPERATION: label_value(unit.operation),
            UNIT: label_value(unit.address.replace("/", ".")),
        },
        "annotations": {ADDRESS: unit.address, OPERATION: unit.operation},
    }


def _key(name: str) -> str:
    """A Secret's keys hold no slash."""
    return name.replace("/", "--")


def _check_ports(address: str, spec: GatewaySpec) -> None:
    ports = [listener.port for listener in spec.listeners.values()]
    if not all(ports) or len(set(ports)) < len(ports):
        message = f"{address} needs fixed ports, each of its own, not {' and '.join(map(str, ports))}"
        raise FabrictoolError.of("FT5408", message, thing=address, hint="name them in `gateway` of the blueprint")


def _ports(spec: GatewaySpec) -> list[tuple[str, int]]:
    return [(name, listener.port) for name, listener in spec.listeners.items()]


def _job(meta: Object, pod: Object) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "template": pod | {"metadata": _pod_metadata(meta)},
        },
    }


def _deployment(meta: Object, pod: Object) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta,
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": {key: meta["labels"][key] for key in (FABRIC, OPERATION)}},
            "template": pod | {"metadata": _pod_metadata(meta)},
        },
    }


def _pod_metadata(meta: Object) -> Object:
    return {"labels": meta["labels"], "annotations": meta["annotations"]}


def _service(meta: Object, spec: GatewaySpec, fabric: str) -> Object:
    """Selects by the gateway's name: its address stays when another operation follows."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta | {"name": object_name(f"{fabric}-gateway-{spec.name}")},
        "spec": {
            "type": "ClusterIP",
            "selector": {key: meta["labels"][key] for key in (FABRIC, LINEAGE, UNIT)},
            "ports": [
                {"name": name, "protocol": "TCP", "port": port, "targetPort": port} for name, port in _ports(spec)
            ],
        },
    }


def _container(unit: NewUnit, image: str) -> Object:
    return {
        "name": CONTAINER,
        "image": image,
        "command": ["/bin/sh", "-c", _script(unit)],
        "env": [
            {"name": "HOME", "value": f"{ROOT}/home"},
            {"name": "FABRICTOOL_CACHE_DIR", "value": f"{ROOT}/cache"},
        ],
        "readinessProbe": {"exec": {"command": ["/bin/sh", "-c", _READY]}, "periodSeconds": 5, "failureThreshold": 3},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "runAsNonRoot": True,
        },
        "volumeMounts": [
            {"name": "unit", "mountPath": ROOT},
            {"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True},
            {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        ],
    }


def _pod(unit: NewUnit, described: ClusterSpec, cluster: str, image: str, meta: Object) -> Object:
    spec, container = unit.spec, _container(unit, image)
    agent = spec if isinstance(spec, AgentSpec) else None
    inside: Object = {
        "restartPolicy": "Never" if agent is not None else "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GATEWAY_GRACE_S if agent is None else math.ceil(agent.drain_s) + LEAVE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "unit", "emptyDir": {}},
            {
                "name": "secret",
                "secret": {
                    "secretName": meta["name"],
                    "defaultMode": 0o440,
                    "items": [{"key": _key(name), "path": name} for name in sorted(unit.files)],
                },
            },
            {
                "name": "config",
                "configMap": {
                    "name": meta["name"],
                    "items": [{"key": "unit.json", "path": "spec.json"}, {"key": "meta.json", "path": "meta.json"}],
                },
            },
        ],
    }
    if isinstance(spec, AgentSpec):
        _fit(unit.address, spec, described, cluster, inside, container)
    else:
        container["ports"] = [{"name": name, "containerPort": port} for name, port in _ports(spec)]
    return {"spec": inside}


def _fit(
    address: str, spec: AgentSpec, described: ClusterSpec, cluster: str, inside: Object, container: Object
) -> None:
    """Devices, size, nodes and the time that it may last."""
    check_one_node(address, spec, described.kind)
    partition = described.partitions[spec.partition]
    if spec.devices > partition.devices_per_node:
        message = f"{address} needs {spec.devices} devices of one node, and a node of {spec.partition} has "
        raise FabrictoolError.of("FT5408", f"{message}{partition.devices_per_node}", thing=address)
    devices = max(1, spec.devices)
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}
    if partition.job.cpus_per_device is not None:
        requests["cpu"] = str(partition.job.cpus_per_device * devices)
    if partition.job.memory_per_device is not None:
        requests["memory"] = limits["memory"] = str(int(partition.job.memory_per_device) * devices)
    accelerator = accelerators()[spec.device]
    if accelerator.kind != "cpu" and spec.devices:
        resource = _RESOURCES.get(accelerator.title.partition(" ")[0])
        if resource is None:
            message = f"no device plugin is known here for {accelerator.title}, which {address} needs"
            raise FabrictoolError.of("FT5408", message, thing=f"cluster/{cluster}")
        limits[resource] = str(partition.devices_per_node if partition.whole_nodes else spec.devices)
        inside["tolerations"] = [{"key": resource, "operator": "Exists", "effect": "NoSchedule"}]
        if spec.devices > 1:  # devices speak to each other through shared memory, of which a container has 64 MiB
            inside["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
            container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - a mount
    resources = {name: values for name, values in (("requests", requests), ("limits", limits)) if values}
    if resources:
        container["resources"] = resources
    if partition.job.options:
        inside["nodeSelector"] = dict(sorted(partition.job.options.items()))
    if spec.walltime_s is not None:  # of the pod, not of the Job, whose clock runs while the pod waits for a node
        inside["activeDeadlineSeconds"] = max(1, int(spec.walltime_s))


def _script(unit: NewUnit) -> str:
    """Copies what it is told into a run folder of its own and becomes the unit."""
    folders = sorted({posixpath.dirname(name) for name in unit.files} - {""})
    lines = ["set -eu", "umask 077", f"mkdir -p {ROOT}/home {ROOT}/cache {UNIT_FOLDER}"]
    lines += [f"mkdir -p {shlex.quote(posixpath.join(UNIT_FOLDER, name))}" for name in folders]
    for name in sorted(unit.files):
        here, there = posixpath.join(SECRET_FOLDER, name), posixpath.join(UNIT_FOLDER, name)
        lines.append(f"cp -L {shlex.quote(here)} {shlex.quote(there)}")
        lines.append(f"chmod 600 {shlex.quote(there)}")
    lines.append(f"cp -L {CONFIG_FOLDER}/meta.json {CONFIG_FOLDER}/spec.json {UNIT_FOLDER}/")
    if isinstance(unit.spec, GatewaySpec):
        lines.append(f"exec python3 -P -m fabrictool.gateway {UNIT_FOLDER}")
    else:
        walltime = unit.spec.walltime_s
        ends = f' "$(( $(date +%s) + {max(1, int(walltime))} ))"' if walltime is not None else ""
        lines.append(f"exec python3 -P -m fabrictool.agent {UNIT_FOLDER}{ends}")
    return "\n".join(lines) + "\n"
