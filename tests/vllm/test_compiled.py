"""What a real vLLM compiled on one node is what another one begins with."""

import re

import pytest

from fabrictool.agent.compiled import CompiledCache
from fabrictool.domain.specs import AgentSpec
from fabrictool.engines.checks import compile_folders
from fabrictool.engines.protocol import EngineLaunch
from tests.vllm.conftest import Vllm

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(1500)]


@pytest.fixture
def start(tmp_path, random_model, monkeypatch):
    """Starts a server on a node by that name; what its log says of what it compiled, and its node's part."""
    spec = AgentSpec(
        fabric="f", provider="p", site="s", cluster="c", partition="n", replica="m/0", model="m",
        source=f"file://{random_model}", engine="vllm", device="cpu",
    )  # fmt: skip

    def on(node):
        monkeypatch.setattr("socket.gethostname", lambda: node)
        cache = CompiledCache(spec, tmp_path / "cache")
        filled = cache.fill()
        launch = EngineLaunch(
            engine="vllm", model="m", served_name="m", host="127.0.0.1", port=1, compile_dir=str(cache.folder)
        )
        settings = {"VLLM_CACHE_ROOT": f"{cache.folder}/vllm", **compile_folders(launch)}
        folder = tmp_path / node
        folder.mkdir(exist_ok=True)
        server = Vllm(folder, random_model, more=(), settings=settings)
        try:
            server.start()
            server.wait()
        finally:
            server.stop()
        return filled, cache, (folder / "vllm.log").read_text()

    return on


def seconds_of(log):
    """Between two lines of vLLM's around what it compiles."""
    times = [
        re.search(rf"(\d\d):(\d\d):(\d\d) .*{words}", log).groups() for words in ("Warming up model", "Warming up done")
    ]
    begin, end = (3600 * int(h) + 60 * int(m) + int(s) for h, m, s in times)
    return (end - begin) % 86400


def libraries(cache):
    """What a C++ compiler made, and when."""
    return {file.name: file.stat().st_mtime_ns for file in cache.folder.rglob("*.so")}


def test_the_second_node_runs_no_compiler(start):
    """vLLM 0.32 does not load the seed's trace ("no attribute 'finalize_loading'") and traces anew; the machine code,
    which takes most of the time, it finds.
    """
    filled, first, log = start("n1")
    assert not filled
    assert first.keep()
    compiled = libraries(first)
    assert compiled
    filled, second, again = start("n2")
    assert filled
    print(f"compiled in {seconds_of(log)} s, and with the seed in {seconds_of(again)} s")
    assert libraries(second) == compiled
