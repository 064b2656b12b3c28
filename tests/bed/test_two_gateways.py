"""Two gateways at two sites of two providers, replicas on both Slurm clusters: neither gateway is needed, each can be
replaced under load, and a job script contributes a replica while the operator is away."""

import json
import os
import shutil
import sys
import textwrap
import time

import pytest
from cryptography import x509

from fabrictool.mesh.identity import certify, chain_pem, describe_chain
from fabrictool.state.truststore import TrustStore
from tests.bed.load import Load
from tests.testbed.files import accounts_folder

pytestmark = pytest.mark.timeout(900)

PLACES = {"east": ("ing", 8061, 8461), "west": ("host", 8062, 8462)}
"""Gateway → machine, port for clients, port for agents."""


def write(fed, *, moved=0):
    """`moved` is added to the ports of clients."""
    cpu = {"device": "cpu", "nodes": 1, "memory_per_node": "4 GiB"}
    clusters = {
        "a": fed.cluster("a", {"normal": cpu | {"walltime": "60m"}}),
        "b": fed.cluster("b", {"normal": cpu | {"walltime": "60m"}}),
        "ing": fed.cluster("ing", {"cpu": cpu}, kind="ssh"),
        "host": fed.cluster("host", {"cpu": cpu}, kind="ssh"),
    }
    pins = [{"cluster": name, "replicas": 1} for name in ("a", "b")]
    gateways = {}
    for name, (machine, port, mesh) in PLACES.items():
        address = fed.bed.address(machine)
        gateways[name] = {"cluster": machine, "listen": f"{address}:{port + moved}", "mesh": f"{address}:{mesh}"}
    model = {"replicas": {"min": 2, "max": 2}, "place": {"pin": pins}}
    fed.write(clusters, {"tiny": model}, gateway=None, gateways=gateways)
    return [(fed.bed.address(machine), port + moved) for machine, port, _ in PLACES.values()]


@pytest.fixture(scope="module")
def pair(make_federation):
    fed = make_federation("pair")
    fed.places = write(fed)
    fed.up()
    return fed


def ask(fed, place, model="tiny", **headers):
    fed.gateway, fed.client_port = place
    return fed.ask(model, machine="op", **headers)


def answers_from_both(fed, place):
    return all(ask(fed, place, **{"x-fabric-providers": f"p-{site}"})[0] == "200" for site in "ab")


def lost(load):
    """Requests that no gateway answered, though none of their bytes had come."""
    return [outcome for outcome in load.bad() if not outcome.begun]


def replicas(fed):
    return {name: unit["operation"] for name, unit in fed.units().items() if name.startswith("replica/")}


def test_either_gateway_may_die_under_load(pair):
    before = replicas(pair)
    for machine, survivor in (("ing", pair.places[1]), ("host", pair.places[0])):
        with Load(pair.bed, *pair.places, model="tiny", streams=3, plain=2) as load:
            pair.wait("there is no load", lambda at=load: len(at.outcomes) > 20)
            pair.bed.machine(machine).run(["pkill", "-KILL", "-f", "fabrictool[.]gateway"])
            pair.wait("the other one does not answer", lambda at=survivor: answers_from_both(pair, at))
            count = len(load.outcomes)
            pair.wait("there is no load", lambda at=load, n=count: len(at.outcomes) > n + 20)
            pair.run("reconcile")
        assert lost(load) == []
        assert len(load.bad()) <= 5, "only what was open on the one that died"
        for place in pair.places:
            pair.wait("not both replicas answer", lambda at=place: answers_from_both(pair, at))
    assert replicas(pair) == before


def test_both_are_replaced_under_load_and_nothing_fails(pair):
    before = replicas(pair)
    old = pair.places
    pair.places = write(pair, moved=10)
    with Load(pair.bed, *old, *pair.places, model="tiny", streams=3, plain=2) as load:
        pair.wait("there is no load", lambda: len(load.outcomes) > 20)
        pair.run("apply", "--yes")
        count = len(load.outcomes)
        pair.wait("there is no load", lambda: len(load.outcomes) > count + 20)
    assert load.bad() == []
    assert replicas(pair) == before
    for place in pair.places:
        assert answers_from_both(pair, place)
    assert {action["kind"] for action in pair.plan()["actions"]} == {"keep"}


def nearly_over(fed, machine, user, unit):
    """As if it had been started a day ago: its certificate ends in five minutes."""
    home = accounts_folder(fed.bed.root, fed.bed.machine(machine).spec) / f"home/{user}"
    folder = home / ".fabrictool/units/pair" / unit["operation"]
    path = folder / "identity/session.crt"
    key = x509.load_pem_x509_certificates(path.read_bytes())[0].public_key()
    claims, now = describe_chain(path.read_bytes()).claims, time.time()
    signer = TrustStore(fed.folder / "state/pair/trust").signer(claims.provider)
    chain = chain_pem(certify(signer, key, claims.role, now=now, seconds=300.0, began_at=now - 86400.0))
    path.write_bytes(chain)
    ends = {"certificate_begins_at": now - 86400.0, "certificate_ends_at": describe_chain(chain).end}
    meta = json.loads((folder / "meta.json").read_bytes()) | ends
    (folder / "meta.json").write_text(json.dumps(meta) + "\n")
    os.utime(folder / "spec.json")
    return path


def test_certificates_of_a_gateway_and_of_a_job_are_renewed_under_load(pair):
    before = {name: unit["operation"] for name, unit in pair.units().items()}
    places = {"replica/tiny/0": ("a-login", "alice"), "gateway/east": ("ing", "web")}
    old = {name: nearly_over(pair, *where, pair.units()[name]) for name, where in places.items()}
    pair.wait("they do not end", lambda: sum("certificate" in text for text in pair.status()["drift"]) == 2)
    with Load(pair.bed, *pair.places, model="tiny", streams=3, plain=2) as load:
        pair.wait("there is no load", lambda: len(load.outcomes) > 20)
        assert pair.run("reconcile").stdout.count("gets another one for its key\n  ") >= 2
        count = len(load.outcomes)
        pair.wait("there is no load", lambda: len(load.outcomes) > count + 20)
    assert load.bad() == []
    assert {name: unit["operation"] for name, unit in pair.units().items()} == before
    assert all(describe_chain(path.read_bytes()).end > time.time() + 20 * 3600 for path in old.values())
    assert {action["kind"] for action in pair.plan()["actions"]} == {"keep"}


JOB = """
#!/bin/sh
#SBATCH --job-name=mine --time=30 --ntasks=1 --signal=B:TERM@60
exec {python} -m fabrictool.cli.main agent join {home}/token --site a --cluster a --device cpu -- \\
  {python} -m fabrictool.engines.reference --model {model} --served-name borrowed --context 128 \\
  --host 127.0.0.1 --port {{port}}
"""


def test_an_ordinary_job_joins_by_a_token_while_the_operator_is_away(bed, pair):
    """Provider p-a has its own pair and its issuer on its login node; its user submits a job script by hand."""
    login, home = bed.machine("a-login"), "/home/alice"
    theirs = accounts_folder(bed.root, login.spec) / "home/alice/joining"
    trust = pair.folder / "state/pair/trust"
    (theirs / "trust/providers").mkdir(parents=True)
    for name in ("root.crt", "providers/p-a.crt", "providers/p-a.key"):
        shutil.copy(trust / name, theirs / "trust" / name)
    issuer = f"{bed.inner_address('a-login')}:8444"
    gateways = [
        word for machine, _, mesh in PLACES.values() for word in ("--gateway", f"{bed.address(machine)}:{mesh}")
    ]
    pair.run(
        "trust", "token", "p-a", "--issuer", issuer, *gateways, "--models", "borrowed", "-o", str(theirs / "token")
    )
    (theirs / "job.sh").write_text(
        textwrap.dedent(JOB).lstrip().format(python=sys.executable, home=f"{home}/joining", model=pair.model)
    )
    login.run(["chown", "-R", "alice:alice", f"{home}/joining"])
    command = [sys.executable, "-m", "fabrictool.cli.main"]
    listening = login.popen(
        [*command, "trust", "issuer", "--provider", "p-a", "--listen", issuer, "--trust", f"{home}/joining/trust"],
        user="alice", stdout=-3, stderr=-3,
    )  # fmt: skip
    bed.cut_link("op")
    number = ""
    try:
        submitted = login.run(["sbatch", "--parsable", "job.sh"], user="alice", cwd=f"{home}/joining")
        number = submitted.stdout.strip()

        def served():
            pair.gateway, pair.client_port = pair.places[0]
            return pair.ask("borrowed", machine="host")[0] == "200"

        pair.wait("the job does not serve", served)
        pair.gateway, pair.client_port = pair.places[1]
        assert pair.ask("borrowed", machine="ing")[0] == "200", "the other gateway knows of it"
    finally:
        bed.mend_link("op")
        listening.terminate()
        listening.wait(30)
    assert {action["kind"] for action in pair.plan()["actions"]} == {"keep"}, "it is the job's, not the plan's"
    bed.slurm("a", "scancel", "--signal=TERM", "--batch", number)
    pair.wait("the job does not end", lambda: bed.job_state("a", number) == "COMPLETED")
    assert ask(pair, pair.places[0], model="borrowed")[0] in ("404", "503")
