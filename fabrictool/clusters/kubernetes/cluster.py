"""A namespace as a cluster: ``kubectl`` as a program, a few calls for any number of units.

A start is never believed on ``kubectl``'s exit code: what the namespace holds afterwards decides, and its words on
stderr only say why something is missing. Nothing here waits for a pod.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.clusters.kubernetes.facts import read_objects
from fabrictool.clusters.kubernetes.manifests import objects_of
from fabrictool.clusters.kubernetes.names import OPERATION, STARTED, STOPPED, selector
from fabrictool.domain.observed import ClusterFacts, lives

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from fabrictool.clusters.kubernetes.facts import NamespaceFacts
    from fabrictool.clusters.kubernetes.manifests import UnitObjects
    from fabrictool.clusters.protocol import JobScript, NewUnit
    from fabrictool.domain.inventory import ClusterSpec
    from fabrictool.domain.plan import Outlook
    from fabrictool.domain.specs import UnitSpec
    from fabrictool.status.documents import StatusDocument

REQUEST_SECONDS = 30
"""Of one request to the API server."""
CALL_SECONDS = 60.0
CALL_SECONDS_EACH = 1.0
"""Of one call of ``kubectl``, and for each object that it makes."""
KILL_GRACE_S = 1
"""Not 0: that would forget a pod whose node has not said that it is gone."""
_EXISTS = "(AlreadyExists)"
_PASSING = re.compile(
    r"exceeded quota|TooManyRequests|ServerTimeout|Timeout|InternalError|ServiceUnavailable|timed? ?out|"
    r"connection refused|connection reset|EOF|no answer within"
)
_WORKLOADS = "jobs,deployments"


class KubernetesCluster:
    """See the module's docstring. `program` is ``kubectl``, by name or path."""

    def __init__(self, name: str, fabric: str, described: ClusterSpec, *, program: str = "kubectl") -> None:
        self.name = name
        self.poll_s = float(described.poll)
        self._fabric = fabric
        self._described = described
        self._program = program
        self._seen: NamespaceFacts | None = None

    # -- facts ------------------------------------------------------------------------------------------------

    def observe(self, *, brief: bool = False, patient: bool = False) -> ClusterFacts:
        try:
            seen = self._look()
        except FabrictoolError as error:
            reason = "; ".join(problem.message for problem in error.problems)
            return ClusterFacts(cluster=self.name, known=False, reason=reason, hint=error.problems[0].hint or "")
        return ClusterFacts(cluster=self.name, known=True, units=seen.units, scheduler="Kubernetes")

    def outlook(self, units: Sequence[NewUnit]) -> tuple[list[Outlook], list[str]]:
        """No start is predicted; what cannot be written down is a warning."""
        warnings: dict[str, None] = {}
        for unit in units:
            try:
                self._objects(unit)
            except FabrictoolError as error:
                warnings |= {f"{problem.code} {problem.message}": None for problem in error.problems}
        return [], list(warnings)

    def scripts(self, units: Sequence[NewUnit]) -> list[JobScript]:
        return []

    def spec(self, operation: str) -> UnitSpec:
        """From the last look; raises FT5104 when that has none."""
        spec = (self._seen or self._look()).specs.get(operation)
        if spec is None:
            message = f"the spec of {operation} cannot be read"
            raise FabrictoolError.of("FT5104", message, thing=f"cluster/{self.name}")
        return spec

    def certificate(self, operation: str) -> bytes:
        """None is renewed: what a pod was given cannot be changed."""
        raise FabrictoolError.of("FT5408", "nothing reaches into a pod", thing=operation)

    def document(self, operation: str) -> StatusDocument | None:
        """None: nothing reaches into a pod."""
        return None

    def page(self, operation: str) -> AbstractContextManager[str]:
        return contextlib.nullcontext("")

    def log_tail(self, operation: str, lines: int) -> list[str]:
        """Of its pod, as long as that is kept."""
        done = self._run(["logs", f"--selector={selector(self._fabric, [operation])}", f"--tail={lines}"])
        self._check(done)
        return done.stdout.decode(errors="replace").splitlines()

    def former_log(self, start: str, lines: int) -> list[str]:
        return []

    # -- commands ---------------------------------------------------------------------------------------------

    def start(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        """Make what a unit needs, then its Job or Deployment; then look which of them are there."""
        failed: dict[str, FabrictoolError] = {}
        wanted: dict[str, UnitObjects] = {}
        begun = self._look().begun if units else frozenset()
        for unit in units:
            if unit.operation in begun:
                continue
            try:
                wanted[unit.operation] = self._objects(unit)
            except FabrictoolError as error:
                failed[unit.operation] = error
        if not wanted:
            return failed
        created, stderr = self._create([manifest for objects in wanted.values() for manifest in objects.all[:-1]])
        seen = self._look()
        for operation, objects in list(wanted.items()):
            lacking = self._lacking(operation, objects, seen, created, stderr)
            if lacking is not None:
                failed[operation] = lacking
                del wanted[operation]
        _, stderr = self._create([objects.workload for objects in wanted.values()])
        seen = self._look()
        for operation, objects in wanted.items():
            if operation not in seen.begun:
                failed[operation] = self._refusal(operation, objects.workload, stderr)
        self._note(STARTED, [operation for operation in wanted if operation in seen.begun])
        self._adopt_services(objects for operation, objects in wanted.items() if operation in seen.begun)
        return failed

    def update(self, units: Sequence[NewUnit]) -> dict[str, FabrictoolError]:
        """None: what a pod was given cannot be changed, and its units do not say that it can."""
        message = "a unit in a namespace cannot take over another spec"
        return {unit.operation: FabrictoolError.of("FT5408", message, thing=unit.address) for unit in units}

    def stop(self, operations: Iterable[str]) -> None:
        """Note that they are not started again; delete Jobs and Deployments, whose pods get TERM and their grace."""
        named = sorted(operations)
        if named:
            self._note(STOPPED, named)
            self._delete(_WORKLOADS, named, "--cascade=background")

    def kill(self, operations: Iterable[str]) -> None:
        named = sorted(operations)
        if named:
            self.stop(named)
            self._delete("pods", named, f"--grace-period={KILL_GRACE_S}")

    def forget(self, operations: Iterable[str]) -> None:
        """Delete the objects of units that do not run, the Secrets first; raises FT5102 for one that does."""
        named = sorted(operations)
        if not named:
            return
        living = sorted(unit.operation for unit in self._look().units if unit.operation in named and lives(unit))
        if living:
            raise FabrictoolError.of("FT5102", f"still running: {', '.join(living)}", thing=f"cluster/{self.name}")
        self._delete("secrets", named)
        self._delete(f"{_WORKLOADS},services,configmaps", named, "--cascade=background")

    def close(self) -> None: ...

    # -- internals --------------------------------------------------------------------------------------------

    def _objects(self, unit: NewUnit) -> UnitObjects:
        return objects_of(unit, self._described, self.name, self._fabric)

    def _look(self) -> NamespaceFacts:
        done = self._run(["get", f"{_WORKLOADS},pods,configmaps", f"--selector={selector(self._fabric)}", "-o", "json"])
        self._check(done)
        self._seen = read_objects(done.stdout.decode(errors="replace"), thing=f"cluster/{self.name}")
        return self._seen

    def _create(self, objects: Sequence[Mapping[str, Any]]) -> tuple[frozenset[str], str]:
        """All in one call: ``KIND/NAME`` of those that were made or existed, and what was said of the others."""
        if not objects:
            return frozenset(), ""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        argv = ["create", "--validate=false", "-o", "name", "-f", "-"]
        try:
            done = self._run(argv, stdin=text.encode(), timeout_s=CALL_SECONDS + CALL_SECONDS_EACH * len(objects))
        except UnreachableError as error:  # the look that follows decides
            return frozenset(), str(error)
        stderr = done.stderr.decode(errors="replace")
        created = {re.sub(r"\..*?/", "/", line.strip(), count=1) for line in done.stdout.decode().splitlines()}
        return frozenset(
            created | {_id(manifest) for manifest in objects if _line_about(manifest, stderr, _EXISTS)}
        ), stderr

    def _lacking(
        self, operation: str, objects: UnitObjects, seen: NamespaceFacts, created: frozenset[str], stderr: str
    ) -> FabrictoolError | None:
        """Why a unit's Job would have nothing to start from; None when all is there."""
        if operation not in seen.configured and _id(objects.config) in created:
            message = (
                f"{objects.config['metadata']['name']} exists there already, and does not belong to {self._fabric}"
            )
            hint = "give this fabric a namespace of its own"
            return FabrictoolError.of("FT5412", message, thing=f"cluster/{self.name}", hint=hint)
        for manifest in objects.all[:-1]:
            if _id(manifest) not in created:
                return self._refusal(operation, manifest, stderr)
        return None

    def _refusal(self, operation: str, manifest: Mapping[str, Any], stderr: str) -> FabrictoolError:
        why = _line_about(manifest, stderr) or stderr.strip()[-300:] or "it is not there, for no stated reason"
        return UnreachableError.of(
            "FT5413",
            f"{operation}: {manifest['kind']} {manifest['metadata']['name']} was not made: {why}",
            thing=f"cluster/{self.name}",
            hint="correct rights, quota or the inventory; the message has the API server's own words",
            transient=_PASSING.search(why) is not None,
        )

    def _note(self, mark: str, operations: Sequence[str]) -> None:
        """Annotate the ConfigMaps; those that are gone need no note."""
        if not operations:
            return
        words = [f"--selector={selector(self._fabric, operations)}", f"{mark}={int(time.time())}", "--overwrite"]
        self._check(self._run(["annotate", "configmaps", *words]))

    def _adopt_services(self, started: Iterable[UnitObjects]) -> None:
        """A gateway's Service stays when another operation of it follows, and goes with the last one."""
        for objects in started:
            if objects.service is not None:
                meta = objects.service["metadata"]
                mark = f"{OPERATION}={meta['labels'][OPERATION]}"
                self._check(self._run(["label", "services", meta["name"], mark, "--overwrite"]))

    def _delete(self, kinds: str, operations: Sequence[str], *options: str) -> None:
        words = [f"--selector={selector(self._fabric, operations)}", "--wait=false", "--ignore-not-found", *options]
        self._check(self._run(["delete", kinds, *words]))

    def _run(
        self, words: Sequence[str], *, stdin: bytes = b"", timeout_s: float = CALL_SECONDS
    ) -> subprocess.CompletedProcess[bytes]:
        where = self._described.kubernetes
        program = shutil.which(self._program)
        if program is None or where is None:
            message = f"the program {self._program} is not on this machine's path"
            hint = "install kubectl, in a version within one minor of the API server's"
            raise UnreachableError.of("FT5411", message, thing=f"cluster/{self.name}", hint=hint)
        argv = [program, f"--context={where.context}", f"--namespace={where.namespace}"]
        try:
            return subprocess.run(
                [*argv, f"--request-timeout={REQUEST_SECONDS}s", *words],
                input=stdin,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise self._silent(f"no answer within {timeout_s:.0f} s") from error
        except OSError as error:
            raise self._silent(f"{program}: {error.strerror}") from error

    def _check(self, done: subprocess.CompletedProcess[bytes]) -> None:
        if done.returncode:
            raise self._silent(done.stderr.decode(errors="replace").strip()[-300:] or f"exit {done.returncode}")

    def _silent(self, why: str) -> FabrictoolError:
        return UnreachableError.of(
            "FT5414",
            f"kubectl gets no answer: {why}",
            thing=f"cluster/{self.name}",
            hint="`kubectl --context … --namespace … get pods` must work for you; nothing is touched until it does",
            transient=True,
        )


def _id(manifest: Mapping[str, Any]) -> str:
    """As ``kubectl -o name`` writes it, without the group."""
    return f"{manifest['kind'].lower()}/{manifest['metadata']['name']}"


def _line_about(manifest: Mapping[str, Any], stderr: str, word: str = "") -> str:
    """The line on stderr about an object that has `word` in it; "": none."""
    kind, name = manifest["kind"].lower(), f'"{manifest["metadata"]["name"]}"'
    for line in stderr.splitlines():
        if name in line and word in line and (f"{kind}s" in line or f"{kind} " in line.lower()):
            return line.strip()[-300:]
    return ""
