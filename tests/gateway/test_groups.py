"""Weights by consumer group: from a gateway's spec and the mesh's records to the replica that is picked."""

from collections import Counter
from dataclasses import replace

import aiohttp
import msgspec
import pytest

from fabrictool.domain.specs import GatewaySpec, HostPort, updatable, weight_key
from fabrictool.gateway.gateway import GatewayServer
from fabrictool.gateway.run import _rules_of as rules_of
from fabrictool.mesh.records import Lifecycle, NodeBody, ServiceBody
from fabrictool.mesh.registry import Serving
from fabrictool.routing.protocol import Unnamed
from tests.gateway.conftest import Bed
from tests.manual_clock import ManualClock


def test_what_a_plan_says_of_groups_deals_out_the_replicas_that_the_mesh_tells_of():
    """From the spec as it is written, over records of the mesh, to the pick; and what an earlier release reads."""

    def serving(number, partition, provider):
        node = NodeBody(
            federation="f", session=bytes([number]) * 16, lifecycle=Lifecycle.SERVING, version=1, role="agent",
            fabric="f", provider=provider, site="s", cluster="c", node=partition,
        )  # fmt: skip
        service = ServiceBody(
            federation="f", session=node.session, service=b"e" * 16, lifecycle=Lifecycle.SERVING, version=1,
            replica=f"m/{number}", model="m", engine="vllm", tp=1, adapters=("sql",),
        )  # fmt: skip
        return Serving(node, service)

    class FormerSpec(msgspec.Struct, kw_only=True, tag="gateway", tag_field="unit"):
        fabric: str
        weights: dict[str, float] | msgspec.UnsetType = msgspec.UNSET

    dear, cheap = weight_key("m", "c", "dear", 1), weight_key("m", "c", "cheap", 1)
    spec = GatewaySpec(
        fabric="f", provider="alpha", site="s", cluster="c", name="g", mesh=HostPort("127.0.0.1", 1), policy="weighted",
        groups={"lab": ("alpha",), "others": ("alpha", "beta")}, weights={cheap: 0.5},
        group_weights={dear: {"lab": 1.0, "": 0.25}, cheap: {"": 1.0}},
    )  # fmt: skip
    written = msgspec.json.encode(spec)
    assert msgspec.json.decode(written, type=FormerSpec).weights == {cheap: 0.5}
    assert b"group_weights" not in msgspec.json.encode(msgspec.structs.replace(spec, group_weights=msgspec.UNSET))
    read = msgspec.json.decode(written, type=GatewaySpec)
    rules = rules_of(read)
    gateway = GatewayServer(ManualClock(), fabric="f", rules=rules, keyring=None)
    for entry in (serving(0, "dear", "alpha"), serving(1, "cheap", "beta"), serving(2, "new", "beta")):
        gateway.directory.follow(entry.node.session, [entry], None, 0.0)

    def dealt_out(group, model="m", count=1000):
        able = gateway.directory.entitled(model, rules.trust, group, None)
        picked = Counter(
            gateway.routing_policy.pick(able, Unnamed(n, model, group=group)).replica for n in range(count)
        )
        return {name: share / count for name, share in picked.items()}

    assert dealt_out("lab") == {"m/0": 1.0}
    # Nothing is said of the new one: the one weight counts there, 1 as long as nobody names it.
    assert dealt_out("others") == pytest.approx({"m/0": 1 / 9, "m/1": 4 / 9, "m/2": 4 / 9}, abs=0.01)
    assert dealt_out("others", "sql") == pytest.approx(dealt_out("others"), abs=0.01), (
        "an adapter is dealt out as its model"
    )
    gateway.reload(rules_of(msgspec.structs.replace(read, group_weights={dear: {"": 0.0}, cheap: {"": 1.0}})), None, {})
    assert "m/0" not in dealt_out("others"), "without a restart"
    gateway.reload(rules_of(msgspec.structs.replace(read, group_weights=msgspec.UNSET)), None, {})
    assert dealt_out("others") == pytest.approx({"m/0": 0.4, "m/1": 0.2, "m/2": 0.4}, abs=0.01)
    assert updatable(read, msgspec.structs.replace(read, group_weights=msgspec.UNSET)), "none has to be started anew"


@pytest.mark.parametrize("affinity", [False, True])
@pytest.mark.asyncio
async def test_each_replica_gets_what_was_planned_of_real_requests(affinity):
    """Half of them only alpha may serve; everyone else's are planned for beta, and go to alpha when it fails."""
    bed = await Bed().start("weighted")
    bed.gateway.reload(replace(bed.gateway._rules, affinity=affinity), bed.gateway._keyring, {})

    async def ask(http, key, number):
        body = {"model": "m", "messages": [{"role": "user", "content": f"question {number}"}]}
        async with http.post(
            f"{bed.url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
        ) as answer:
            return (await answer.json())["choices"][0]["message"]["content"]

    async def dealt_out():
        async with aiohttp.ClientSession() as http:
            return Counter([await ask(http, key, n) for n in range(60) for key in (bed.KEY, bed.ALPHA_KEY)])

    try:
        before = await dealt_out()
        assert before["from a"] > 80, "three quarters, where half was planned"
        alpha, beta = bed.gateway.directory.of_model("m")
        alpha.group_weights, beta.group_weights = {"alpha-only": 1.0, "everyone": 0.0}, {"everyone": 1.0}
        assert await dealt_out() == {"from a": 60, "from b": 60}
        bed.b.mode = "503"
        assert await dealt_out() == {"from a": 120}
    finally:
        await bed.stop()
