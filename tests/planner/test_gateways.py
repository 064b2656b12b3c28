"""Many gateways: what they are told of each other, and that their coming and going restarts nobody else."""

import msgspec
import pytest

from fabrictool.blueprint import load
from fabrictool.domain.address import Address
from fabrictool.domain.evidence import Evidence
from fabrictool.domain.observed import ClusterFacts, ObservedUnit
from fabrictool.domain.plan import Placement, ReplicaPlacement, spec_digest
from fabrictool.domain.specs import AgentTrust, HostPort, LoginSpec, PatienceRule, RecordsSpec, TelemetrySpec
from fabrictool.domain.state import Applied, State, operation_id
from fabrictool.domain.terms import BudgetTerms, KeyLimits, Terms
from fabrictool.planner.diff import actions
from fabrictool.planner.gateways import stranded
from fabrictool.planner.succession import Succession, successors
from fabrictool.planner.units import MEASURE_S, wanted_units
from tests.planner.fabrics import INVENTORY, write_fabric

REPLICA = ReplicaPlacement(
    replica="m/0", model="m", provider="alpha", site="a", cluster="dear", partition="gpu", device="h100-sxm", tp=1
)
ONE = "  one: {cluster: dear, listen: 10.0.0.1:1, mesh: 10.0.0.1:2}"
TWO = "  two: {cluster: cheap, listen: 10.0.0.2:1, mesh: 10.0.0.2:2}"
SIX = "  six: {cluster: spot, listen: 10.0.0.6:1, mesh: 0.0.0.0:3, advertise: 10.0.0.6:2}"
HUB_OF_ONE, HUB_OF_TWO, HUB_OF_SIX = (HostPort(f"10.0.0.{n}", 2) for n in (1, 2, 6))


class World:
    """Carries out what is planned, by heart: plan after plan, as if each was applied at once."""

    def __init__(self, folder):
        self.folder = folder
        self.specs = {}
        self.counts = {}
        self.unseen = set()
        self.placement = Placement(replicas=(REPLICA,))
        self.in_force = ""
        self.renewable = self.ready = True
        self.hands_over = False
        self.rules = self.more = ""
        self.inventory = INVENTORY

    @property
    def evidence(self):
        clusters = {}
        for name in ("dear", "cheap", "spot"):
            here = {op: spec for op, spec in self.specs.items() if spec.cluster == name}
            units = tuple(
                ObservedUnit(
                    address=str(Address.of(s)),
                    operation=op,
                    state="running",
                    spec_digest=spec_digest(s),
                    in_force=self.in_force,
                    renewable=bool(self.in_force) and self.renewable,
                    hands_over=self.hands_over,
                    ready=self.ready,
                )
                for op, s in here.items()
            )
            known = name not in self.unseen
            clusters[name] = ClusterFacts(cluster=name, known=known, units=units if known else ())
        applied = {str(Address.of(s)): Applied(cluster=s.cluster, spec=s) for s in self.specs.values()}
        state = State(generations=self.counts, applied_units=applied)
        return Evidence(fabric="f", lineage="l", at=0.0, clusters=clusters, specs=dict(self.specs), state=state)

    def plan(self, *gateways, expiring=()):
        path = write_fabric(self.folder, self.rules, inventory=self.inventory)
        text = path.read_text() + self.more + ("gateways:\n" + "\n".join(gateways) + "\n" if gateways else "")
        path.write_text(text)
        loaded = load(path, environment={})
        again = stranded(loaded.blueprint.every_gateway, self.evidence) | dict(expiring)
        wanted = wanted_units(loaded.blueprint, loaded.inventory, self.placement, self.evidence, successors(again))
        return actions(wanted, self.evidence, again)

    def apply(self, *gateways):
        """Returns what was done, without what was kept."""
        planned = self.plan(*gateways)
        for action in planned:
            if action.kind == "update":
                self.specs[action.operation] = action.spec
            if action.kind in ("replace", "delete"):
                del self.specs[action.former]
            if action.kind in ("create", "replace"):
                self.counts[action.address] = self.counts.get(action.address, 0) + 1
                self.specs[operation_id("l", action.address, self.counts[action.address])] = action.spec
        return [(action.kind, action.address) for action in planned if action.kind != "keep"]

    def spec(self, address):
        return next(spec for spec in self.specs.values() if str(Address.of(spec)) == address)

    def links(self):
        """Pairs of gateways between which there is a tunnel, one entry for each who dials."""
        gateways = [spec for spec in self.specs.values() if str(Address.of(spec)).startswith("gateway/")]
        at = {spec.hub: spec.name for spec in gateways}
        return sorted(tuple(sorted((spec.name, at[hub]))) for spec in gateways for hub in spec.dials if hub in at)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_every_gateway_is_a_unit_and_knows_the_others(world):
    done = world.apply(ONE, TWO, SIX)
    assert done[:3] == [("create", "gateway/one"), ("create", "gateway/six"), ("create", "gateway/two")]
    assert world.spec("gateway/six").hubs == (HUB_OF_ONE, HUB_OF_TWO)
    assert world.spec("gateway/six").mesh == HostPort("0.0.0.0", 3)  # noqa: S104
    assert world.spec("replica/m/0").hubs == (HUB_OF_ONE, HUB_OF_SIX, HUB_OF_TWO)
    assert world.links() == [("one", "six"), ("one", "two"), ("six", "two")]


TRUST = """\
trust: {groups: {all: {allow: [alpha, beta]}, theirs: {allow: [beta]}, ours: {allow: [alpha]}}}
tenants: {t: {group: all, key: secret://env/KEY}}
"""


def test_an_agent_is_told_whom_it_serves_and_a_change_restarts_nobody(world):
    world.in_force = "current"
    world.apply(ONE)
    assert world.spec("replica/m/0").trust == AgentTrust(groups=None, gateways=("alpha",)), "there are no tenants"
    assert world.apply(ONE, TWO) == [("update", "replica/m/0"), ("create", "gateway/two")]
    assert world.spec("replica/m/0").trust == AgentTrust(groups=None, gateways=("alpha", "beta"))
    world.more = TRUST
    assert world.apply(ONE, TWO)[0] == ("update", "replica/m/0")
    assert world.spec("replica/m/0").trust.groups == ("all", "ours")
    world.rules = "trust: [beta]"
    world.apply(ONE, TWO)
    assert world.spec("replica/m/0").trust.groups == (), "its model is trusted to others alone"
    assert world.apply(ONE, TWO) == []


def test_what_cannot_be_told_anew_is_told_nothing(tmp_path):
    loaded = load(write_fabric(tmp_path), environment={})
    clusters = {
        name: spec.model_copy(update={"kind": "kubernetes"}) for name, spec in loaded.inventory.clusters.items()
    }
    inventory = loaded.inventory.model_copy(update={"clusters": clusters})
    evidence = World(tmp_path).evidence
    wanted = wanted_units(loaded.blueprint, inventory, Placement(replicas=(REPLICA,)), evidence, ())
    assert wanted["replica/m/0"].spec.trust is msgspec.UNSET


def test_what_nobody_else_is_there_for_is_not_written(world):
    world.apply(ONE)
    written = msgspec.to_builtins(world.spec("gateway/one"))
    assert not {"hubs", "dialled_by", "advertise"} & set(written)


def test_what_a_tenant_may_is_taken_over_in_place_and_where_records_go_is_not(world):
    world.in_force, world.more = "current", TRUST
    world.apply(ONE)
    written = msgspec.to_builtins(world.spec("gateway/one"))
    assert not {"terms", "model_limits", "records"} & set(written)
    terms = 'models: [m], expires: "2026-12-01T00:00Z", limits: {concurrency: 3}, budget: {tokens: 9, per: day}}'
    world.more = TRUST.replace("KEY}", f"KEY, {terms}")
    world.rules = "limits: {tokens_per_minute: 7}"
    assert world.apply(ONE) == [("update", "gateway/one")]
    spec = world.spec("gateway/one")
    budget = BudgetTerms(9, "day")
    assert spec.terms == {"t": Terms(("m",), 1_796_083_200.0, KeyLimits(concurrency=3), budget)}
    assert spec.limits == {"m": KeyLimits(tokens_per_minute=7)}
    kept = ONE.replace("}", ", records: {database: secret://file/url, opt_out: true}}")
    assert world.apply(kept) == [("replace", "gateway/one")]
    assert world.spec("gateway/one").recording == RecordsSpec("secret://file/url", opt_out=True)


def test_where_traces_go_is_known_from_the_start(world):
    world.in_force, world.more = "current", TRUST
    world.apply(ONE)
    assert "telemetry" not in msgspec.to_builtins(world.spec("gateway/one"))
    wanted = "{endpoint: http://collector:4318, sample: 5%, headers: {authorization: secret://file/token}}"
    assert world.apply(ONE.replace("}", f", telemetry: {wanted}}}")) == [("replace", "gateway/one")]
    headers = {"authorization": "secret://file/token"}
    assert world.spec("gateway/one").telemetry == TelemetrySpec("http://collector:4318", 0.05, headers)


def test_a_login_is_known_from_the_start_without_its_secret(world):
    world.in_force, world.more = "current", TRUST
    login = (
        "{issuer: https://sso.example.org/realms/hpc/, client: fabric, url: https://llm.example.org/, claim: roles,"
        " secret: secret://file/client, groups: {b: all, a: all}, keep: 1d, keys: 2,"
        " limits: {concurrency: 3}, budget: {tokens: 1000, per: day}}"
    )
    world.apply(ONE.replace("}", f", key_api: {{key: secret://env/ADMIN, group: all, login: {login}}}}}"))
    assert world.spec("gateway/one").login == LoginSpec(
        "https://sso.example.org/realms/hpc", "fabric", "https://llm.example.org", (("b", "all"), ("a", "all")),
        claim="roles", secret="secret://file/client", keep_s=86400.0, keys=2,
        terms=Terms(limits=KeyLimits(concurrency=3), budget=BudgetTerms(1000, "day")),
    )  # fmt: skip


def test_workers_are_gateways_that_share_what_clients_see(world):
    world.in_force, world.more = "current", TRUST
    world.apply(ONE)
    wanted = ONE.replace("}", ", workers: 3}")
    changes = world.apply(wanted)
    assert changes[:2] == [("delete", "gateway/one"), ("create", "gateway/one")], "it had the address for itself"
    assert changes[2:] == [("create", "gateway/one-2"), ("create", "gateway/one-3")]
    specs = [world.spec(f"gateway/{name}") for name in ("one", "one-2", "one-3")]
    assert [spec.listen for spec in specs] == [HostPort("10.0.0.1", 1)] * 3
    assert [spec.mesh.port for spec in specs] == [spec.hub.port for spec in specs] == [2, 3, 4]
    assert {(spec.shares, spec.household) for spec in specs} == {("one", "one")}
    assert {hub.port for hub in specs[0].hubs} == {3, 4}, "they know each other"
    again = wanted.replace("}", ", records: {opt_out: true}}")
    assert {kind for kind, _ in world.apply(again)} == {"replace"}, "workers are replaced side by side"
    changes = dict(reversed(change) for change in world.apply(ONE))
    assert changes == {"gateway/one": "replace", "gateway/one-2": "delete", "gateway/one-3": "delete"}
    assert world.spec("gateway/one").household == "one"


def test_names_of_a_model_and_for_whom_it_is_there_are_taken_over_in_place(world):
    world.in_force, world.more = "current", TRUST
    world.apply(ONE)
    assert not {"aliases", "model_groups"} & set(msgspec.to_builtins(world.spec("gateway/one")))
    world.rules = "aliases: [org/M]\ngroups: [ours]"
    assert sorted(world.apply(ONE)) == [("update", "gateway/one"), ("update", "replica/m/0")]
    assert world.spec("gateway/one").model_aliases == {"org/M": "m"}
    assert world.spec("gateway/one").visible == {"m": ("ours",)}
    assert world.spec("replica/m/0").trust.groups == ("ours",), "the agent sees to it, too"


def test_how_long_replicas_may_be_silent_is_taken_over_in_place(world):
    world.in_force = "current"
    world.apply(ONE)
    assert "patience" not in msgspec.to_builtins(world.spec("gateway/one"))
    world.rules = "patience: {first_byte: 45s, idle: 1m}\nadapters: {law: {source: file:///a}}"
    assert ("update", "gateway/one") in world.apply(ONE)
    rule = PatienceRule(45.0, None, 60.0, None)
    assert world.spec("gateway/one").declared_patience == {"m": rule, "law": rule}
    world.rules = "reasoning: true"
    world.apply(ONE)
    assert world.spec("gateway/one").declared_patience == {"m": PatienceRule(reasoning=True)}


def test_a_key_api_is_told_to_gateways_and_closes_agents_without_a_tenant(world):
    world.in_force, world.more = "current", TRUST.partition("tenants")[0]
    world.apply(ONE)
    assert world.spec("replica/m/0").trust.groups is None
    assert "key_api" not in msgspec.to_builtins(world.spec("gateway/one"))
    with_api = ONE.replace("}", ", key_api: {key: secret://env/ADMIN, group: all}}")
    assert sorted(world.apply(with_api)) == [("replace", "gateway/one"), ("update", "replica/m/0")]
    assert world.spec("gateway/one").key_api == "all"
    assert world.spec("replica/m/0").trust.groups == ("all", "ours")


@pytest.mark.parametrize(
    ("before", "after", "done"),
    [
        ((ONE,), (ONE, TWO), [("create", "gateway/two")]),
        ((TWO,), (ONE, TWO), [("create", "gateway/one")]),
        ((ONE, TWO), (ONE, TWO, SIX), [("create", "gateway/six")]),
        ((ONE, TWO), (ONE,), [("delete", "gateway/two")]),
        ((ONE, TWO), (ONE, TWO.replace("10.0.0.2:2", "10.0.0.2:3")), [("replace", "gateway/two")]),
        ((ONE, TWO), (ONE.replace("10.0.0.1:1", "10.0.0.1:9"), TWO), [("replace", "gateway/one")]),
        ((ONE,), (ONE.replace("10.0.0.1", "10.0.0.7"),), [("replace", "gateway/one")]),
        ((ONE,), (TWO,), [("create", "gateway/two"), ("delete", "gateway/one")]),
    ],
)
def test_a_gateway_comes_moves_and_goes_and_nothing_else_is_touched(world, before, after, done):
    world.apply(*before)
    assert world.apply(*after) == done
    every_pair = len(after) * (len(after) - 1) // 2
    assert len(world.links()) == len(set(world.links())) == every_pair


def test_pairs_stay_linked_once_whatever_moves_after_whatever(world):
    moved_one, moved_two = ONE.replace("10.0.0.1:2", "10.0.0.1:3"), TWO.replace("10.0.0.2:2", "10.0.0.2:3")
    for gateways in ((ONE,), (ONE, TWO), (moved_one, TWO), (moved_one, moved_two), (ONE, TWO), (ONE, moved_two)):
        world.apply(*gateways)
        assert world.links() == ([("one", "two")] if len(gateways) == 2 else [])


def test_a_gateway_on_a_cluster_that_does_not_answer_is_known_from_the_state(world):
    world.apply(ONE)
    world.unseen = {"dear"}
    planned = {action.address: action for action in world.plan(ONE, TWO)}
    assert planned["gateway/one"].kind == "unknown"
    assert planned["gateway/two"].spec.dials == (HUB_OF_ONE,)


def test_a_gateway_that_moves_runs_beside_its_successor(world):
    world.apply(ONE)
    moved = world.plan(ONE.replace("10.0.0.1:1", "10.0.0.1:8").replace("10.0.0.1:2", "10.0.0.1:9"))
    (replaced,) = [action for action in moved if action.kind == "replace"]
    assert not replaced.stop_first
    assert HUB_OF_ONE in replaced.spec.dials, "agents hear of it from the one that they have"
    (same_port,) = [a for a in world.plan(ONE.replace("10.0.0.1:1", "10.0.0.1:8")) if a.kind == "replace"]
    assert same_port.stop_first


@pytest.mark.parametrize(
    ("hands_over", "ready", "change", "stop_first"),
    [
        (True, True, ("mesh: 10.0.0.1:2", "mesh: 10.0.0.1:2, trace: 1MiB"), False),
        (True, True, ("10.0.0.1:1", "10.0.0.1:8"), False),
        (True, True, ("mesh: 10.0.0.1:2", "mesh: 10.0.0.1:9"), True),  # its port for clients is the same
        (True, False, ("mesh: 10.0.0.1:2", "mesh: 10.0.0.1:2, trace: 1MiB"), True),  # it may hang, and give nothing
        (False, True, ("mesh: 10.0.0.1:2", "mesh: 10.0.0.1:2, trace: 1MiB"), True),
    ],
)
def test_a_gateway_that_hands_over_goes_on_until_its_successor_serves(world, hands_over, ready, change, stop_first):
    world.apply(ONE)
    world.hands_over, world.ready = hands_over, ready
    planned = world.plan(ONE.replace(*change))
    (replaced,) = [action for action in planned if action.kind == "replace" and action.address == "gateway/one"]
    assert replaced.stop_first is stop_first


def test_a_gateway_gives_way_to_another_that_gets_its_ports(world):
    world.apply(ONE)
    assert world.apply(ONE.replace("one:", "uno:")) == [("delete", "gateway/one"), ("create", "gateway/uno")]
    world.apply(ONE, TWO)
    same_cluster = TWO.replace("cheap", "dear")
    world.apply(ONE, same_cluster)
    swapped = ONE.replace("10.0.0.1", "10.0.0.2"), same_cluster.replace("10.0.0.2", "10.0.0.1")
    kinds = world.apply(*swapped)
    assert [kind for kind, address in kinds if address.startswith("gateway")] == [
        "delete",
        "delete",
        "create",
        "create",
    ]
    assert ("replace", "replica/m/0") not in kinds, "it knows both addresses"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), (ONE,)),  # started when there was none to know
        ((ONE,), (ONE.replace("10.0.0.1:2", "10.0.0.1:9"),)),  # its port for clients is the same: it must stop first
    ],
)
@pytest.mark.parametrize(("in_force", "kind"), [("", "replace"), ("current", "update")])
def test_an_agent_that_no_gateway_would_reach_is_told_or_gets_a_successor(world, before, after, in_force, kind):
    world.in_force = in_force
    world.apply(*before)
    assert (kind, "replica/m/0") in world.apply(*after)
    port = 9 if ":9" in after[0] else 2
    assert world.spec("replica/m/0").hubs == (HostPort("10.0.0.1", port),)
    assert world.apply(*after) == []


def test_an_agent_of_an_earlier_release_cannot_be_told_of_other_gateways(world):
    world.in_force, world.renewable = "current", False
    world.apply(ONE)
    assert ("replace", "replica/m/0") in world.apply(ONE.replace("10.0.0.1:2", "10.0.0.1:9"))


def test_an_agent_that_no_gateway_would_reach_and_whose_certificate_ends_gets_a_successor(world):
    world.in_force = "current"
    world.apply(ONE)
    (agent,) = [op for op, spec in world.specs.items() if op.startswith("replica")]
    ends = {agent: Succession("certificate", "its certificate ends")}
    assert ("replace", "replica/m/0") in [
        (action.kind, action.address) for action in world.plan(ONE.replace("10.0.0.1:2", "10.0.0.1:9"), expiring=ends)
    ]


def test_gateways_are_told_of_planned_replicas_while_they_serve(world):
    world.in_force = "current"
    world.apply(ONE, TWO)
    assert world.spec("gateway/one").planned == {"m": (0,)}
    world.placement = Placement(replicas=(REPLICA, msgspec.structs.replace(REPLICA, replica="m/2")))
    assert world.apply(ONE, TWO) == [("create", "replica/m/2"), ("update", "gateway/one"), ("update", "gateway/two")]
    assert world.spec("gateway/one").planned == {"m": (0, 2)}


def test_gateways_are_told_what_requests_may_ask_for_at_a_site_while_they_serve(world):
    world.in_force = "current"
    world.apply(ONE)
    before = world.spec("gateway/one").node_labels
    assert set(before.values()) == {("owned",), ("scavenger",)}
    world.inventory = INVENTORY.replace("{provider: alpha}", "{provider: alpha, labels: [eu]}")
    assert world.apply(ONE) == [("update", "gateway/one")]
    after = world.spec("gateway/one").node_labels
    assert {place: labels for place, labels in after.items() if labels != before[place]} == {
        "alpha/dear/gpu": ("owned", "eu")
    }


def test_who_is_told_something_while_it_serves_dials_nobody_new(world):
    """It does not read its hubs again: the new gateway has to dial."""
    world.in_force = "current"
    world.apply(ONE)
    world.placement = Placement(replicas=(REPLICA, msgspec.structs.replace(REPLICA, replica="m/1")))
    world.apply(ONE, TWO)
    assert world.spec("gateway/two").dials == (HUB_OF_ONE,)


def test_a_gateway_of_an_earlier_release_is_not_replaced_to_be_told_of_replicas(world):
    world.apply(ONE)
    former, spec = next((op, s) for op, s in world.specs.items() if s.cluster == "dear" and op.startswith("gateway"))
    world.specs[former] = msgspec.structs.replace(spec, replicas=msgspec.UNSET)
    assert world.apply(ONE) == []


def test_a_changed_hub_is_no_change_of_what_is_wanted(world):
    world.apply(ONE, TWO)
    for spec in world.specs.values():
        elsewhere = msgspec.structs.replace(spec, hubs=(HostPort("h", 7),))
        assert spec_digest(elsewhere) == spec_digest(spec)


def test_a_gateway_is_told_of_slos_where_its_policy_looks_at_them_and_none_starts_anew(world):
    world.in_force = "abc"
    world.apply(ONE)
    assert world.spec("gateway/one").slos is msgspec.UNSET
    plain = world.spec("replica/m/0")
    assert (plain.measure_s, plain.priorities) == (msgspec.UNSET, msgspec.UNSET)
    world.rules, world.more = "slo: {ttft_p50: 1s, ttft_p95: 3s}", "routing: {policy: slo-headroom}\n"
    actions = world.apply(ONE)
    assert {("update", "gateway/one"), ("update", "replica/m/0")} <= set(actions)
    timed = world.spec("replica/m/0")
    assert (timed.measure_s, timed.priorities) == (MEASURE_S, True)
    told = world.spec("gateway/one")
    assert (told.policy, told.slos) == ("slo-headroom", {"m": (3.0, None)})
    world.more = "routing: {policy: weighted}\n"
    assert ("update", "gateway/one") in world.apply(ONE)
    assert world.spec("gateway/one").slos is msgspec.UNSET
