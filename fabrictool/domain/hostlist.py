"""Expressions for many hosts, as Slurm writes them: ``n[01-03,7],login2``; to names and back.

What a site prints is believed only as far as it can be nothing else than names of hosts: nothing but these reaches a
command line.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST = 200_000
"""Hosts of one expression; the largest systems have some ten thousand."""
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NUMBERED = re.compile(r"(.*?)(\d{1,9})")
_NONE = frozenset(["", "N/A", "NONE", "(null)", "Unknown", "0"])


def hostlist(text: str) -> tuple[str, ...]:
    """``n[01-03,7],login2`` → n01, n02, n03, n7, login2; what is no name, and all beyond `MOST`, is left out."""
    hosts: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", text.strip()):
        if part not in _NONE:
            hosts += [host for host in _expanded(part, MOST - len(hosts)) if _HOST.fullmatch(host)]
    return tuple(hosts)


def _expanded(part: str, room: int) -> list[str]:
    """Of one part without a comma outside of brackets, which may be several."""
    opened = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part)
    if opened is None:
        return [part][: max(0, room)]
    head, ranges, tail = opened.groups()
    heads: list[str] = []
    for span in ranges.split(","):
        first, _, last = span.partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            numbers = range(int(first), min(int(last or first), int(first) + room) + 1)
            heads += [f"{head}{number:0{len(first)}d}" for number in numbers]
    if "[" not in tail:
        return [f"{its}{tail}" for its in heads[: max(0, room)]]
    expanded: list[str] = []
    for its in heads[: max(0, room)]:
        expanded += [f"{its}{rest}" for rest in _expanded(tail, room - len(expanded))]
    return expanded


def hostlist_of(names: Iterable[str]) -> str:
    """The shortest usual expression, in the names' order by their numbers; what ends in no number is written out."""
    numbered: dict[tuple[str, int], list[int]] = defaultdict(list)
    plain = []
    for name in sorted(set(names)):
        ends = _NUMBERED.fullmatch(name)
        if ends is None:
            plain.append(name)
        else:
            numbered[ends[1], len(ends[2])].append(int(ends[2]))
    for (head, width), numbers in sorted(numbered.items()):
        spans = [f"{a:0{width}d}" if a == b else f"{a:0{width}d}-{b:0{width}d}" for a, b in _spans(sorted(numbers))]
        alone = len(numbers) == 1
        plain.append(f"{head}{spans[0]}" if alone else f"{head}[{','.join(spans)}]")
    return ",".join(plain)


def _spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of ascending numbers, first and last."""
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return spans
