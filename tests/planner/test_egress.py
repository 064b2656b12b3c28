"""What the inventory says of the ways out of a site reaches the units of that cluster, and no others."""

import msgspec

from fabrictool.blueprint import load
from fabrictool.domain.specs import AgentSpec, EgressSpec, ProxySpec, SshHostSpec
from fabrictool.planner.egress import egress_of
from tests.planner.fabrics import INVENTORY, write_fabric

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl"
EGRESS = f"""\
    egress:
      proxy: {{address: "proxy.example.org:3128", user: me, password: secret://file/~/.fabrictool/proxy}}
      ssh: {{host: gate, user: fabric, identity: ~/.ssh/agents, host_keys: [{KEY}]}}
      login: {{host: login1, port: 2222, user: alice, host_keys: [{KEY}]}}
"""


def clusters(folder):
    file = write_fabric(folder)
    text = INVENTORY.replace("    kind: local\n", f"    kind: local\n{EGRESS}", 1)
    (folder / "inventory.yaml").write_text(text)
    return load(file, environment={}).inventory.clusters


def test_an_agent_is_told_each_way_with_a_reference_for_the_password(tmp_path):
    assert egress_of(clusters(tmp_path)["dear"].egress) == EgressSpec(
        proxy=ProxySpec(host="proxy.example.org", port=3128, user="me", password="secret://file/~/.fabrictool/proxy"),
        ssh=SshHostSpec(host="gate", user="fabric", identity="~/.ssh/agents", host_keys=(KEY,)),
        login=SshHostSpec(host="login1", port=2222, user="alice", host_keys=(KEY,)),
    )


def test_specs_of_clusters_that_say_nothing_stay_what_they_were(tmp_path):
    about = dict.fromkeys(("fabric", "provider", "site", "cluster", "partition", "replica"), "x")
    spec = AgentSpec(**about, model="m", source="s", engine="e", egress=egress_of(clusters(tmp_path)["cheap"].egress))
    assert "egress" not in msgspec.json.decode(msgspec.json.encode(spec))


def test_a_spec_with_ways_out_can_be_read_again(tmp_path):
    about = dict.fromkeys(("fabric", "provider", "site", "cluster", "replica"), "x")
    spec = AgentSpec(
        **about, partition="p", model="m", source="s", engine="e", egress=egress_of(clusters(tmp_path)["dear"].egress)
    )
    assert msgspec.json.decode(msgspec.json.encode(spec), type=AgentSpec) == spec
