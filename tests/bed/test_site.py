"""Getting to know a site, placing the agents' environment there, and checking it: on both real Slurm clusters."""

import pytest
import yaml

from tests.bed.federation import USERS


@pytest.fixture(scope="module")
def fed(make_federation):
    return make_federation("site")


# -- discover -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cluster", "device"), [("a", "a100-40g"), ("b", "h100-pcie")])
def test_discover_describes_a_cluster_that_validates(bed, fed, cluster, device):
    (key,) = bed.host_keys(f"{cluster}-login")
    done = fed.run(
        "discover", bed.address(f"{cluster}-login"), "--user", USERS[cluster], "--host-key", key,
        "--identity", str(bed.key_file), "--provider", "p", "--site", "campus",
    )  # fmt: skip
    found = yaml.safe_load(done.stdout)
    described = found["clusters"][cluster]
    assert {name: each["nodes"] for name, each in described["partitions"].items()} == {
        "normal": 2, "scavenger": 2, "debug": 1,
    }  # fmt: skip
    assert {each["device"] for each in described["partitions"].values()} == {device}
    assert [name for name, each in described["partitions"].items() if each.get("tier")] == ["scavenger"]
    assert ("accounting: slurmdbd" in done.stdout) == (cluster == "a")
    (fed.folder / "found.yaml").write_text(done.stdout)
    fed.write({}, {"tiny": {}}, gateway=None, trust={"groups": {"all": {"allow": ["p"]}}})
    fed.run("validate", "-i", "found.yaml")
    again = fed.run("discover", cluster, "-i", "found.yaml")
    assert yaml.safe_load(again.stdout) == found


def test_discover_tells_of_maintenance_and_of_a_plain_host(bed, fed):
    fed.write({"a": fed.cluster("a", {"normal": {"device": "cpu", "nodes": 1}})}, {"tiny": {}})
    name = bed.maintenance("a", 3600, 1800)
    try:
        assert f"# reservation {name} from " in fed.run("discover", "a", "-i", "inventory.yaml").stdout
    finally:
        bed.end_maintenance("a", name)
    (key,) = bed.host_keys("host")
    host = ["discover", f"hostuser@{bed.address('host')}", "--host-key", key, "--identity", str(bed.key_file)]
    assert "FT5501" in fed.run(*host, code=69).stderr  # Slurm's programs are there, and no Slurm
    assert yaml.safe_load(fed.run(*host, "--kind", "ssh").stdout)["clusters"]["host"]["kind"] == "ssh"


def test_discover_trusts_no_key_by_itself(bed, fed):
    address = bed.address("a-login")
    assert f"fabrictool trust host {address}" in fed.run("discover", address, "--user", "alice", code=64).stderr
    (other,) = bed.host_keys("b-login")
    done = fed.run("discover", address, "--user", "alice", "--host-key", other, code=None)
    assert done.returncode != 0
    assert "FT5303" in done.stderr
