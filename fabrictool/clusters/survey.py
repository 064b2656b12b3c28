"""What a login node printed → facts: pure, so that every trap is a case in a file."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from fabrictool.base.clock import duration_text
from fabrictool.base.errors import FabrictoolError
from fabrictool.base.runfolder import DORMANT
from fabrictool.clusters.heartbeats import ALIVE, Heartbeats
from fabrictool.clusters.schedulers.protocol import JobFacts, SchedulerFacts, parse_comment
from fabrictool.domain.address import Address
from fabrictool.domain.observed import (
    LIVING,
    Blocked,
    ObservedUnit,
    UnitState,
    awaited,
    renewable,
    standing,
    wanted_models,
)
from fabrictool.domain.plan import spec_digest
from fabrictool.domain.specs import GatewaySpec, UnitSpec, decode_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fabrictool.clusters.heartbeats import Pulse
    from fabrictool.clusters.schedulers.protocol import Scheduler


@dataclass(frozen=True, slots=True)
class Survey:
    """Everything that one look brought back."""

    now: float
    """The scheduler's clock, wall seconds."""
    login_now: float
    """The login node's."""
    home: str
    base: str
    """Absolute base folder."""
    environment: str
    """What `bootstrap` placed there; "": nothing."""
    scheduler: SchedulerFacts
    units: tuple[ObservedUnit, ...] = ()
    specs: Mapping[str, UnitSpec] = field(default_factory=dict)
    here: bool = False
    """The folder of the units is there, as some start left it."""
    pages: Mapping[str, str] = field(default_factory=dict)
    """Operation → URL of its status page on the loopback of its own machine."""
    owner: str = ""
    """Who started something there first under the fabric's name: lineage, user and machine."""
    unsure: frozenset[str] = frozenset()
    """Operations of which only a later look can say whether they live."""


@dataclass(frozen=True, slots=True)
class Looker:
    """Who looks, and when: our own clocks beside the login node's, and what earlier looks saw."""

    wall: float
    monotonic: float
    heartbeats: Heartbeats


def read_survey(text: str, scheduler: Scheduler, *, thing: str, looker: Looker | None = None) -> Survey:
    """Without a `looker` it is the only look, by the login node's clock alone.

    Raises
    ------
    FabrictoolError
        FT5407 for a cut answer, FT5401 for one that cannot be read.
    """
    sections = _sections(text)
    host = sections.get("host", [])
    if "end" not in sections or len(host) < 2 or not sections.get("now") or not sections.get("base"):
        message = f"the login node's answer is incomplete: {text[-120:]!r}"
        raise FabrictoolError.of("FT5407", message, thing=thing, hint="run the command again", transient=True)
    now = float(sections["now"][0])
    facts = scheduler.facts(sections, now)
    folders: dict[str, dict[str, str]] = {}
    for line in sections.get("files", ()):
        path, _, content = line.partition(":")
        operation, name = posixpath.basename(posixpath.dirname(path)), posixpath.basename(path)
        folders.setdefault(operation, {})[name] = content
    specs = {operation: spec for operation, files in folders.items() if (spec := _spec(files)) is not None}
    looker = looker or Looker(now, 0.0, Heartbeats())
    clocks = (now, looker.wall)
    pulses = {
        operation: looker.heartbeats.pulse(operation, stamps, clocks, looker.monotonic)
        for operation, files in folders.items()
        if (stamps := _stamps(files))
    }
    prepared: dict[str, list[str]] = defaultdict(list)
    for path in sections.get("next", ()):  # …/OPERATION/next/NUMBER-OPERATION/submit
        *_, operation, _, follower, _ = path.split("/")
        prepared[operation].append(follower.partition("-")[2])
    units = _units(folders, specs, facts.jobs, pulses, prepared)
    unsure = {operation for operation, pulse in pulses.items() if pulse.verdict == "unsure"}
    return Survey(
        now=facts.now or now,
        login_now=now,
        home=host[1],
        base=sections["base"][0],
        environment=next(iter(sections.get("environment", ())), ""),
        scheduler=facts,
        units=units,
        specs=specs,
        here="here" in sections,
        pages={
            operation: str(object_of(files["process.json"]).get("status", ""))
            for operation, files in folders.items()
            if "process.json" in files
        },
        owner=next(iter(sections.get("owner", ())), ""),
        unsure=frozenset(unit.operation for unit in units if unit.state == "running" and unit.operation in unsure),
    )


def _sections(text: str) -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("@"):
            lines = sections.setdefault(line[1:].strip(), [])
        else:
            lines.append(line)
    return sections


def _spec(files: Mapping[str, str]) -> UnitSpec | None:
    try:
        return decode_spec(files.get("spec.json", "").encode())
    except msgspec.DecodeError:
        return None


def _units(
    folders: Mapping[str, Mapping[str, str]],
    specs: Mapping[str, UnitSpec],
    jobs: tuple[JobFacts, ...],
    pulses: Mapping[str, Pulse],
    prepared: Mapping[str, list[str]],
) -> tuple[ObservedUnit, ...]:
    """`prepared`: of an operation, those that may follow it from inside its job."""
    by_name: dict[str, JobFacts] = {}
    for job in jobs:  # of several with one name the one that is not over counts
        if job.name not in by_name or by_name[job.name].state == "ended":
            by_name[job.name] = job
    by_id = {job.id: job for job in jobs}
    units = []
    for operation, files in sorted(folders.items()):
        number = (files.get("jobid") or files.get("claim") or "").strip()
        mine: JobFacts | None = by_name.get(f"ft-{operation}")
        same = by_id.get(number)
        if mine is None and same is not None and not same.name:
            mine = same  # a number with another name is another's job: the scheduler uses numbers again
        units.append(
            _unit(
                operation, files, specs.get(operation), mine, number, pulses.get(operation), tuple(prepared[operation])
            )
        )
    known = {f"ft-{operation}" for operation in folders}
    for job in by_name.values():
        tags = parse_comment(job.comment)
        if job.name not in known and tags.get("op") and tags.get("rep") and job.state != "ended":
            units.append(
                ObservedUnit(
                    address=tags["rep"],
                    operation=tags["op"],
                    state="running" if job.state == "running" else "pending",
                    spec_digest="",
                    detail="its run folder is gone",
                    job=job.id,
                    lineage=tags.get("lin", ""),
                )
            )
    return tuple(units)


def _after_reboot(spec: UnitSpec | None, files: Mapping[str, str]) -> str:
    """What it would do against its spec, because `apply` was cut off or could not write a crontab."""
    if not isinstance(spec, GatewaySpec):
        return ""
    wanted = not isinstance(spec.after_reboot, msgspec.UnsetType)
    return "" if wanted == ("again" in files) else f"it would {'not' if wanted else 'still'} start again after a reboot"


# Long: a line for each thing that is known of a unit.
def _unit(
    operation: str,
    files: Mapping[str, str],
    spec: UnitSpec | None,
    job: JobFacts | None,
    number: str,
    pulse: Pulse | None,
    prepared: tuple[str, ...],
) -> ObservedUnit:
    meta, health, ending = (object_of(files.get(name, "")) for name in ("meta.json", "health.json", "exit.json"))
    state, reason = _state(files, job, number, ending, silent=pulse is None or _over(pulse))
    pulse = pulse or ALIVE  # it never said anything: nothing can be missed
    detail = paused = ""
    if state == "running":
        lost = f"no sign of life for {duration_text(pulse.age_s)}" if pulse.verdict != "alive" else ""
        paused = job.paused if job is not None else ""
        detail = paused or lost or str(health.get("text", "starting"))
        if ending:
            detail = f"its run has ended ({ending.get('reason', '')}), but its job has not"
        if job is None:
            detail = f"the scheduler does not list it, but it lives; {detail}".rstrip("; ")
    elif state == "pending":
        detail = "the scheduler may or may not have taken its job" if job is None else _queued(job)
    certificate_ends_at = _number(meta.get("certificate_ends_at"), None)
    tells = health if spec and state == "running" else {}
    in_force = standing(tells, files.get("spec.json", "").encode(), certificate_ends_at)
    if in_force == "current" and (otherwise := _after_reboot(spec, files)):
        in_force, detail = "former", otherwise
    holds = spec is None and state in LIVING
    if spec is None:
        state, reason = "damaged", reason or "its spec.json cannot be read"
    address = Address("damaged", operation) if spec is None else Address.of(spec)
    told_end = job.ends_at if job is not None and job.ends_at is not None else _number(health.get("ends_at"), None)
    return ObservedUnit(
        address=str(address),
        operation=operation,
        state=state,
        spec_digest=spec_digest(spec) if spec is not None else "",
        in_force=in_force,
        reason=reason,
        dormant=state == "ended" and DORMANT in files,
        wanted=wanted_models(tells),
        holds=holds,
        certificate_begins_at=_number(meta.get("certificate_begins_at"), 0.0) or 0.0,
        certificate_ends_at=certificate_ends_at,
        renewable=renewable(tells),
        hands_over=tells.get("hands_over") is True,
        followers=prepared,
        ends_at=told_end if state == "running" else None,
        waits_for="leaving" if ending else awaited(health.get("waits_for")) if state == "running" else "",
        ready=state == "running"
        and not (ending or paused)
        and health.get("ready") is True
        and pulse.verdict == "alive",
        blocked=job.blocked if job is not None else "",
        requeued="claim" in files and job is not None and job.state == "pending",
        detail=detail,
        job=job.id if job is not None else number,
        lineage=str(meta.get("lineage", "")),
        silent_s=pulse.age_s if state == "running" and pulse.verdict == "silent" else 0.0,
        node=job.node if job is not None else "",
        submitted_at=job.submitted_at if job is not None else None,
        begins_at=job.begins_at if job is not None else None,
    )


def _over(pulse: Pulse) -> bool:
    """Whether a unit that the scheduler does not list is dead: where clocks disagree, a second look says so."""
    return pulse.verdict == "silent" or (pulse.verdict == "unsure" and not pulse.skewed)


def _state(
    files: Mapping[str, str], job: JobFacts | None, number: str, ending: Mapping[str, Any], *, silent: bool
) -> tuple[UnitState, str]:
    """That the scheduler does not list a job is no proof: its agent must have said so, or give no sign of life."""
    reason = str(ending.get("reason", ""))
    if job is not None and job.state == "pending":
        return "pending", ""
    if job is not None and job.state == "running" and not (ending and job.leaving):
        return "running", ""  # also when its run says that it has ended: its files go when its job is over
    if ending:
        return "ended", reason
    if job is not None:
        why = f" ({job.reason})" if job.reason else ""
        return "killed", f"its job {job.id} ended: {job.native}{why}"
    if not number:
        return ("pending", "") if "attempt" in files else ("prepared", "")
    if "health.json" in files and not silent:
        return "running", ""
    return "killed", f"its job {number} is no longer known"


_BLOCKED_WORDS: Mapping[Blocked, str] = {
    "": "",
    "held": "it is held",
    "invalid": "it asks for something that is not granted",
    "limit": "a limit of the account or QoS is reached",
    "nodes": "its nodes are away",
}


def _queued(job: JobFacts) -> str:
    reason = job.reason or "in the queue"
    return f"{_BLOCKED_WORDS[job.blocked]} ({reason})" if job.blocked else reason


def _stamps(files: Mapping[str, str]) -> tuple[float, ...]:
    """Of the last heartbeat: by its writer's clock, and by the file server's; none without one."""
    health = object_of(files.get("health.json", ""))
    stamps = (_number(health.get("at"), 0.0), _seconds(files.get("health.json.mtime", "")))
    return tuple(stamp for stamp in stamps if stamp > 0.0) if health else ()


def object_of(text: str) -> dict[str, Any]:
    """What a unit wrote as JSON; empty for anything else."""
    try:
        value = msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _number(value: object, default: Any) -> Any:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default
