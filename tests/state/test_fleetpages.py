"""Through whom the mesh is seen: gateways first, who answered again, and somebody else after a silence."""

import contextlib

import pytest

from fabrictool.base.errors import FabrictoolError, UnreachableError
from fabrictool.domain.observed import ClusterFacts, ObservedUnit
from fabrictool.state import fleetpages
from fabrictool.state.fleetpages import FleetPages


class PagedCluster:
    """Units whose pages are called like them."""

    def __init__(self, *addresses):
        self.addresses, self.looks, self.open = addresses, 0, 0

    def observe(self, *, brief=False, patient=False):
        self.looks += 1
        units = tuple(
            ObservedUnit(address=address, operation=address, state="running", spec_digest="x")
            for address in self.addresses
        )
        return ClusterFacts(cluster="c", known=True, units=units)

    @contextlib.contextmanager
    def page(self, operation):
        self.open += 1
        yield "" if operation.endswith("hidden") else operation
        self.open -= 1


@pytest.fixture
def asked(monkeypatch):
    asked, silent = list[str](), set[str]()

    def fetch(url, timeout_s):  # noqa: ARG001 - as it is called
        asked.append(url)
        if url in silent:
            raise UnreachableError.of("FT5201", f"no answer from {url}")
        return url

    monkeypatch.setattr(fleetpages, "fetch_fleet", fetch)
    return asked, silent


def test_a_gateway_is_asked_first_and_again_without_another_look(asked):
    cluster = PagedCluster("replica/m/0", "gateway/hidden", "gateway/main")
    pages = FleetPages({"c": cluster})
    assert (pages(), pages()) == ("gateway/main", "gateway/main")
    assert (asked[0], cluster.looks) == (["gateway/main"] * 2, 1)
    pages.close()
    assert cluster.open == 0


def test_what_was_heard_just_now_is_not_asked_again_and_counts_once(asked):
    cluster = PagedCluster("gateway/main")
    pages = FleetPages({"c": cluster})
    pages.hear([cluster.observe()])
    assert (pages(), cluster.looks) == ("gateway/main", 1)
    asked[1].add("gateway/main")
    cluster.addresses = ("gateway/next",)
    assert (pages(), cluster.looks) == ("gateway/next", 2), "the former one is gone"


def test_after_a_silence_somebody_else_is_asked_and_then_it_is_said(asked):
    cluster = PagedCluster("gateway/main", "replica/m/0")
    pages = FleetPages({"c": cluster})
    assert pages() == "gateway/main"
    asked[1].add("gateway/main")
    assert pages() == "replica/m/0"
    asked[1].add("replica/m/0")
    with pytest.raises(FabrictoolError, match="no answer from gateway/main"):
        pages()
    cluster.addresses = ()
    with pytest.raises(FabrictoolError, match="FT5204"):
        pages()
    assert cluster.open == 0
