"""The terminal UI on recorded documents, in a terminal of fixed size."""

import contextlib

import msgspec
import pytest
from textual.widgets import DataTable, Static

from fabrictool.base.errors import UnreachableError
from fabrictool.cli import live
from fabrictool.status.documents import (
    AgentStatus,
    EngineStatus,
    GatewayStatus,
    ModelRow,
    NodeRow,
    ServiceRow,
    Totals,
    decode,
    encode,
)
from fabrictool.tui.app import Top
from fabrictool.tui.rows import NODE_COLUMNS, matches

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


def cells(app):
    table = app.screen.query_one("#table", DataTable)
    return [[str(cell) for cell in table.get_row(row)] for row in table.rows]


def text(app, name):
    return str(app.screen.query_one(name, Static).render())


async def settled(pilot):
    for _ in range(5):
        await pilot.pause()


def top(ask):
    return Top(ask, 3600.0, clock=lambda: NOW + 1)


@pytest.mark.asyncio
async def test_three_screens_show_clusters_models_and_nodes():
    app = top(gateway)
    async with app.run_test(size=(140, 30)) as pilot:
        await settled(pilot)
        assert [row[:2] for row in cells(app)] == [["clariden", "1 lost"], ["bristen", "ok"]]  # problems first
        assert cells(app)[0][3] == "1/2"
        assert "1.0 s old" in text(app, "#headline")
        assert "nodes 2/3 linked" in text(app, "#headline")
        await pilot.press("2")
        await settled(pilot)
        assert cells(app)[0][:3] == ["llama", "degraded", "1/2"]
        assert cells(app)[0][-3:] == ["612 ms (n=3)", "31 ms", "900"]
        await pilot.press("3")
        await settled(pilot)
        assert [row[2] for row in cells(app)] == ["lost 12 s", "up", "up"]
        assert cells(app)[0][9] == "in 2 h 01 m"


@pytest.mark.asyncio
async def test_a_planned_replica_that_no_node_has_is_a_row():
    document = gateway()
    lost = msgspec.structs.replace(document.models[1], planned=2, missing=["qwen/1"])
    app = top(lambda: msgspec.structs.replace(document, models=[document.models[0], lost]))
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.press("2")
        await settled(pilot)
        assert ["qwen", "degraded", "1/2"] in [row[:3] for row in cells(app)]
        await pilot.press("3")
        await settled(pilot)
        assert ["missing", "qwen/1"] in [[row[1], row[3]] for row in cells(app)]


@pytest.mark.asyncio
async def test_a_changed_view_changes_cells_and_drops_rows():
    documents = [gateway(), gateway(nodes=[node("n3", "bristen", "eth")])]
    app = Top(lambda: documents.pop(0) if len(documents) > 1 else documents[0], 0.01, clock=lambda: NOW)
    async with app.run_test(size=(140, 30)) as pilot:
        for _ in range(100):
            await pilot.pause(0.02)
            if [row[0] for row in cells(app)] == ["bristen"]:
                break
        assert [row[0] for row in cells(app)] == ["bristen"]


@pytest.mark.asyncio
async def test_filter_and_its_inverse():
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


@pytest.mark.asyncio
async def test_what_others_wrote_is_text_and_never_markup():
    odd = "[red]x[/red] [/] [link=y]"
    app = top(lambda: gateway(fabric=odd, nodes=[node("n1", odd, "cscs")]))
    async with app.run_test(size=(180, 30)) as pilot:
        await settled(pilot)
        assert [row[0] for row in cells(app)] == [odd]
        assert odd in text(app, "#headline")


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

    app = Top(ask, 0.01, clock=lambda: NOW + 60)
    async with app.run_test(size=(140, 30)) as pilot:
        for _ in range(100):
            await pilot.pause(0.02)
            if "connection refused" in text(app, "#headline"):
                break
        head = text(app, "#headline")
        assert head.startswith("! NO ANSWER for 0 s: no status from h:1: connection refused; asking again every")
        assert "STALE" in head
        assert app.screen.query_one("#headline").size.height >= 3  # none of its lines is cut
        assert len(cells(app)) == 2
        back.append(gateway(fabric="back"))
        for _ in range(100):
            await pilot.pause(0.02)
            if text(app, "#headline").startswith("back"):
                break
        assert "NO ANSWER" not in text(app, "#headline")


@pytest.mark.asyncio
async def test_eighty_columns_cut_nothing_and_keep_what_matters():
    app = top(gateway)
    async with app.run_test(size=(80, 24)) as pilot:
        for key, kept in (("1", {"CLUSTER", "STATE"}), ("2", {"MODEL", "STATE", "READY", "FAILED", "TTFT p95"}),
                          ("3", {"NODE", "STATE", "LINK", "REPLICA"})):  # fmt: skip
            await pilot.press(key)
            await settled(pilot)
            table = app.screen.query_one("#table", DataTable)
            assert table.virtual_size.width <= 80
            assert table.max_scroll_x == 0
            assert kept <= {str(column.label) for column in table.columns.values()}
        await pilot.resize_terminal(160, 24)
        await settled(pilot)
        assert len(app.screen.query_one("#table", DataTable).columns) == len(NODE_COLUMNS)


@pytest.mark.asyncio
async def test_states_have_colours_and_escapes_do_not_pass():
    app = top(lambda: gateway(nodes=[node("n1\x1b[2J\u202e", "c", "p", connected=False), node("n2", "c", "p")]))
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.press("3")
        await settled(pilot)
        table = app.screen.query_one("#table", DataTable)
        assert [table.get_row_at(row)[2].style for row in (0, 1)] == ["bold red", "green"]
        assert cells(app)[0][0] == "n1\ufffd[2J\ufffd"


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
    with live.LiveStatus(None, "", "") as ask:
        with pytest.raises(UnreachableError):
            ask()
        assert ended == ["http://old"]
        assert ask().fabric == "swiss-ai"
        assert ask().fabric == "swiss-ai"
    assert ended == ["http://old", "http://new"]


def test_no_screen_needs_a_mutating_verb():
    verbs = {binding[1].split("(")[0] for binding in Top.BINDINGS}
    assert verbs <= {"show", "quit"}


def test_matches():
    assert matches(("Alpha", "ok"), "alpha OK")
    assert not matches(("Alpha", "lost"), "alpha !lost")
