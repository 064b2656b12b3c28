"""A loss that a plan promises to survive, played: a node's power is cut under the declared load.

With `survive: node` what is left keeps the SLO as the plan said; without it the plan has one replica less, and the same
cut leaves the demand unserved.
"""

import random
import time

import pytest

from tests.bed.openloop import OpenLoop

pytestmark = pytest.mark.timeout(300)

RATE = 3.0
INPUT, OUTPUT = 16, 16
TTFT_S, E2E_S = 2.0, 4.0
"""Of the SLO. Many times what an answer takes here: what it tells is whether somebody answers, not how fast."""
BEFORE_S, AFTER_S = 4.0, 12.0
NOTICED_WITHIN_S = 6.0
"""Gateways pass over an agent after three missed heartbeats, one a second; the rest is for a busy machine. Until then
requests are tried on it first, and then elsewhere."""
REPLICAS = ("replica/tiny/0", "replica/tiny/1")


def write(fed, *, survive, whole_nodes=True):
    small = {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}
    normal = small | {"nodes": 2, "walltime": "60m", "whole_nodes": whole_nodes}
    clusters = {
        "a": fed.cluster("a", {"normal": normal}),
        "ing": fed.cluster("ing", {"cpu": small}, kind="ssh"),
    }
    model = {
        "replicas": {"min": 1, "max": 2},
        "demand": {"rate": f"{RATE} req/s", "input": f"{INPUT} tok", "output": f"{OUTPUT} tok"},
        "slo": {"ttft_p95": f"{TTFT_S} s", "e2e_p95": f"{E2E_S} s", "attain": "95%"},
        "trust": ["p-a"],
    } | ({"survive": "node"} if survive else {})
    fed.write(clusters, {"tiny": model}, client_port=8101, mesh_port=8501)


@pytest.fixture
def losing(bed, make_federation):
    """Both fabrics of this module use the same nodes and ports, one after the other."""
    federations = []

    def make(name):
        federations.append(make_federation(name))
        return federations[-1]

    yield make
    for fed in federations:
        fed.clean_up()
    for node in ("a-n1", "a-n2"):
        if not bed.machine(node).alive:
            bed.boot(node)


def forecast(plan):
    (model,) = plan["forecast"]["models"]
    return model


def nodes_of(fed):
    """Replica → the node where Slurm has put it, of those that run."""
    lines = fed.bed.slurm("a", "squeue", "-h", "-t", "R", "-o", "%N %k").stdout.splitlines()
    return {line.split("rep=")[1].split(";")[0]: line.split()[0] for line in lines if f";dep={fed.name};" in line}


def played(fed, node):
    """Answers before and after the cut of that node's power, under the declared demand."""
    seed = random.SystemRandom().randrange(10**9)
    print("seed of the arrivals:", seed)
    load = OpenLoop(
        fed.bed, fed.gateway, fed.client_port, model="tiny", rate=RATE, prompt="x" * INPUT, tokens=OUTPUT, seed=seed
    )
    with load:
        time.sleep(BEFORE_S)
        cut = time.monotonic()
        fed.bed.power_cut(node)
        time.sleep(NOTICED_WITHIN_S + AFTER_S)
    answers = sorted(load.answers, key=lambda answer: answer.due)
    for answer in answers:
        print(f"{answer.due - cut:6.2f} s", answer.ttft_s, answer.e2e_s, answer.replica, answer.trouble)
    before = [answer for answer in answers if answer.due < cut]
    assert len(before) > 2
    assert attainment(before) == 1.0, "before anything is lost"
    return before, [answer for answer in answers if answer.due >= cut], cut


def attainment(answers):
    return sum(answer.attains(TTFT_S, E2E_S) for answer in answers) / len(answers)


@pytest.mark.extended
def test_a_reserve_that_was_planned_serves_on_when_a_node_goes(bed, losing):
    fed = losing("reserve")
    write(fed, survive=True)
    fed.run("trust", "init")
    model = forecast(fed.plan())
    assert (model["replicas"], model["slo"], model["survival"]["served"]) == (2, "meets", 1.0)
    fed.run("apply", "--yes")
    nodes = nodes_of(fed)
    assert nodes.keys() == set(REPLICAS)
    assert len(set(nodes.values())) == 2, "as the plan assumes"
    node = nodes[REPLICAS[0]]

    before, after, cut = played(fed, node)
    assert [answer.trouble for answer in after if answer.trouble] == [], "none is refused, none is lost"
    assert {answer.replica for answer in before} == {"tiny/0", "tiny/1"}, "both served before"
    noticed = [answer for answer in after if answer.due >= cut + NOTICED_WITHIN_S]
    assert {answer.replica for answer in noticed} == {"tiny/1"}
    print(f"SLO attained: {attainment(after):.1%} from the cut on, {attainment(noticed):.1%} once it was noticed")
    assert attainment(noticed) >= 0.95
    assert len(noticed) > RATE * AFTER_S / 2, "of the declared demand"

    bed.boot(node)
    fed.wait("the node is not back", lambda: "*" not in bed.node_states("a")[node], within_s=60)
    fed.run("reconcile", code=None)
    fed.wait("the reserve is not back", lambda: len(set(nodes_of(fed).values())) == 2, within_s=60)
    fed.wait("not all is well", lambda: fed.status()["good"])
    assert {action["kind"] for action in fed.plan()["actions"]} == {"keep"}


@pytest.mark.extended
def test_without_it_the_same_loss_leaves_the_demand_unserved(losing):
    fed = losing("bare")
    write(fed, survive=False)
    fed.run("trust", "init")
    model = forecast(fed.plan())
    assert (model["replicas"], model["slo"]) == (1, "meets")
    told = fed.run("plan", "--node-loss").stdout
    assert "group all gets no answer from tiny without one node" in " ".join(told.split())
    fed.run("apply", "--yes")
    _, after, cut = played(fed, nodes_of(fed)["replica/tiny/0"])
    assert attainment(after) == 0.0
    refused = [answer.trouble for answer in after if answer.due >= cut + NOTICED_WITHIN_S]
    assert refused
    assert all(trouble.startswith("503") for trouble in refused), refused


def test_replicas_that_slurm_may_put_on_one_node_are_not_planned_as_a_reserve(losing):
    """As it does put jobs that ask for no accelerators: with both replicas there, both would be lost."""
    fed = losing("shared")
    write(fed, survive=True, whole_nodes=False)
    fed.run("trust", "init")
    told = " ".join(fed.run("plan").stdout.split())
    assert "without a node of a/normal nothing is served" in told
    assert "`whole_nodes: true` of the partition gives each a node of its own" in told
