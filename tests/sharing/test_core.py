"""Requests that come, iterations that end, memory that changes."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fabrictool.sharing.core import BeginChange, Dropped
from tests.sharing.scene import loaded, model, node, request, sharing, table


class Driver:
    """Begins what it is given and reports it done in any order."""

    def __init__(self, scheduler, answers=5):
        self.scheduler, self.answers = scheduler, answers
        self.changes, self.dropped, self.emitted = [], [], []

    def apply(self, effects):
        for effect in effects:
            if isinstance(effect, BeginChange):
                self.changes.append(effect)
            elif isinstance(effect, Dropped):
                self.dropped.append(effect.request)

    def arrive(self, asked, now=0.0):
        self.apply(self.scheduler.arrive(asked, now))

    def settle(self, now=0.0):
        while self.changes:
            change = self.changes.pop(0)
            self.apply(self.scheduler.changed(change.node, change.replica, now))

    def step(self, where, now=0.0):
        """One iteration; None: there was nothing to do."""
        turn, effects = self.scheduler.next_iteration(where, now)
        self.apply(effects)
        if turn is None:
            return None
        emitted, effects = self.scheduler.ended(turn, now + turn.expected_s, lambda r: r.emitted >= self.answers)
        self.emitted += emitted
        self.apply(effects)
        return turn


def replicas(where):
    return list(where.replicas.values())


def test_a_request_loads_its_model_and_is_answered():
    where = node(0)
    driver = Driver(sharing([where], model()))
    asked = request()
    driver.arrive(asked)
    assert driver.step(where) is None  # its weights are not there yet
    driver.settle()
    while driver.step(where):
        pass
    assert asked.emitted == 5
    assert replicas(where)[0].idle_since is not None


def test_processors_are_taken_first_and_devices_where_they_are_too_slow():
    cpu, gpu = node(0, "cpu"), node(1, "gpu")
    driver = Driver(sharing([gpu, cpu], model()))
    driver.arrive(request(prompt=500))
    assert replicas(cpu)
    assert not replicas(gpu)
    driver.arrive(request(prompt=1500))
    assert replicas(gpu)


def test_the_largest_replica_of_a_kind_is_filled_first():
    nodes = [node(0), node(1)]
    what = model()
    small, large = loaded(nodes[0], what, request()), loaded(nodes[1], what, request(), request())
    driver = Driver(sharing(nodes, what))
    driver.arrive(request())
    assert (small.batch, large.batch) == (1, 3)


def test_a_full_node_gives_room_without_the_watermark():
    where = node(0, memory=1000 + 105)
    driver = Driver(sharing([where], model()))
    driver.arrive(request(prompt=50))
    assert replicas(where)[0].cache == 100
    assert where.ledger.budget == 1100


def test_a_smaller_neighbour_leaves_before_another_replica_is_loaded():
    first, second = node(0, memory=4200), node(1, memory=4200)
    a, b = model("a"), model("b")
    target = loaded(first, a, *(request("a", prompt=400) for _ in range(2)), cache=1000)
    victim = loaded(first, b, request("b"), cache=1100)
    moved = victim.running[0]
    driver = Driver(sharing([first, second], a, b))
    driver.arrive(request("a", prompt=1000))
    assert target.batch == 3
    assert victim.leaving
    assert [replica.model.name for replica in replicas(second)] == ["b"]
    assert replicas(second)[0].waiting == [moved]
    assert driver.scheduler.counts.moved == 1


def test_nobody_leaves_whose_requests_would_be_late_elsewhere():
    first, second = node(0, memory=4200), node(1, memory=4200)
    a, b = model("a"), model("b")
    target = loaded(first, a, *(request("a", prompt=400) for _ in range(2)), cache=1000)
    victim = loaded(first, b, request("b", prompt=3000, emitted=1), cache=1100)
    driver = Driver(sharing([first, second], a, b))
    driver.arrive(request("a", prompt=1000))
    assert not victim.leaving
    assert target.batch == 2
    assert [replica.model.name for replica in replicas(second)] == ["a"]


def test_without_victims_nobody_leaves():
    first, second = node(0, memory=4200), node(1, memory=4200)
    a, b = model("a"), model("b")
    loaded(first, a, *(request("a", prompt=400) for _ in range(2)), cache=1000)
    victim = loaded(first, b, request("b"), cache=1100)
    Driver(sharing([first, second], a, b, victims=0)).arrive(request("a", prompt=1000))
    assert not victim.leaving


def test_a_cache_that_was_thought_too_small_grows():
    where = node(0)
    what = model(longest=10, answer=1.0)
    driver = Driver(sharing([where], what, watermark=0.0), answers=50)
    driver.arrive(request(prompt=50))
    driver.settle()
    for _ in range(60):
        driver.step(where)
        driver.settle()
        replica = replicas(where)[0]
        assert sum(r.context for r in replica.running) <= replica.cache
    assert driver.scheduler.counts.resizes
    assert not driver.scheduler.counts.evicted


def test_who_has_most_time_starts_anew_where_a_cache_cannot_grow():
    where = node(0, memory=1000 + 110)
    what = model(longest=10, answer=1.0)
    urgent, patient = request(prompt=50), request(prompt=50, began=1.0)
    loaded(where, what, urgent, patient, cache=105)
    driver = Driver(sharing([where], what), answers=100)
    for _ in range(20):
        driver.step(where)
        driver.settle()
    assert driver.scheduler.counts.evicted == 1
    assert driver.scheduler.queue == [patient]
    assert patient.emitted
    assert urgent.emitted > patient.emitted


def test_sizes_shrink_only_where_much_is_left():
    where = node(0)
    what = model(longest=10)
    replica = loaded(where, what, request(prompt=500, emitted=4), request(prompt=400), cache=1000)
    driver = Driver(sharing([where], what))
    driver.step(where)
    assert replica.batch == 1
    assert replica.cache == int(1.2 * what.need(replica.running))
    assert driver.scheduler.counts.resizes == 1


def test_a_request_that_waited_in_vain_is_dropped():
    where = node(0, memory=10)
    driver = Driver(sharing([where], model()))
    asked = request()
    driver.arrive(asked)
    driver.apply(driver.scheduler.expire(2.0))
    assert not driver.dropped
    driver.apply(driver.scheduler.expire(2.1))
    assert driver.dropped == [asked]
    assert not driver.scheduler.queue


def test_an_idle_replica_leaves_and_makes_room_for_a_queue():
    where = node(0, memory=1300)
    idle = loaded(where, model("b"), cache=200)
    idle.idle_since = 0.0
    driver = Driver(sharing([where], model("a"), model("b")))
    driver.arrive(request("a"))
    driver.apply(driver.scheduler.expire(0.9))
    assert not idle.leaving
    driver.apply(driver.scheduler.expire(1.0))
    assert idle.leaving
    driver.settle(1.0)
    assert [replica.model.name for replica in replicas(where)] == ["a"]


def test_one_replica_a_node_where_nothing_is_shared():
    nodes = [node(0), node(1)]
    driver = Driver(sharing(nodes, model("a"), model("b"), model("c"), most_replicas=1))
    for name in "abc":
        driver.arrive(request(name))
    assert [len(where.replicas) for where in nodes] == [1, 1]
    assert len(driver.scheduler.queue) == 1


MEMORY = st.integers(1700, 9000)


@example(1454, 1700, 1)  # requests that gave their places up come back after the last iteration of others
@given(st.integers(0, 10**6), MEMORY, st.integers(1, 3))
def test_whatever_comes_memory_holds_and_no_request_is_lost(seed, memory, count):
    """Random loads with memory changes that are reported late and in any order."""
    rng = random.Random(seed)
    nodes = [node(i, rng.choice(("cpu", "gpu")), memory) for i in range(count)]
    names = "abcd"
    driver = Driver(sharing(nodes, *(model(n, longest=rng.randint(640, 700)) for n in names)), rng.randint(1, 40))
    asked, now = [], 0.0
    for _ in range(60):
        now += rng.uniform(0.0, 0.3)
        if rng.random() < 0.5:
            asked.append(request(rng.choice(names), rng.randint(1, 600), now))
            driver.arrive(asked[-1], now)
        if driver.changes and rng.random() < 0.7:
            change = driver.changes.pop(rng.randrange(len(driver.changes)))
            driver.apply(driver.scheduler.changed(change.node, change.replica, now))
        driver.step(rng.choice(nodes), now)
        if rng.random() < 0.2:
            driver.apply(driver.scheduler.expire(now))
        check(driver, nodes, asked)
    for _ in range(5000):
        now += 0.1
        driver.settle(now)
        worked = [driver.step(where, now) for where in nodes]
        driver.apply(driver.scheduler.expire(now))
        waiting = driver.scheduler.queue or any(replica.batch for where in nodes for replica in replicas(where))
        if not any(worked) and not driver.changes and not waiting:
            break
    check(driver, nodes, asked)
    assert all(r.emitted >= driver.answers or r in driver.dropped for r in asked)


def check(driver, nodes, asked):
    places = [r for where in nodes for i in replicas(where) for r in (*i.running, *i.waiting)]
    places += driver.scheduler.queue
    assert len(places) == len(set(places))
    done = {r for r in asked if r.emitted >= driver.answers}
    assert set(places) | done | set(driver.dropped) == set(asked)
    for where in nodes:
        assert where.ledger.tracked <= where.ledger.capacity
        assert where.ledger.budget <= where.ledger.capacity
        for replica in replicas(where):
            held = where.ledger.holdings[replica.id]
            if replica.running and not where.ledger.is_changing(replica.id):
                assert sum(r.context for r in replica.running) <= held.physical - replica.model.weights


@given(st.integers(0, 10**6))
def test_no_accepted_request_is_late_while_memory_stays(seed):
    """The safety of shadow validation: iterations take at most what was thought, and nothing is resized."""
    rng = random.Random(seed)
    where = node(0)
    models = [model(name, gpu=table(0.001, 0.01, 0.001)) for name in "ab"]
    scheduler = sharing([where], *models, victims=0)
    for what in models:
        loaded(where, what, cache=3000)
    now, taken = 0.0, []
    for _ in range(200):
        if rng.random() < 0.3:
            asked = request(rng.choice("ab"), rng.randint(1, 300), now)
            scheduler.arrive(asked, now)
            if asked not in scheduler.queue:
                taken.append(asked)
            else:
                scheduler.queue.remove(asked)
        turn, _ = scheduler.next_iteration(where, now)
        if turn is None:
            now += rng.uniform(0.0, 0.5)
            continue
        now += turn.expected_s * rng.uniform(0.8, 1.1)
        for emitted in scheduler.ended(turn, now, lambda r: r.emitted >= 8)[0]:
            assert now <= emitted.deadline - emitted.tpot_s + 1e-9
    assert taken


@pytest.mark.parametrize("began", [-100.0, 0.0])
def test_a_late_request_does_not_close_a_node(began):
    where = node(0)
    driver = Driver(sharing([where], model("a"), model("b")))
    loaded(where, driver.scheduler.models["b"], request("b", began=began, emitted=1))
    driver.arrive(request("a"))
    assert {replica.model.name for replica in replicas(where)} == {"a", "b"}
