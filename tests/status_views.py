"""Fleet documents for tests that show them."""

from fabrictool.status.fleet import Accusation, FleetLink, FleetMember, FleetService, FleetStatus

NOW = 1_800_000_000.0
HUB, WEST, AGENT, OTHER = "aa" * 16, "bb" * 16, "cc" * 16, "dd" * 16


def member(session, role="agent", **changes):
    fields = {
        "session": session, "role": role, "provider": "alpha", "site": "s", "cluster": "one", "node": "n1",
        "lifecycle": "SERVING", "version": 2, "state": "serving", "linked": role == "gateway",
    }  # fmt: skip
    return FleetMember(**(fields | changes))


def engine(replica, **changes):
    fields = {"service": "ee" * 16, "replica": replica, "model": replica.partition("/")[0], "engine": "vllm",
              "precision": "bf16", "lifecycle": "SERVING", "accepting": True}  # fmt: skip
    return FleetService(**(fields | changes))


def accusation(**changes):
    fields = {"hub": HUB, "provider": "alpha", "evidence": ["closed", "other-hub"], "seen": 2, "stands": True}
    return Accusation(**(fields | changes))


def fleet(**changes):
    """What an agent sees: itself, two hubs, and another agent that is suspected."""
    fields = {
        "release": "0.1.0", "at": NOW, "fabric": "swiss-ai", "federation": "f" * 32, "session": AGENT, "role": "agent",
        "root": "0badc0de" * 2, "records": 6, "refused_records": 0, "vain_repairs": 0,
        "members": [
            member(HUB, "gateway"),
            member(WEST, "gateway", provider="beta", cluster="two", node="two"),
            member(AGENT, linked=True, device="gh200", devices=4, memory=384 * 2**30, ends_at=NOW + 7260,
                   services=[engine("llama/0")]),
            member(OTHER, provider="beta", cluster="two", state="suspected", services=[engine("llama/1")],
                   accusations=[accusation()]),
        ],
        "links": [
            FleetLink(peer=HUB, address="h:1", up=True, path="proxy", failures={"direct": "no answer within 5 s"},
                      sent_octets=2048, silent_s=0.4),
            FleetLink(peer="", address="h:2", up=False, error="connection refused"),
        ],
    }  # fmt: skip
    return FleetStatus(**(fields | changes))
