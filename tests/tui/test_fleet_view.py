"""`top` on an agent: the fleet as it knows it, and nothing that it does not know."""

import pytest

from tests.status_views import AGENT, NOW, OTHER, engine, fleet, member
from tests.tui.test_top import cells, settled, text, top


@pytest.mark.asyncio
async def test_an_agent_shows_clusters_models_and_nodes_and_no_figure_that_it_does_not_know():
    app = top(fleet)
    async with app.run_test(size=(140, 30)) as pilot:
        await settled(pilot)
        head = text(app, "#headline")
        assert f"view from the agent {AGENT[:8]} on one/n1 · 1.0 s old" in head
        assert "nodes 1 serving, 1 suspected   gateways 2/2 linked   records 6   requests: ask a gateway" in head
        clusters = cells(app, "#clusters")
        assert [row[:4] for row in clusters] == [
            ["two", "1 suspected", "beta", "0/1"], ["one", "ok", "alpha", "1/1"],
        ]  # fmt: skip
        assert [row[6] for row in clusters] == ["?", "?"]
        assert clusters[1][7] == "in 2 h 01 m"
        assert cells(app)[0][:2] == ["llama/1", "suspected"]
        await pilot.press("2")
        await settled(pilot)
        assert cells(app) == [["llama", "degraded", "1/2", *["?"] * 9, "alpha", "?"]]
        await pilot.press("3")
        await settled(pilot)
        rows = {row[3]: row for row in cells(app) if row[11] == "agent"}
        assert rows["llama/0"][1:3] == ["serving", "itself"]
        assert rows["llama/1"][1:3] == ["suspected", "–"]
        assert all(row[5:9] == ["?"] * 4 for row in rows.values())
        assert cells(app)[0] == rows["llama/1"], "what needs somebody comes first"


@pytest.mark.asyncio
async def test_who_is_evicted_or_over_has_no_row_and_the_evicted_are_counted():
    gone = [member(OTHER, state="evicted", services=[engine("llama/1")]), member("11" * 16, state="left")]
    app = top(lambda: fleet(members=[*fleet().members[:3], *gone]))
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.press("3")
        await settled(pilot)
        assert "nodes 1 evicted, 1 serving" in text(app, "#headline")
        assert [row[3] for row in cells(app)] == ["–", "–", "llama/0"]


@pytest.mark.asyncio
async def test_a_view_of_an_agent_that_is_too_old_says_so():
    app = top(fleet, clock=lambda: NOW + 60)
    async with app.run_test(size=(140, 30)) as pilot:
        await settled(pilot)
        assert "STALE" in text(app, "#headline")
