"""Whom an agent serves: its own check, whatever a gateway decided before it sent a request here.

Who the gateway is stands in its certificate. For whom it asks is the gateway's word: the agent believes those gateways
that it accepts, as it has to for everything else that they send.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from fabrictool.mesh.framing import LEFT_HEADER

if TYPE_CHECKING:
    from fabrictool.domain.specs import AgentTrust
    from fabrictool.mesh.framing import StreamHead
    from fabrictool.mesh.transport.tunnel import TunnelStream

GROUP_GRACE_S = 60.0
"""A group that is no longer served is served for so long: gateways hear of a change after agents, and stop sending."""
GATEWAY_GRACE_S = 900.0
"""The same for a provider whose gateway is to leave: its successor has to come up first, or the change is given up."""
HAS_LEFT = (
    b"HTTP/1.1 503 Service Unavailable\r\n%s: yes\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % LEFT_HEADER
)
"""Of an agent that has answered all that it was asked, and ends."""
Reason = Literal["FT8107", "FT8111", "FT8112"]
_REFUSED = ("403 Forbidden", "permission_error", "refused_by_provider")
_NOTHING_THERE = ("404 Not Found", "not_found_error", "not_found")


@dataclass(frozen=True, slots=True)
class Denial:
    """Why a request is not served."""

    code: Reason
    text: str

    @property
    def answer(self) -> bytes:
        """As HTTP, so that a gateway of any release passes it on, and neither retries it nor counts it as a failure."""
        status, kind, code = _NOTHING_THERE if self.code == "FT8107" else _REFUSED
        error = {"message": self.text, "type": kind, "param": None, "code": code, "fabric_code": self.code}
        body = msgspec.json.encode({"error": error})
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return head.encode() + b"connection: close\r\n\r\n" + body


NOT_PASSED = Denial("FT8107", "agents pass nothing of this path to an engine")


class Guard:
    """One agent's; times are monotonic seconds."""

    def __init__(self, provider: str, rules: AgentTrust) -> None:
        self._provider = provider
        self._rules = rules
        self._former: list[tuple[float, AgentTrust]] = []
        """Until when they were in force, and what was."""

    def take_over(self, rules: AgentTrust, now: float) -> None:
        """Go by other rules; what they take away counts for a little while yet."""
        kept = [entry for entry in self._former if now < entry[0] + GATEWAY_GRACE_S]
        self._former, self._rules = [*kept, (now, self._rules)], rules

    def denial(self, head: StreamHead, gateway: str, now: float) -> Denial | None:
        """Why a request that `gateway`, a provider, sends is not served; None: it is."""
        if not any(not rules.gateways or gateway in rules.gateways for rules in self._in_force(GATEWAY_GRACE_S, now)):
            return Denial("FT8112", f"provider {self._provider} does not serve what gateways of {gateway} send")
        if any(_serves(rules, head.group) for rules in self._in_force(GROUP_GRACE_S, now)):
            return None
        whose = f"the group {head.group[:80]!r}" if head.group else "any group"
        return Denial("FT8111", f"provider {self._provider} does not serve requests of {whose}")

    def _in_force(self, grace: float, now: float) -> list[AgentTrust]:
        return [self._rules, *(rules for until, rules in self._former if now < until + grace)]


def _serves(rules: AgentTrust, group: str) -> bool:
    """A gateway that names no group is of an earlier release; what it may not do, it could do by naming another."""
    if rules.groups is None:
        return True
    return group in rules.groups if group else bool(rules.groups)


class Refuser(asyncio.Protocol):
    """The handler of a stream that is not served: says why, and listens to nothing."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream: TunnelStream = transport  # type: ignore[assignment]  # asyncio types this as BaseTransport
        stream.write(self._answer)
        stream.write_eof()
