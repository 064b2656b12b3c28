"""Nobody outside the allowlists ever sees a request: federations, keys, headers, faults and retries are drawn.

The gateway's own code decides, from the parsed head to the octets' way out; drawn are what stands around it. Each agent
asks its own rules again, by what the gateway says of the request (`agent.guarding`).
"""

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabrictool.agent.guarding import GROUP_GRACE_S, Guard
from fabrictool.domain.blueprint import ROUTING_POLICIES
from fabrictool.domain.specs import AgentTrust
from fabrictool.gateway.directory import RoutingTarget
from fabrictool.gateway.exchange import Exchange
from fabrictool.gateway.gateway import GatewayServer
from fabrictool.gateway.http import ClientRequest
from fabrictool.gateway.keyfile import KeyRow
from fabrictool.gateway.keys import Keyring, hash_key
from fabrictool.gateway.rules import RoutingRules
from fabrictool.mesh.framing import StreamHead
from fabrictool.routing.candidates import TrustPolicy
from fabrictool.routing.policies import routing_policy
from tests.manual_clock import ManualClock

PROVIDERS = ["alpha", "beta", "gamma", "delta"]
MODELS = ["m", "n"]
GROUPS = ["all", "few", "none"]
DEVICES = ["", "a100", "h100"]
KEYS = {"all": "a" * 20, "few": "b" * 20, "none": "c" * 20, "unknown": "d" * 20}
NAMES = st.frozensets(st.sampled_from(PROVIDERS))
SOME = st.frozensets(st.sampled_from(PROVIDERS), min_size=1)
FAULTS = st.sampled_from(["503", "refused", "broken", "head-then-broken", "ok", "4xx", "slow-503", "stream-cut"])


@dataclass
class Connector:
    """In place of a connection: notes that a request came, and answers as it was drawn when it is let."""

    seen: list
    faults: list
    ready: bool = True
    target: RoutingTarget | None = None
    pending: list = field(default_factory=list)

    def start(self, method, path, headers, body, caller, listener, *, anew=False):
        self.seen.append((self.target, caller))
        upstream = Upstream(listener)
        self.pending.append((upstream, self.faults.pop() if self.faults else "ok"))
        return upstream

    def close(self):
        self.pending.clear()


@dataclass
class Upstream:
    listener: object

    def abort(self):
        """Nobody hears of it any more."""
        self.listener = None

    def tell(self, what, *args, **more):
        if self.listener is not None:
            getattr(self.listener, what)(*args, **more)


@dataclass
class Client:
    """A connection, as an exchange sees it."""

    clock: ManualClock
    request_id: str = field(default_factory=lambda: f"r{next(NUMBERS)}")
    answers: list = field(default_factory=list)

    def now(self):
        return self.clock.monotonic()

    def answer(self, answer):
        self.answers.append(answer.status)

    def deliver(self, status, kind, lines, body):
        self.answers.append(status)

    def begin(self, status, kind, lines):
        self.answers.append(status)

    def chunk(self, data):
        """Of no interest."""

    def finish(self):
        """Of no interest."""

    def break_off(self):
        """Of no interest."""


NUMBERS = itertools.count()
JSON, EVENTS = [(b"content-type", b"application/json")], [(b"content-type", b"text/event-stream")]


def play(upstream, fault, clock):
    if fault == "slow-503":
        clock.advance(5.0)
    if fault == "refused":
        upstream.tell("failed", "refused", refused=True)
        return
    if fault != "broken":
        status = 503 if "503" in fault else 400 if fault == "4xx" else 200
        upstream.tell("head", status, EVENTS if fault == "stream-cut" else JSON)
        if fault == "stream-cut":
            upstream.tell("body", b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n')
    if fault in ("broken", "head-then-broken", "stream-cut"):
        upstream.tell("failed", "reset", refused=False)
    else:
        upstream.tell("body", b"{}")
        upstream.tell("complete", sized=True)


def asked(key, model, lists, devices):
    request = ClientRequest()
    request.method, request.target, request.path = "POST", "/v1/chat/completions", "/v1/chat/completions"
    request.parts = [b'{"model": "%b", "messages": [{"role": "user", "content": "x"}]}' % model.encode()]
    request.fields["authorization"] = f"Bearer {KEYS[key]}"
    for number, names in enumerate(lists):
        value = ", ".join(sorted(names))
        if number:
            request.repeated.append(("x-fabric-providers", value))
        else:
            request.fields["x-fabric-providers"] = value
    if devices:
        request.fields["x-fabric-devices"] = ",".join(sorted(devices))
    return request


REPLICAS = st.lists(
    st.tuples(
        st.sampled_from(PROVIDERS),
        st.sampled_from(MODELS),
        st.sampled_from(DEVICES),
        st.sampled_from([True, True, True, False]),
        st.lists(FAULTS, min_size=2, max_size=6),
        st.integers(0, 2),
        st.just({}) | st.dictionaries(st.sampled_from([*KEYS, ""]), st.sampled_from([0.0, 0.3, 1.0])),
    ),
    min_size=1,
    max_size=9,
)
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(list(KEYS)),
        st.sampled_from(MODELS),
        st.just([]) | st.lists(NAMES, max_size=2),
        st.just(frozenset()) | st.frozensets(st.sampled_from(DEVICES[1:])),
        st.booleans(),
    ),
    min_size=4,
    max_size=12,
)


@pytest.mark.interpreted
@settings(max_examples=200)
@given(
    replicas=REPLICAS,
    groups=st.fixed_dictionaries({"all": SOME, "few": SOME}, optional={"none": NAMES}),
    trusted=st.just({}) | st.fixed_dictionaries({}, optional=dict.fromkeys(MODELS, NAMES)),
    requests=REQUESTS,
    policy=st.sampled_from(ROUTING_POLICIES),
    affinity=st.booleans(),
    retries=st.integers(0, 2),
)
def test_whoever_is_asked_is_in_every_allowlist_under_failover_too(
    replicas, groups, trusted, requests, policy, affinity, retries
):
    clock, seen = ManualClock(), []
    targets = []
    for number, (provider, model, device, ready, faults, slots, weights) in enumerate(replicas):
        connector = Connector(seen, list(faults), ready)
        target = RoutingTarget(b"%d" % number, model, provider, connector, f"{number}", device=device, slots=slots)
        connector.target, target.group_weights = target, weights
        targets.append(target)
    rules = RoutingRules(
        routing_policy(policy, random.Random(1)), TrustPolicy(groups, trusted), retries, affinity=affinity
    )
    rows = [KeyRow(f"tenant of {name}", hash_key(key), name) for name, key in KEYS.items()]
    gateway = GatewayServer(clock, fabric="f", rules=rules, keyring=Keyring(rows), targets=targets)
    clients = []

    def answer_what_is_open():
        while any(target.connector.pending for target in targets):
            for target in targets:
                while target.connector.pending:
                    play(*target.connector.pending.pop(0), clock)

    for key, model, lists, devices, at_once in requests:
        request, client = asked(key, model, lists, devices), Client(clock)
        assert gateway.admit(request) is None
        exchange = gateway.handle(request, client)
        assert isinstance(exchange, Exchange)
        exchange.start()
        clients.append((client, exchange))
        if not at_once and targets:  # others come while it is open
            continue
        answer_what_is_open()
    answer_what_is_open()
    for client, exchange in clients:
        assert client.answers
        tried = exchange._tried
        assert len(set(map(id, tried))) == len(tried), "never twice to the same replica"
    check_who_was_asked(requests, clients, groups, trusted)
    assert sum(target.in_flight for target in targets) == gateway._metrics.in_flight == 0
    assert sum(gateway._admission.waiting().values()) == 0
    assert len(seen) == sum(len(exchange._tried) for _, exchange in clients)


def check_who_was_asked(requests, clients, groups, trusted):
    for (key, model, lists, devices, _), (client, exchange) in zip(requests, clients, strict=True):
        allowed = groups.get(key, frozenset()).intersection(*lists) & trusted.get(model, frozenset(PROVIDERS))
        for target in exchange._tried:
            assert target.provider in allowed
            assert target.model == model
            assert not devices or target.device in devices
        if not allowed:
            assert client.answers[0] in (403, 404)


@given(groups=st.fixed_dictionaries({}, optional=dict.fromkeys(GROUPS, NAMES)), group=st.sampled_from(list(KEYS)))
def test_an_agent_serves_just_the_groups_that_its_provider_is_in_whatever_a_gateway_says(groups, group):
    """`agent.groups` as plans tell it; a gateway that is wrong, or has other rules, is refused with a code."""
    head = StreamHead(b"s" * 16, "POST", "/v1/x", (), 0, group, "pseudonym")
    trust = TrustPolicy(groups, {})
    for provider in PROVIDERS:
        told = tuple(sorted(name for name, allow in groups.items() if provider in allow))
        denial = Guard(provider, AgentTrust(groups=told)).denial(head, "beta", 0.0)
        assert (denial is None) == trust.permits(provider, "m", group, None)
        assert denial is None or (denial.code == "FT8111" and b"403 Forbidden" in denial.answer)


@given(
    rules=st.lists(st.tuples(st.frozensets(st.sampled_from(GROUPS)), st.floats(1, 200)), min_size=1, max_size=6),
    group=st.sampled_from(GROUPS),
    wait=st.floats(0, 200),
)
def test_an_agent_that_is_told_anew_serves_who_was_allowed_within_the_grace_and_nobody_else(rules, group, wait):
    now, history = 0.0, []
    guard = Guard("alpha", AgentTrust(groups=tuple(rules[0][0])))
    for (allowed, lasts), following in zip(rules, [*rules[1:], None], strict=True):
        now += lasts
        if following is not None:
            guard.take_over(AgentTrust(groups=tuple(following[0])), now)
            history.append((now, allowed))
    now += wait
    in_force = [rules[-1][0], *(allowed for until, allowed in history if now < until + GROUP_GRACE_S)]
    head = StreamHead(b"s" * 16, "POST", "/v1/x", (), 0, group, "")
    assert (guard.denial(head, "beta", now) is None) == any(group in allowed for allowed in in_force)
