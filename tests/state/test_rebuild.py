"""A state that is gone or damaged is found again in the clusters."""

import json
import os
import signal

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.domain.observed import ClusterFacts, ObservedUnit
from fabrictool.domain.specs import AgentSpec, HostPort
from fabrictool.domain.state import Placed, State, operation_id
from fabrictool.state.fabric import Fabric, believed
from fabrictool.state.folder import FabricFolder
from fabrictool.state.rebuild import rebuild, write_rebuilt
from fabrictool.state.truststore import TrustStore

ADDRESS = "replica/m/0"
SPEC = AgentSpec(
    fabric="f", provider="p", site="s", cluster="c", partition="n", replica="m/0", model="m", source="x", engine="vllm",
    tp=2, hubs=(HostPort("h", 1),),
)  # fmt: skip


class FakeCluster:
    def __init__(self, name, *units, known=True):
        self.name, self.units, self.known = name, units, known

    def observe(self, *, patient=False):
        return ClusterFacts(cluster=self.name, known=self.known, units=self.units, reason="" if self.known else "away")

    def spec(self, operation):
        if operation.endswith("unreadable"):
            raise FabrictoolError.of("FT5104", "cannot be read")
        return SPEC


def unit(lineage, generation=1, *, state="running", marked=True, operation=""):
    return ObservedUnit(
        address=ADDRESS, operation=operation or operation_id(lineage, ADDRESS, generation), state=state,
        spec_digest="d", lineage=lineage if marked else "",
    )  # fmt: skip


@pytest.fixture
def fabric_of(tmp_path):
    def make(*clusters, trusted=False):
        trust = TrustStore(tmp_path / "f/trust")
        if trusted and not trust.exists:
            trust.init("f", now=1_700_000_000.0)
        return Fabric("f", FabricFolder(tmp_path / "f"), trust, {cluster.name: cluster for cluster in clusters})

    return make


def code(error):
    return error.value.problems[0].code


def test_units_generations_and_what_was_applied_come_from_the_clusters(fabric_of):
    root = fabric_of(trusted=True).root_lineage
    young, old = unit(root, 3), unit(root, 2, state="killed")
    found = rebuild(fabric_of(FakeCluster("c", young, old)))
    assert found.state.lineage == root
    assert found.state.serial == 1
    assert found.state.generations == {ADDRESS: 3}
    assert found.state.units == {ADDRESS: Placed(cluster="c", partition="n", tp=2, operation=young.operation)}
    assert found.state.applied_units[ADDRESS].spec == SPEC
    assert "does not run (killed)" in found.notes[0]


def test_units_of_a_cluster_that_holds_nobody_elses_prove_their_lineage_by_their_operations(fabric_of):
    root = fabric_of(trusted=True).root_lineage
    stranger = unit("0123456789abcdef", 5)
    found = rebuild(fabric_of(FakeCluster("c", unit(root, marked=False)), FakeCluster("d", stranger)))
    assert found.state.lineage == root
    assert list(found.state.units) == [ADDRESS]
    assert found.state.generations == {ADDRESS: 1}
    assert any(stranger.operation in note for note in found.notes)


def test_the_one_lineage_that_all_bear_is_taken_and_two_are_refused(fabric_of):
    one, other = "0123456789abcdef", "fedcba9876543210"
    short = unit(one, 2)
    found = rebuild(fabric_of(FakeCluster("c", unit(one)), trusted=True))
    assert found.state.lineage == one, "the trust root was replaced, the units were not"
    with pytest.raises(FabrictoolError) as error:
        rebuild(fabric_of(FakeCluster("c", unit(one)), FakeCluster("d", unit(other, 2)), trusted=True))
    assert code(error) == "FT4208"
    assert (
        rebuild(fabric_of(FakeCluster("c", unit(one)), FakeCluster("d", unit(other, 2))), lineage=other).state.lineage
        == other
    )
    marked = ObservedUnit(address=ADDRESS, operation=short.operation, state="running", spec_digest="d", lineage=one[:8])
    with pytest.raises(FabrictoolError) as error:
        rebuild(fabric_of(FakeCluster("c", marked)))
    assert code(error) == "FT4208", "the beginning of a lineage is not the lineage"
    assert rebuild(fabric_of(FakeCluster("c", marked, unit(one, 3)))).state.lineage == one


def test_a_cluster_that_does_not_answer_is_not_forgotten(fabric_of):
    root = fabric_of(trusted=True).root_lineage
    fabric = fabric_of(FakeCluster("c", known=False))
    with pytest.raises(FabrictoolError) as error:
        rebuild(fabric)
    assert code(error) == "FT4207"
    assert error.value.exit_code == 69
    assert rebuild(fabric, partial=True).state.units == {}
    placed = Placed(cluster="c", partition="n", operation="o")
    fabric.folder.write_state(State(lineage=root, units={ADDRESS: placed}, generations={ADDRESS: 4}), read=State())
    (fabric.folder.path / "state.json").write_text('{"serial": 41, "lin')
    found = rebuild(fabric)
    assert found.state.units == {ADDRESS: placed}
    assert found.state.generations == {ADDRESS: 4}
    assert found.state.serial == 42, "higher than any that was ever used"


def test_a_unit_whose_spec_cannot_be_read_is_said(fabric_of):
    root = fabric_of(trusted=True).root_lineage
    found = rebuild(fabric_of(FakeCluster("c", unit(root, operation=f"{operation_id(root, ADDRESS, 1)}-unreadable"))))
    assert found.state.units == {}
    assert "left out" in found.notes[0]


def test_what_changes_between_looking_and_writing_is_noticed(fabric_of):
    root = fabric_of(trusted=True).root_lineage
    cluster = FakeCluster("c", unit(root))
    fabric = fabric_of(cluster)
    shown = rebuild(fabric)
    cluster.units = (unit(root, 2),)
    with pytest.raises(FabrictoolError) as error:
        write_rebuilt(fabric, shown, lineage="", partial=False, now=0.0)
    assert code(error) == "FT4004"
    assert not (fabric.folder.path / "state.json").exists()


# -- with real processes ------------------------------------------------------------------------------------------


@pytest.mark.e2e
def test_a_plan_after_a_rebuild_shows_no_change(fabric_bed):
    bed = fabric_bed
    bed.up()
    file = bed.folder / "state/t/state.json"
    before = json.loads(file.read_text())
    for way in ("gone", "damaged"):
        if way == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:100])
            assert "state rebuild" in bed.run("plan", code=65).stderr
        assert "FT4007" in bed.run("state", "rebuild", code=64).stderr
        done = bed.run("state", "rebuild", "--yes")
        assert "replica/tiny/1" in done.stdout
        assert "No changes" in bed.run("plan").stdout
        after = json.loads(file.read_text())
        assert {k: after[k] for k in ("lineage", "generations", "units")} == {
            k: before[k] for k in ("lineage", "generations", "units")
        }
        assert {a: u["spec"] for a, u in after["applied_units"].items()} == {
            a: u["spec"] for a, u in before["applied_units"].items()
        }
        assert after["serial"] > before["serial"]
        assert "nothing has drifted" in bed.run("reconcile", "--dry-run").stderr
    aside = list((bed.folder / "state/t").glob("state.damaged-*.json"))
    assert len(aside) == 1
    os.kill(bed.units()["replica/tiny/0", "running"].pid, signal.SIGKILL)
    bed.run("apply", "--yes")
    assert bed.units()["replica/tiny/0", "running"].operation.startswith("replica-tiny-0-g2-")


@pytest.mark.e2e
def test_state_commands_say_what_is_there(fabric_bed):
    bed = fabric_bed
    bed.write(replicas=1)
    bed.run("trust", "init")
    assert "serial 0" in bed.run("state", "show").stdout
    bed.run("apply", "--yes")
    shown = json.loads(bed.run("state", "show", "--json").stdout)
    assert shown["type"] == "state"
    assert shown["lease"] is None
    assert sorted(shown["state"]["units"]) == ["gateway/main", "replica/tiny/0"]
    text = bed.run("state", "show").stdout
    assert "lease: none" in text
    assert "replica/tiny/0" in text
    versions = json.loads(bed.run("state", "history", "--json").stdout)["versions"]
    assert [v["serial"] for v in versions] == list(range(shown["state"]["serial"], 0, -1))[:20]
    assert "SERIAL" in bed.run("state", "history").stdout
    assert "FT4205" in bed.run("state", "unlock", "deadbeef", "--yes", code=1).stderr


@pytest.mark.parametrize(("here", "started", "known"), [(True, True, True), (False, False, True), (False, True, False)])
def test_a_cluster_whose_folder_of_units_is_gone_is_unknown_and_not_empty(here, started, known):
    facts = ClusterFacts(cluster="c", known=True, here=here)
    assert believed(facts, started).known is known
