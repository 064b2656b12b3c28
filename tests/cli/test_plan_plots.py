"""``plan --plot`` and ``--chart``: what they refuse before the search, and what they draw of phases."""

import pytest

from fabrictool.cli.main import main
from fabrictool.cli.plan_plots import Bar, bars_of, long_stages
from fabrictool.cli.solve_watch import Moment
from fabrictool.domain.inventory import Inventory
from fabrictool.domain.plan import Placement, ReplicaPlacement, StagePlacement
from fabrictool.planner.problem import StageResult
from tests.planner.fabrics import write_fabric


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--plot", "no/such/folder/plan.png"], 1, "FT4302"),
        (["--plot", "plan.pdf"], 65, "FT2145"),
        (["--chart", "--json"], 64, "--plot draws into a file"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_the_search(tmp_path, capsys, monkeypatch, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    searched = []
    monkeypatch.setattr("fabrictool.cli.plan_output.plan_online", lambda *given, **more: searched.append(given))
    assert main(["plan", "-b", str(write_fabric(tmp_path)), *arguments]) == code
    assert said in capsys.readouterr().err
    assert not searched


def stage(cluster, tp):
    return StagePlacement(cluster=cluster, partition="gpu", device="h100-sxm", tp=tp)


def replica(number, phase, *stages):
    first, *others = stages
    return ReplicaPlacement(
        replica=f"m/{number}", model="m", provider="p", site="s", cluster=first.cluster, partition="gpu",
        device="h100-sxm", tp=first.tp, pp=len(stages), phase=phase, stages=stages if others else (),
    )  # fmt: skip


def test_phases_have_colours_of_their_own_and_count_wherever_their_stages_are():
    inventory = Inventory.model_validate({
        "apiVersion": "fabrictool/v1", "kind": "Inventory",
        "providers": {"p": {}}, "sites": {"s": {"provider": "p"}},
        "clusters": {name: {"site": "s", "kind": "local", "partitions": {
            "gpu": {"device": "h100-sxm", "devices_per_node": 8, "nodes": 1}}} for name in "ab"},
    })  # fmt: skip
    reads = replica(0, "prefill", stage("a", 4), stage("b", 2))
    answers = replica(1, "decode", stage("b", 4))
    bars, legend = bars_of(Placement(replicas=(reads, answers)), inventory)
    assert legend == ["m, prefill", "m, decode"]
    assert bars == [
        Bar("a/gpu (h100-sxm)", 8, {"m, prefill": 4}),
        Bar("b/gpu (h100-sxm)", 8, {"m, prefill": 2, "m, decode": 4}),
    ]


def test_a_solver_that_knows_all_stages_at_once_has_no_picture_of_its_last_one():
    moments = [Moment(seconds, StageResult("replicas", 9, 5)) for seconds in (0.1, 9.0)]
    assert long_stages(moments) == []
    assert long_stages([Moment(0.0, StageResult("cost", 9, 5)), *moments])
