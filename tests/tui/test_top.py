"""The terminal UI on recorded documents, in a terminal of fixed size."""

import pytest
from textual.widgets import DataTable, Static

from fabrictool.base.errors import UnreachableError
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
from fabrictool.tui.rows import matches

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
                     tokens=900, ttft_p95_s=0.612, tpot_p95_s=0.031),
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
        assert [row[0] for row in cells(app)] == ["bristen", "clariden"]
        assert cells(app)[1][2] == "1/2"
        assert cells(app)[1][-1] == "1 lost"
        assert "1.0 s old" in text(app, "#headline")
        assert "nodes 2/3 linked" in text(app, "#headline")
        await pilot.press("2")
        await settled(pilot)
        assert cells(app)[0][:2] == ["llama", "1/2"]
        assert cells(app)[0][-3:] == ["612 ms", "31 ms", "degraded"]
        await pilot.press("3")
        await settled(pilot)
        assert [row[3] for row in cells(app)] == ["up", "lost 12 s", "up"]
        assert cells(app)[0][-1] == "in 2 h 01 m"


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
        assert cells(app)[0][5:7] == ["m/0", "reference ready"]


@pytest.mark.asyncio
async def test_a_gateway_that_stops_answering_leaves_the_last_view_and_says_so():
    answers = [gateway()]

    def ask():
        if answers:
            return answers.pop()
        raise UnreachableError.of("FT5201", "no status from h:1: connection refused")

    app = Top(ask, 0.01, clock=lambda: NOW + 60)
    async with app.run_test(size=(140, 30)) as pilot:
        for _ in range(100):
            await pilot.pause(0.02)
            if "connection refused" in text(app, "#headline"):
                break
        assert "connection refused" in text(app, "#headline")
        assert "STALE" in text(app, "#headline")
        assert len(cells(app)) == 2


def test_no_screen_needs_a_mutating_verb():
    verbs = {binding[1].split("(")[0] for binding in Top.BINDINGS}
    assert verbs <= {"show", "quit"}


def test_matches():
    assert matches(("Alpha", "ok"), "alpha OK")
    assert not matches(("Alpha", "lost"), "alpha !lost")
