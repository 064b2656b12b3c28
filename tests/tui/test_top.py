"""The terminal UI on documents, in a terminal of fixed size: its tables, its keys, and what it does with trouble."""

import contextlib

import msgspec
import pytest
from textual.widgets import RichLog, Static

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.cli import live
from fabrictool.status.documents import (
    AgentStatus,
    EngineStatus,
    Event,
    GatewayStatus,
    ModelRow,
    NodeRow,
    ServiceRow,
    Totals,
    decode,
    encode,
)
from fabrictool.status.sightings import JournalLine, OperatorView, Sighting, UnitView
from fabrictool.tui.app import Top
from fabrictool.tui.rows import NODE_COLUMNS, matches, natural
from fabrictool.tui.screens.livetable import LiveTable
from fabrictool.tui.screens.table import TableScreen
from fabrictool.tui.screens.text import LogScreen

NOW = 1_800_000_000.0


def node(name, cluster, provider, *, connected=True, replica="llama/0", **changes):
    service = ServiceRow(
        service=name * 2, replica=replica, model=replica.split("/", maxsplit=1)[0], engine="vllm", precision="bf16",
        lifecycle="SERVING", accepting=True, running=3, waiting=1, kv_use=0.42, in_flight=2, requests=17,
    )  # fmt: skip
    fields = {
        "session": name, "role": "agent", "provider": provider, "site": "s", "cluster": cluster, "node": name,
        "lifecycle": "SERVING", "connected": connected, "disconnected_at": None if connected else NOW - 12,
        "device": "gh200", "devices": 4, "ends_at": NOW + 7260, "services": [service],
    }  # fmt: skip
    return NodeRow(**(fields | changes))


def gateway(**changes):
    fields = {
        "release": "0.1.0", "at": NOW, "started_at": NOW - 60, "fabric": "swiss-ai", "session": "g", "listen": "h:1",
        "mesh": "h:2", "policy": "least-loaded",
        "nodes": [
            node("n1", "clariden", "cscs"),
            node("n2", "clariden", "cscs", connected=False, replica="llama/1"),
            node("n3", "bristen", "eth", replica="qwen/0"),
        ],
        "models": [
            ModelRow(model="llama", ready=1, replicas=2, providers=["cscs"], in_flight=2, requests=17, failures=1,
                     tokens=900, ttft_p95_s=0.612, tpot_p95_s=0.031, samples=3),
            ModelRow(model="qwen", ready=1, replicas=1, providers=["eth"], in_flight=0, requests=0, failures=0,
                     tokens=0),
        ],
        "totals": Totals(requests=17, failures=1, retries=2, in_flight=2, tokens=900),
        "registry_records": 6, "registry_root": "00",
    }  # fmt: skip
    return GatewayStatus(**(fields | changes))


class Answers:
    """A feed of documents, or of what is raised instead."""

    def __init__(self, ask, operator=None):
        self.ask, self.operator, self.logs = ask, operator, {}

    def look(self):
        try:
            live = self.ask()
        except FabrictoolError as error:
            return Sighting(at=NOW, operator=self.operator, trouble=error.problems[0].message, asked="h:1")
        return Sighting(at=NOW, live=live, operator=self.operator, asked="h:1")

    def log(self, address):
        return self.logs[address]


def cells(app, name="#table"):
    table = app.screen.query_one(name, LiveTable)
    return [[text for text, _ in table.cells_at(number).values()] for number in range(table.row_count)]


def text(app, name):
    return str(app.screen.query_one(name, Static).render())


async def settled(pilot):
    for _ in range(5):
        await pilot.pause()


def top(ask, operator=None, **changes):
    return Top(Answers(ask, operator), 3600.0, **({"clock": lambda: NOW + 1} | changes))


def column(app, name):
    """The cells of a column that is shown."""
    at = [heading.split()[0] for heading in app.screen.table.headings].index(name.split()[0])
    return [row[at] for row in cells(app)]


def labels(app):
    return set(app.screen.table.headings)


OPERATOR = OperatorView(
    at=NOW,
    units=[
        UnitView(
            address="replica/llama/0", cluster="clariden", state="running", ready=True, job="41", ends_at=NOW + 7260
        ),
        UnitView(address="replica/llama/1", cluster="clariden", state="lost", job="42", detail="its node was rebooted"),
        UnitView(
            address="replica/qwen/1", cluster="bristen", state="pending", job="43", begins_at=NOW + 600,
            detail="Resources: a node with 4 a100-80g is awaited",
        ),
    ],
    drift=["replica/qwen/1 does not run yet"],
    journal=[
        JournalLine(at=NOW - 99, plan="p" * 16, kind="begin"),
        JournalLine(at=NOW - 90, plan="p" * 16, kind="done", address="replica/llama/0", action="create"),
        JournalLine(
            at=NOW - 80, plan="p" * 16, kind="failed", address="replica/qwen/1", action="create", text="no such account"
        ),
    ],
    targets={"llama": (0.5, None), "qwen": (1.0, None)},
)  # fmt: skip


# -- the screens ------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_overview_says_who_needs_somebody_and_how_the_clusters_are():
    app = top(gateway)
    async with app.run_test(size=(140, 30)) as pilot:
        await settled(pilot)
        rows = {row[0]: row for row in cells(app)}
        assert rows["llama/1"][1:3] == ["lost", "13 s"]
        assert rows["llama/1"][3] == "clariden/n2: its tunnel broke"
        assert rows["llama/1"][4] == "fabrictool logs replica/llama/1"
        assert rows["llama"][1] == "degraded"
        assert cells(app)[0][0] == "llama/1", "the worst first"
        assert [row[:2] for row in cells(app, "#clusters")] == [["clariden", "1 lost"], ["bristen", "ok"]]
        head = text(app, "#headline")
        assert "1.0 s old" in head
        assert "nodes 2/3 linked" in head
        assert "1 bad, 1 worth a look" in head
        assert "next end in 2 h 00 m" in head


@pytest.mark.asyncio
async def test_models_and_nodes():
    app = top(gateway, OPERATOR)
    async with app.run_test(size=(160, 30)) as pilot:
        await pilot.press("2")
        await settled(pilot)
        assert cells(app)[0][:6] == ["llama", "degraded", "1/2", "612 ms (n=3)", "31 ms", "missed"]
        assert column(app, "SLO") == ["missed", "no streams yet"]
        await pilot.press("3")
        await settled(pilot)
        assert column(app, "LINK") == ["lost 12 s", "up", "up"]
        assert column(app, "WALLTIME")[0] == "in 2 h 01 m"


@pytest.mark.asyncio
async def test_jobs_speak_the_schedulers_words_and_the_plan_says_what_became_of_each_unit():
    app = top(gateway, OPERATOR)
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.press("4")
        await settled(pilot)
        assert column(app, "UNIT") == ["replica/llama/1", "replica/qwen/1", "replica/llama/0"]
        assert column(app, "WHY")[1] == "Resources: a node with 4 a100-80g is awaited"
        assert column(app, "STARTS")[1] == "in 9 m 59 s"
        await pilot.press("7")
        await settled(pilot)
        assert [row[:2] for row in cells(app)] == [
            ["apply pppppppp", "in part"],
            ["replica/qwen/1", "failed"], ["drift", "since then"], ["replica/llama/0", "done"],
        ]  # fmt: skip
        assert column(app, "TEXT")[1] == "no such account"
        await pilot.press("6")
        await settled(pilot)
        assert column(app, "KIND")[:2] == ["failed", "done"], "newest first"


@pytest.mark.asyncio
async def test_what_only_the_operators_side_knows_is_told_so_without_it():
    app = top(gateway)
    async with app.run_test(size=(120, 30)) as pilot:
        for key in ("4", "7"):
            await pilot.press(key)
            await settled(pilot)
            assert "start `fabrictool top` beside it" in text(app, "#empty")
        await pilot.press("5")
        await settled(pilot)
        assert "shows nothing of the mesh" in text(app, "#empty")


@pytest.mark.asyncio
async def test_a_planned_replica_that_no_node_has_is_a_row():
    document = gateway()
    lost = msgspec.structs.replace(document.models[1], planned=2, missing=["qwen/1"])
    app = top(lambda: msgspec.structs.replace(document, models=[document.models[0], lost]), OPERATOR)
    async with app.run_test(size=(140, 30)) as pilot:
        await settled(pilot)
        (row,) = [row for row in cells(app) if row[0] == "qwen/1"]
        assert row[1] == "missing"
        assert row[3] == "pending: Resources: a node with 4 a100-80g is awaited"
        await pilot.press("2")
        await settled(pilot)
        assert ["qwen", "degraded", "1/2"] in [row[:3] for row in cells(app)]
        await pilot.press("3")
        await settled(pilot)
        assert ["missing", "qwen/1"] in [[row[1], row[3]] for row in cells(app)]


@pytest.mark.asyncio
async def test_a_changed_view_changes_cells_and_drops_rows():
    documents = [gateway(), gateway(nodes=[node("n3", "bristen", "eth")])]
    feed = Answers(lambda: documents.pop(0) if len(documents) > 1 else documents[0])
    app = Top(feed, 0.01, clock=lambda: NOW)
    async with app.run_test(size=(140, 30)) as pilot:
        for _ in range(100):
            await pilot.pause(0.02)
            if [row[0] for row in cells(app, "#clusters")] == ["bristen"]:
                break
        assert [row[0] for row in cells(app, "#clusters")] == ["bristen"]


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_filters_without_and_in_order():
    app = top(gateway)
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.press("3")
        await settled(pilot)
        await pilot.press("slash", *"clariden", "space", "exclamation_mark", *"lost")
        await settled(pilot)
        assert [row[0] for row in cells(app)] == ["n1"]
        await pilot.press("escape")
        await settled(pilot)
        assert len(cells(app)) == 3
        await pilot.press("slash", "tilde", *"brsn")
        await settled(pilot)
        assert [row[0] for row in cells(app)] == ["n3"]
        await pilot.press("x")
        await settled(pilot)
        assert text(app, "#empty") == "no row passes the filter “~brsnx”; esc takes it away"


@pytest.mark.asyncio
async def test_sorting_goes_through_the_columns_and_numbers_count_as_numbers():
    nodes = [node(f"n{n}", f"cluster-{n}", "p") for n in (10, 2, 1)]
    app = top(lambda: gateway(nodes=nodes))
    async with app.run_test(size=(140, 30)) as pilot:
        await settled(pilot)
        assert [row[0] for row in cells(app, "#clusters")] == ["cluster-1", "cluster-2", "cluster-10"]
        await pilot.press("3", "s")
        await settled(pilot)
        assert [row[0] for row in cells(app)] == ["n1", "n2", "n10"]
        assert "NODE ▲" in labels(app)
        await pilot.press("S")
        await settled(pilot)
        assert [row[0] for row in cells(app)] == ["n10", "n2", "n1"]
        await pilot.press("escape")
        await settled(pilot)
        assert [row[0] for row in cells(app)] == ["n10", "n2", "n1"], "as they came"


@pytest.mark.asyncio
async def test_commands_are_copied_and_never_carried_out():
    app, copied = top(gateway, OPERATOR), []
    app.copy_to_clipboard = copied.append
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.press("3")
        await settled(pilot)
        await pilot.press("y")
        assert copied == ["fabrictool logs replica/llama/1"]
        await pilot.press("space", "space", "y")
        await settled(pilot)
        assert copied[1].splitlines() == ["fabrictool logs replica/llama/1", "fabrictool logs replica/llama/0"]
        drawn = "".join(segment.text for segment in app.screen.table.render_line(1))
        assert drawn.startswith("●n2 ")


@pytest.mark.asyncio
async def test_a_row_in_full_and_back():
    app = top(gateway, OPERATOR)
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.press("2")
        await settled(pilot)
        await pilot.press("enter")
        await settled(pilot)
        page = text(app, "#text")
        assert "model llama: 1 of 2 replicas are ready" in page
        assert "TTFT p50 –, p95 612 ms, target 500 ms (of 3 streams)" in page
        assert "node n1 of clariden, provider cscs: linked" in page
        assert "node n2 of clariden, provider cscs: lost" in page
        assert "n3" not in page
        await pilot.press("escape", "3", "d")
        await settled(pilot)
        page = text(app, "#text")
        assert "unit replica/llama/1 on clariden, asked 1 s ago: lost, not ready" in page
        assert "its node was rebooted" in page
        assert "fabrictool logs replica/llama/1 --follow" in page
        await pilot.press("escape")
        await settled(pilot)
        assert len(cells(app)) == 3


@pytest.mark.asyncio
async def test_a_log_is_followed_and_searched():
    app = top(gateway, OPERATOR)
    app._feed.logs["replica/llama/1"] = ["loading weights", "out of memory\x1b[2J"]
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.press("4")
        await settled(pilot)
        await pilot.press("l")
        for _ in range(50):
            await pilot.pause(0.02)
            if len(app.screen.query_one("#log", RichLog).lines) == 2:
                break
        lines = [strip.text.rstrip() for strip in app.screen.query_one("#log", RichLog).lines]
        assert lines == ["loading weights", "out of memory\ufffd[2J"]
        await pilot.press("slash", *"memory")
        await settled(pilot)
        assert len(app.screen.query_one("#log", RichLog).lines) == 1
        await pilot.press("escape")
        await settled(pilot)
        assert app.screen.query("#table")


@pytest.mark.asyncio
async def test_going_by_name():
    app = top(gateway, OPERATOR)
    async with app.run_test(size=(140, 40)) as pilot:
        await settled(pilot)
        await pilot.press("colon", *"job", "enter")
        await settled(pilot)
        assert "UNIT" in labels(app)
        await pilot.press("colon", *"qwen", "enter")
        await settled(pilot)
        assert [row[0] for row in cells(app)] == ["qwen"]
        await pilot.press("question_mark")
        await settled(pilot)
        assert "No key changes anything of the fabric" in text(app, "#text")
        await pilot.press("question_mark", "z")
        await settled(pilot)
        assert app.screen.query_one("#headline").size.height == 1


@pytest.mark.asyncio
async def test_no_key_does_more_than_look():
    seen = {binding.action.split("(")[0] for binding in (*Top.BINDINGS, *TableScreen.BINDINGS, *LogScreen.BINDINGS)}
    assert seen <= {
        "show", "describe", "logs", "yank", "compact", "keys", "step", "jump", "quit", "filter", "go", "sort", "turn",
        "mark", "clear", "app.return", "search", "follow", "wrap",
    }  # fmt: skip


# -- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_others_wrote_is_text_and_never_markup():
    odd = "[red]x[/red] [/] [link=y]"
    app = top(lambda: gateway(fabric=odd, nodes=[node("n1", odd, "cscs")]))
    async with app.run_test(size=(180, 30)) as pilot:
        await settled(pilot)
        assert [row[0] for row in cells(app, "#clusters")] == [odd]
        assert odd in text(app, "#headline")


@pytest.mark.asyncio
async def test_nodes_that_say_the_same_of_themselves_are_rows_of_their_own():
    twin = node("n1", "c", "p")
    app = top(lambda: gateway(nodes=[twin, twin], models=[gateway().models[0]] * 2))
    async with app.run_test(size=(140, 30)) as pilot:
        for key, name in (("3", "n1"), ("2", "llama")):
            await pilot.press(key)
            await settled(pilot)
            assert [row[0] for row in cells(app)] == [name, name]
            await pilot.press("down", "d")
            await settled(pilot)
            assert "provider p" in text(app, "#text")
            await pilot.press("escape")


@pytest.mark.asyncio
async def test_an_agents_own_view():
    agent = AgentStatus(
        release="0", at=NOW, started_at=NOW, fabric="f", provider="p", site="s", cluster="c", node="n", replica="m/0",
        model="m", session="aa", lifecycle="SERVING", accepting=True, in_flight=2, ends_at=None,
        certificate_ends_at=NOW, engine=EngineStatus(engine="reference", state="ready"), links=["bb"], dial_errors={},
        registry_root="00",
    )  # fmt: skip
    app = top(lambda: decode(encode(agent)))
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.press("3")
        await settled(pilot)
        assert cells(app)[0][3:5] == ["m/0", "reference ready"]


@pytest.mark.asyncio
async def test_a_gateway_that_stops_answering_leaves_the_last_view_and_says_so():
    answers, back = [gateway()], []

    def ask():
        if back:
            return back[0]
        if answers:
            return answers.pop()
        raise UnreachableError.of("FT5201", "no status from h:1: connection refused")

    now = [NOW + 60]
    app = Top(Answers(ask), 0.01, clock=lambda: now[0])
    async with app.run_test(size=(140, 30)) as pilot:
        for _ in range(100):
            await pilot.pause(0.02)
            if "connection refused" in text(app, "#headline"):
                break
        head = text(app, "#headline")
        assert head.startswith("! NO ANSWER for 60 s: no status from h:1: connection refused; asking again")
        assert "STALE" in head
        assert app.screen.has_class("stale")
        assert app.screen.query_one("#headline").size.height >= 3  # none of its lines is cut
        assert len(cells(app, "#clusters")) == 2
        back.append(gateway(fabric="back"))
        now[0] = NOW + 1
        for _ in range(100):
            await pilot.pause(0.02)
            if text(app, "#headline").startswith("back"):
                break
        assert "NO ANSWER" not in text(app, "#headline")
        assert not app.screen.has_class("stale")


@pytest.mark.asyncio
async def test_eighty_columns_keep_what_matters():
    app = top(gateway, OPERATOR)
    async with app.run_test(size=(80, 24)) as pilot:
        for key, kept in (
            ("1", {"WHO", "WHAT", "SINCE", "WHY"}),
            ("2", {"MODEL", "STATE", "READY", "FAILED", "TTFT p95", "SLO"}),
            ("3", {"NODE", "STATE", "LINK", "REPLICA"}),
            ("4", {"UNIT", "STATE", "WHY", "JOB"}),
            ("6", {"AT", "KIND", "SUBJECT", "TEXT"}),
            ("7", {"UNIT", "STATE", "ACTION", "TEXT"}),
        ):
            await pilot.press(key)
            await settled(pilot)
            table = app.screen.table
            assert table.virtual_size.width <= 80
            assert table.max_scroll_x == 0
            assert kept <= labels(app)
        await pilot.press("3")
        await pilot.resize_terminal(160, 24)
        await settled(pilot)
        assert len(app.screen.table.headings) == len(NODE_COLUMNS)


@pytest.mark.asyncio
async def test_states_have_colours_and_escapes_do_not_pass():
    hostile = "n1\x1b[2J\u202e"
    sick = node(hostile, "c", "p", connected=False, replica=f"llama/{hostile}")
    events = [Event(at=NOW, kind=hostile, subject=hostile, text=hostile)]
    app = top(lambda: gateway(nodes=[sick, node("n2", "c", "p")], events=events))
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.press("3")
        await settled(pilot)
        assert [app.screen.table.cells_at(row)["LINK"][1] for row in (0, 1)] == ["bold red", "green"]
        assert cells(app)[0][0] == "n1\ufffd[2J\ufffd"
        for keys in (["1"], ["6"], ["3", "d"]):
            await pilot.press(*keys)
            await settled(pilot)
            assert "\x1b" not in app.as_text()
            assert "\u202e" not in app.as_text()


def test_a_gateway_that_was_replaced_is_found_again(monkeypatch):
    """What `top` asks: after a question without an answer it looks for the gateway anew."""
    urls, ended = ["http://old", "http://new"], []

    @contextlib.contextmanager
    def way(_source):
        url = urls.pop(0)
        yield url
        ended.append(url)

    def fetch(url, **_):
        if url == "http://old":
            raise UnreachableError.of("FT5201", "gone")
        return gateway()

    monkeypatch.setattr(live, "gateway_url", way)
    monkeypatch.setattr(live, "fetch", fetch)
    with live.LiveStatus(object(), "", "") as ask:
        with pytest.raises(UnreachableError):
            ask()
        assert ended == ["http://old"]
        assert ask().fabric == "swiss-ai"
        assert ask().fabric == "swiss-ai"
    assert ended == ["http://old", "http://new"]


def test_matches():
    assert matches(("Alpha", "ok"), "alpha OK")
    assert not matches(("Alpha", "lost"), "alpha !lost")
    assert matches(("clariden-n012", "ok"), "~cln12")
    assert not matches(("clariden", "n012"), "~cln12"), "in one cell"
    assert matches(("Alpha", "ok"), "!"), "nothing to leave out yet"


def test_natural_order():
    assert sorted(["c-10", "c-2", "b", "c-2a"], key=natural) == ["b", "c-2", "c-2a", "c-10"]
