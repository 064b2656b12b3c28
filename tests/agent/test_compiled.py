"""What engines compile: each node's own, and a seed for the nodes that have nothing yet."""

import os
import shutil
import threading
import time
from pathlib import Path

import msgspec
import pytest

from fabrictool.agent import compiled
from fabrictool.agent.compiled import CompiledCache
from fabrictool.domain.specs import AgentSpec

SPEC = AgentSpec(
    fabric="f", provider="p", site="s", cluster="c", partition="n", replica="m/0", model="m",
    source="file:///m", engine="vllm", device="h100-sxm",
)  # fmt: skip


@pytest.fixture
def on(tmp_path, monkeypatch):
    """A node's part, by the node's name."""

    def make(node, spec=SPEC):
        monkeypatch.setattr("socket.gethostname", lambda: node)
        return CompiledCache(spec, tmp_path)

    return make


def write(folder, **files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def read(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_a_node_without_anything_begins_with_what_another_has_compiled(on, tmp_path):
    first, second = on("n1"), on("n2")
    assert not first.fill(), "nobody has compiled yet"
    write(first.folder, **{"vllm/a/graph.so": "A", "triton/k": "B"})
    os.utime(first.folder / "vllm/a/graph.so", (1000, 1000))
    assert first.keep()
    assert second.fill()
    assert read(second.folder) == read(first.folder) == {"vllm/a/graph.so": "A", "triton/k": "B"}
    assert (second.folder / "vllm/a/graph.so").stat().st_mtime == 1000, "ninja looks at it"
    assert second.folder != first.folder
    seeds = [p for p in (tmp_path / "compiled/.seeds").rglob("*") if p.is_file()]
    assert [oct(p.stat().st_mode & 0o222) for p in seeds] == ["0o0", "0o0"]
    write(second.folder, **{"vllm/a/graph.so": "its own"})
    assert first.folder.joinpath("vllm/a/graph.so").read_text() == "A"
    assert not second.fill(), "it has something"


def test_a_seed_is_made_anew_only_when_there_is_more(on):
    first, second = on("n1"), on("n2")
    write(first.folder, a="A")
    assert [first.keep(), first.keep()] == [True, False]
    second.fill()
    assert not second.keep()
    write(second.folder, b="B")
    assert second.keep()
    third = on("n3")
    assert third.fill()
    assert read(third.folder) == {"a": "A", "b": "B"}


@pytest.mark.parametrize(
    "change",
    [
        {"source": "file:///o"},
        {"tp": 2},
        {"precision": "fp8"},
        {"options": {"enforce-eager": ""}},
        {"engine": "sglang"},
    ],
)
def test_it_is_for_one_way_to_start_an_engine(on, change):
    first, other = on("n1"), on("n2", msgspec.structs.replace(SPEC, **change))
    write(first.folder, a="A")
    first.keep()
    assert not other.fill()


def test_another_replica_or_walltime_is_the_same_way(on):
    first = on("n1")
    write(first.folder, a="A")
    first.keep()
    assert on("n2", msgspec.structs.replace(SPEC, replica="m/1", walltime_s=60.0)).fill()


def test_of_several_nodes_each_keeps_its_part_to_itself(on):
    spec = msgspec.structs.replace(SPEC, nodes=2, pp=2)
    first, second = on("n1", spec), on("n2", spec)
    write(first.folder, rank_0="A")
    assert not first.keep()
    assert not second.fill()


@pytest.mark.parametrize("hindrance", ["told to stop", "too much", "full disk"])
def test_what_is_cut_off_leaves_no_trace(on, tmp_path, monkeypatch, hindrance):
    first = on("n1")
    write(first.folder, a="A" * 100, b="B" * 100)
    if hindrance == "told to stop":
        whole = shutil.copy2

        def copied(source, target):
            assert not first._stop.is_set(), "one file more"
            first.stop()
            return whole(source, target)

        monkeypatch.setattr(shutil, "copy2", copied)
    elif hindrance == "too much":
        monkeypatch.setattr(compiled, "MOST_OCTETS", 150)
        monkeypatch.setattr(shutil, "copytree", lambda *_, **__: pytest.fail("copied before it was counted"))
    else:
        monkeypatch.setattr(shutil, "copy2", fails_at("b"))
    assert not first.keep()
    assert list((tmp_path / "compiled").rglob(".seeds/*")) == []
    assert read(first.folder) == {"a": "A" * 100, "b": "B" * 100}


def fails_at(name):
    whole = shutil.copy2

    def copy(source, target):
        if Path(source).name == name:
            raise OSError(28, "No space left on device")
        return whole(source, target)

    return copy


def test_many_nodes_at_once_leave_one_whole_seed(on, tmp_path):
    nodes = [on(f"n{number}") for number in range(8)]
    for number, node in enumerate(nodes):
        write(node.folder, **{f"{number}/{file}": "x" * 2000 for file in range(40)}, common="C")
    threads = [threading.Thread(target=node.keep) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (seed,) = (tmp_path / "compiled/.seeds").iterdir()
    assert read(seed) in [read(node.folder) for node in nodes]
    late = on("late")
    assert late.fill()
    assert read(late.folder) == read(seed)


def test_what_no_start_used_for_long_goes(on, tmp_path):
    old = on("n1", msgspec.structs.replace(SPEC, model="old", source="file:///old"))
    write(old.folder, a="A")
    old.keep()
    new = on("n1")
    write(new.folder, a="A")
    new.keep()
    long_ago = time.time() - compiled.UNUSED_S - 60
    for folder in [*(tmp_path / "compiled/n1").iterdir(), *(tmp_path / "compiled/.seeds").iterdir()]:
        os.utime(folder, (long_ago, long_ago))
    again = on("n1")
    again.fill()
    assert sorted(p.name for p in (tmp_path / "compiled").rglob("*") if p.is_dir()) == sorted(
        [".seeds", "n1", again.folder.name, again.folder.name]
    )
