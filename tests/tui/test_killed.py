"""An agent was killed: what is told of it in each look, as one follows the other. A newcomer found each untrue once."""

import msgspec
import pytest

from fabrictool.status.documents import ModelRow
from fabrictool.status.sightings import JournalLine, OperatorView, Sighting, UnitView
from fabrictool.tui.details import lines_about, subject_of
from fabrictool.tui.history import History
from fabrictool.tui.rows import APPLY
from fabrictool.tui.tables import clusters, jobs, last_apply, mesh, nodes
from fabrictool.tui.view import ScreenView
from tests.tui.test_top import NOW, gateway, node

RUNS = UnitView(address="replica/llama/1", cluster="beta", state="running", ready=True, detail="up 1 m 36 s",
                operation="llama-1", ends_at=NOW + 86400)  # fmt: skip
KILLED = msgspec.structs.replace(RUNS, state="killed", ready=False, detail="", begins_at=NOW + 1)


def fabric(at, *, state="up"):
    """Of two replicas in two clusters the second is up, lost or missing."""
    there = [node("cpu", "alpha", "a")]
    if state != "missing":
        lost = {"connected": state == "up", "disconnected_at": None if state == "up" else NOW + 1}
        there.append(node("cpu", "beta", "b", replica="llama/1", session="s2", **lost))
    ready = 2 if state == "up" else 1
    model = ModelRow(model="llama", ready=ready, replicas=2, planned=2, providers=["a"], in_flight=0, requests=1,
                     failures=0, tokens=9, missing=["llama/1"] if state == "missing" else [])  # fmt: skip
    return gateway(at=at, nodes=there, models=[model])


def view_after(looks, **operator):
    history, last = History(), None
    for at, state in looks:
        last = Sighting(at=at, live=fabric(at, state=state))
        history.add(last)
    if operator:
        last = msgspec.structs.replace(last, operator=OperatorView(**({"at": last.at - 10} | operator)))
    return ScreenView(last, last.at, history)


def trouble_of(view, who):
    return next(trouble for trouble in view.troubles if trouble.subject == who)


def test_a_lost_one_is_not_up_in_the_words_of_a_look_from_before():
    lost = trouble_of(view_after([(NOW, "up"), (NOW + 1, "lost")], units=[RUNS]), "llama/1")
    assert (lost.what, lost.why) == ("lost", "beta/cpu: its tunnel broke")
    assert lost.command == "fabrictool logs replica/llama/1"
    known = trouble_of(view_after([(NOW, "up"), (NOW + 1, "lost")], units=[KILLED]), "llama/1")
    assert (known.why, known.command) == ("beta/cpu: killed", "fabrictool reconcile")


def test_what_a_cluster_says_after_it_was_lost_is_told():
    hung = msgspec.structs.replace(RUNS, detail="its node does not answer")
    view = view_after([(NOW, "up"), (NOW + 20, "lost")], units=[hung])
    assert trouble_of(view, "llama/1").why == "beta/cpu: its node does not answer"


def test_since_when_is_known_of_what_was_up_for_long():
    looks = [(NOW + 10 * at, "up") for at in range(120)]
    looks += [(NOW + 1210 + 10 * at, "lost" if at < 6 else "missing") for at in range(70)]
    for until in range(121, len(looks), 8):
        assert trouble_of(view_after(looks[:until]), "llama/1").since == NOW + 1210


def test_since_when_goes_on_when_the_gateway_forgets_the_node():
    view = view_after([(NOW, "up"), (NOW + 1, "lost"), (NOW + 62, "missing")], units=[KILLED])
    missing = trouble_of(view, "llama/1")
    assert (missing.what, missing.since, missing.why) == ("missing", NOW + 1, "killed")
    assert missing.command == "fabrictool reconcile"
    rows = {row.key: row for row in clusters(view)}
    assert rows["beta"].cells[:4] == ("beta", "no node", "–", "0/1")
    assert (rows["beta"].level, rows["alpha"].level) == ("bad", "well")
    about = subject_of(view, "clusters", "alpha")
    page = lines_about(view, about)
    assert about.commands == ("fabrictool doctor alpha",)
    assert "node cpu of alpha, provider a: linked" in page
    assert "node cpu of beta" not in "\n".join(page)


def test_what_is_back_is_no_trouble_though_its_cluster_was_asked_before():
    view = view_after([(NOW, "up"), (NOW + 1, "lost"), (NOW + 20, "up")], units=[KILLED])
    assert [trouble for trouble in view.troubles if trouble.subject == "llama/1"] == []


def test_a_killed_unit_awaits_nothing():
    view = view_after([(NOW, "lost")], units=[KILLED])
    (row,) = jobs(view)
    assert row.cells[:2] + row.cells[4:6] == ("replica/llama/1", "killed", "–", "–")
    page = lines_about(view, subject_of(view, "jobs", "replica/llama/1"))
    assert "unit replica/llama/1 on beta, asked 10 s ago: killed" in page
    assert not [line for line in page if "expects" in line]
    assert page[0] == "type"


def test_nodes_of_one_name_have_their_clusters_with_them():
    view = view_after([(NOW, "up")])
    assert [row.cells[0] for row in nodes(view)] == ["alpha/cpu", "beta/cpu"]
    assert mesh(view) == []


def line(kind, at=NOW, **changes):
    return JournalLine(at=at, plan="8" * 16, kind=kind, **changes)


@pytest.mark.parametrize(
    ("lines", "now", "state", "told"),
    [
        ([line("end")], NOW + 9, "done", None),
        ([line("end"), line("done", address="replica/llama/1", action="keep")], NOW + 900, "done", None),
        ([line("interrupted")], NOW + 9, "interrupted", "the same command again goes on where it stopped"),
        ([line("intent", address="replica/llama/1")], NOW + 9, "under way", None),
        ([line("intent", address="replica/llama/1"), line("failed", address="replica/llama/1")], NOW + 900,
         "in part", None),
        ([line("failed", address="gateway/main"), line("interrupted"), line("begin"), line("done")], NOW + 9,
         "under way", None),
        ([line("intent", address="replica/llama/1")], NOW + 900, "not ended",
         "no word of it for 15 min: it waits, or its process died"),
    ],
)  # fmt: skip
def test_the_last_apply_as_a_whole(lines, now, state, told):
    view = view_after([(now, "up")], at=now, journal=[line("begin", text="0 changes"), *lines])
    row = last_apply(view)[0]
    assert (row.key, row.cells[0], row.cells[1], row.cells[4]) == (APPLY, "apply 88888888", state, "0 changes")
    mine = [trouble for trouble in view.troubles if trouble.subject == "apply 88888888"]
    assert [(trouble.why, trouble.command) for trouble in mine] == ([(told, "fabrictool events")] if told else [])
    assert subject_of(view, "plan", APPLY).commands == ("fabrictool events",)
