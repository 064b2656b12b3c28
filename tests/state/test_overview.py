"""Rows of ``status``: what a unit says of itself beside what its cluster says."""

import pytest

from fabrictool.domain.observed import ObservedUnit
from fabrictool.state import overview
from tests.cli.test_mesh import agent_status


@pytest.mark.parametrize("detail", ["", "the session's certificate ends in 3h"])
def test_an_agent_that_serves_may_have_something_to_say_all_the_same(monkeypatch, detail):
    monkeypatch.setattr(overview, "fetch", lambda *_, **__: agent_status())
    unit = ObservedUnit(
        address="replica/llama/0", operation="o", state="running", spec_digest="", ready=True, status_url="http://x",
        detail=detail,
    )  # fmt: skip
    row = overview._unit_row("one", unit)
    assert row["engine"] == "ready"
    assert row["detail"].endswith(f"; {detail}") is bool(detail)
