"""A login node's answers, judged; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fabrictool.base.errors import FabrictoolError
from fabrictool.base.units import Duration
from fabrictool.clusters.checks.result import Check
from fabrictool.clusters.devices import device_named
from fabrictool.clusters.site_facts import sections_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fabrictool.clusters.schedulers.protocol import Scheduler, SchedulerFacts
    from fabrictool.domain.inventory import ClusterSpec

CLOCK_WORTH_A_WORD_S = 2.0
CLOCK_WRONG_S = 30.0
"""Certificates and leases are compared with both clocks."""
LOW_SPACE = 1 << 30
LITTLE_SPACE = 5 << 30
FEW_INODES = 20_000
"""An environment has some 2300 files, a unit about 20."""
NEARLY = 0.95
SLOW_SHELL_S = 3.0
"""A command that takes longer is worth a word."""


def clock(difference_s: float, uncertainty_s: float) -> Check:
    """`difference_s`: the login node's clock less ours, give or take the time of the question."""
    surely = max(0.0, abs(difference_s) - uncertainty_s)
    where = "ahead of" if difference_s > 0 else "behind"
    text = f"{abs(difference_s):.1f} s {where} this machine's" if surely > 0.05 else "as this machine's"
    hint = "set the clock that is wrong, best by NTP"
    if surely > CLOCK_WRONG_S:
        return Check("clock", False, text, hint)
    return Check("clock", True, text, hint, warning=surely > CLOCK_WORTH_A_WORD_S)


def noise(printed: bytes) -> Check:
    """What start-up files print before a command: it is cut off, but costs time and may hide an error."""
    if not printed.strip():
        return Check("login noise", True, "none")
    first = printed.decode(errors="replace").strip().splitlines()[0][:60]
    hint = "harmless: fabrictool cuts it off; guard it with `[ -t 1 ]` in the start-up file to save time"
    return Check(
        "login noise", True, f"{len(printed)} octets before each command, such as {first!r}", hint, warning=True
    )


def folder_checks(text: str, *, thing: str) -> tuple[list[Check], str]:
    """What ``doctor-login.sh`` says of the shell, the folder and its file system; the folder for a job, "" for none.

    Raises
    ------
    FabrictoolError
        FT5407 for an answer that was cut off.
    """
    sections = sections_of(text)
    if "end" not in sections:
        message = f"the login node's answer is incomplete: {text[-120:]!r}"
        raise FabrictoolError.of("FT5407", message, thing=thing, hint="run the command again", transient=True)
    first = {name: lines[0] for name, lines in sections.items() if lines}
    folder = first.get("folder", "")
    there = folder.startswith("/")
    checks = [Check("shell", True, first.get("shell", "unknown"))]
    checks.append(
        Check(
            "folder",
            there,
            folder.rpartition("/doctor/")[0] if there else folder,
            "check your rights there, or choose another `folder` in the inventory",
        )
    )
    checks += [_space(first), *_inodes(first), *quota_checks(sections.get("quota", ()))]
    return checks + (_locks(sections.get("locks", ())) if there else []), folder if there else ""


def _space(first: Mapping[str, str]) -> Check:
    free, _, mounted = first.get("space", "").partition(" ")
    if not free.isdecimal():
        return Check("space", True, "df gives no answer", "check by hand that there is room", warning=True)
    octets = int(free) * 1024
    text = f"{octets / 2**30:.1f} GiB free on {mounted}"
    return Check("space", octets > LOW_SPACE, text, "free some space", warning=octets < LITTLE_SPACE)


def _inodes(first: Mapping[str, str]) -> list[Check]:
    free = first.get("inodes", "")
    if not free.isdecimal() or int(free) == 0 or int(free) >= FEW_INODES:  # 0: the file system does not count them
        return []
    return [Check("space", False, f"only {free} more files can be made", "remove files, or ask for a higher limit")]


def quota_checks(lines: Sequence[str]) -> list[Check]:
    """Rows of ``quota -w`` and ``lfs quota -q``: name, blocks (KiB), soft and hard limit, then files alike."""
    checks: list[Check] = []
    for line in lines:
        words = line.split()
        numbers = [word.rstrip("*") for word in words[1:]]
        if len(words) < 4 or not all(number.isdecimal() for number in numbers[:3]):
            continue
        rest = numbers[3:]
        files = rest if rest and rest[0].isdecimal() else rest[1:]  # a time of grace stands between, if there is one
        for values, scale, unit in ((numbers[:3], 2**20, "GiB"), (files[:3], 1, "files")):
            if len(values) < 3 or not all(value.isdecimal() for value in values):
                continue
            used, limit = int(values[0]), min((int(value) for value in values[1:] if int(value)), default=0)
            if limit:
                text = f"{words[0]}: {used / scale:.4g} of {limit / scale:.4g} {unit}"
                checks.append(Check("quota", used < NEARLY * limit, text, "remove files, or ask for a larger quota"))
    return checks or [Check("quota", True, "none shown")]


def cron_check(text: str) -> Check:
    """Whether `after_reboot: cron` would start anything again, by the answer of ``doctor-login.sh``."""
    lines = sections_of(text).get("cron", ())
    daemon = next((line.removeprefix("runs ") for line in lines if line.startswith("runs ")), "")
    crontab = any(line.endswith("crontab") for line in lines)
    hint = "have cron installed and started there, or choose `after_reboot: site`"
    if not crontab:
        return Check("cron", False, "there is no program crontab", hint)
    if daemon:
        return Check("cron", True, f"{daemon} runs")
    if "unseen" in lines:  # the machine hides others' processes
        return Check("cron", True, "whether its daemon runs cannot be seen", hint, warning=True)
    return Check("cron", False, "no daemon runs that would start anything after a reboot", hint)


def _locks(lines: Sequence[str]) -> list[Check]:
    hint = "agents' files need a file system with hard links; choose another `folder`"
    links = Check("hard links", "links work" in lines, "work" if "links work" in lines else "fail", hint)
    if "flock works" in lines:
        return [links, Check("locks", True, "flock works")]
    what = "flock is not installed" if "flock absent" in lines else "flock does not work here"
    text = f"{what}; fabrictool locks with folders and hard links instead"
    return [links, Check("locks", True, text, "ask the site to mount it with -o flock", warning=True)]


def scheduler_checks(text: str, scheduler: Scheduler, facts: SchedulerFacts) -> list[Check]:
    """Its commands, its release, and whether it remembers old jobs."""
    sections = sections_of(text)
    wanted = scheduler.commands
    missing = [name for name in wanted if name not in sections.get("programs", ())]
    hint = "is this a login node of the cluster? the commands may need a module that non-interactive shells do not load"
    text_of = f"missing: {', '.join(missing)}" if missing else ", ".join(wanted)
    checks = [Check("commands", not missing, text_of, hint)] if wanted else []
    old = scheduler.oldest is not None and bool(facts.version) and facts.version < scheduler.oldest
    oldest = ".".join(f"{part:02d}" for part in scheduler.oldest or ())
    checks.append(Check("scheduler", not old, facts.name, f"{oldest} or later is needed" if oldest else ""))
    if not scheduler.accounting:
        return checks
    answer = sections.get("accounting", ())
    if answer == ["asked"]:
        return [*checks, Check("accounting", True, f"{scheduler.accounting} answers")]
    why = answer[0] if answer else f"{scheduler.accounting} is missing"
    return [
        *checks,
        Check("accounting", True, f"none ({why[:80]}); how old jobs ended is known from their run folders only"),
    ]


def partition_checks(described: ClusterSpec, facts: SchedulerFacts) -> list[Check]:
    """The inventory's partitions beside the scheduler's."""
    checks = []
    for name, partition in described.partitions.items():
        queue = facts.queues.get(name)
        label = f"partition {name}"
        if queue is None:
            known = ", ".join(facts.queues) or "none"
            checks.append(
                Check(
                    label,
                    False,
                    "the scheduler does not show it",
                    f"it shows: {known}; `fabrictool discover` prints them",
                )
            )
            continue
        wrong = []
        if not queue.up:
            wrong.append("it is not up")
        if partition.device != "cpu" and partition.devices_per_node > queue.devices:
            wrong.append(f"{partition.devices_per_node} devices per node in the inventory, {queue.devices} there")
        if (
            partition.walltime is not None
            and queue.longest_s is not None
            and float(partition.walltime) > queue.longest_s
        ):
            wrong.append(f"walltime {partition.walltime} in the inventory, at most {Duration(queue.longest_s)} there")
        guess = device_named(queue.device) if queue.device and partition.device != "cpu" else None
        if guess is not None and guess.device and partition.device not in (guess.device, *guess.others):
            wrong.append(f"{partition.device} in the inventory, {queue.device} there")
        more = ""
        if partition.nodes > queue.nodes:
            more = f"; the inventory says {partition.nodes} nodes"
        text = f"{queue.idle} of {queue.nodes} nodes idle, {queue.away} away, {queue.pending} pending jobs{more}"
        checks.append(
            Check(
                label, not wrong, "; ".join(wrong) or text, "correct the inventory: `fabrictool discover`", bool(more)
            )
        )
    return checks
