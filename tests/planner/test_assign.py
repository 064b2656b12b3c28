"""Names stay with what runs."""

from fabrictool.domain.plan import ReplicaPlacement
from fabrictool.planner.assign import assign
from fabrictool.planner.problem import ModelNeed, Solution
from tests.planner.test_exact import option, pool, problem

A, B = pool("a", nodes=4), pool("b", nodes=4)
INSTANCE = problem([ModelNeed("m", 1.0, 0, 9)], [option("m", A), option("m", B)], [A, B])


def placed(counts, running=None, unseen=()):
    solution = Solution(counts, {}, (), "test", optimal=True)
    return {r.replica: r.cluster for r in assign(INSTANCE, solution, running or {}, unseen).replicas}


def test_new_replicas_get_the_smallest_numbers():
    assert placed({0: 2, 1: 1}) == {"m/0": "a", "m/1": "a", "m/2": "b"}


def test_running_replicas_keep_name_and_place():
    running = {"m/3": ("m", "a", "p", 1, 1, "unified"), "m/7": ("m", "b", "p", 1, 1, "unified")}
    assert placed({0: 2, 1: 1}, running) == {"m/3": "a", "m/7": "b", "m/0": "a"}


def test_a_replica_that_must_move_gives_its_number_to_nobody():
    assert placed({1: 1}, {"m/0": ("m", "a", "p", 1, 1, "unified")}) == {"m/1": "b"}


def test_unseen_replicas_stay():
    unseen = ReplicaPlacement(
        replica="m/0", model="m", provider="x", site="x", cluster="far", partition="p", device="d", tp=1
    )
    assert placed({0: 1}, {}, [unseen]) == {"m/0": "far", "m/1": "a"}
