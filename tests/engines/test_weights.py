import os
import resource
import signal
import subprocess
import sys

import gguf
import numpy as np
import pytest

from fabrictool.base.errors import InvalidInputError
from fabrictool.engines.reference.weights import cache_key, load_weights
from tests.tiny_model import write_tiny_model


def quiet(_):
    pass


def test_second_load_maps_the_file_that_the_first_wrote(tiny_path, tmp_path):
    first = load_weights(tiny_path, tmp_path, quiet)
    (flat,) = (tmp_path / "weights").glob("*.f32")
    written = flat.stat()
    second = load_weights(tiny_path, tmp_path, quiet)
    assert first.shared
    assert second.shared
    assert (flat.stat().st_ino, flat.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert np.array_equal(first.flat, second.flat)
    assert second.metadata == first.metadata
    with pytest.raises(ValueError, match="read-only"):
        second.flat[0] = 1.0
    private = load_weights(tiny_path, None, quiet)
    assert not private.shared
    assert private.warning is None
    assert np.array_equal(first.flat, private.flat)


def test_joined_matrices_are_views_of_their_parts(tiny):
    named = tiny.tensors()
    parts = [named[f"blk.1.attn_{part}"] for part in "qkv"]
    assert np.array_equal(np.concatenate(parts), named["blk.1.qkv"])
    assert np.shares_memory(parts[2], named["blk.1.qkv"])
    assert np.array_equal(np.concatenate([named["blk.0.ffn_gate"], named["blk.0.ffn_up"]]), named["blk.0.gate_up"])


def test_another_model_has_another_key(tmp_path):
    write_tiny_model(tmp_path / "a", seed=1)
    write_tiny_model(tmp_path / "b", seed=2)
    key = cache_key(tmp_path / "a")
    assert key != cache_key(tmp_path / "b")
    os.utime(tmp_path / "a", ns=(1, 1))
    assert key != cache_key(tmp_path / "a")


def test_a_cache_that_is_no_folder_costs_the_sharing_only(tiny_path, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    weights = load_weights(tiny_path, blocked, quiet)
    assert not weights.shared
    assert weights.warning.problems[0].code == "FT7023"
    assert np.array_equal(weights.flat, load_weights(tiny_path, None, quiet).flat)


def test_a_write_that_fails_midway_leaves_nothing_behind(tiny_path, tmp_path):
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))  # as a full disk or quota: write() itself fails
    try:
        weights = load_weights(tiny_path, tmp_path, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert not weights.shared
    assert weights.warning.problems[0].code == "FT7023"
    assert {path.suffix for path in (tmp_path / "weights").iterdir()} == {".lock"}
    assert load_weights(tiny_path, tmp_path, quiet).shared


def test_leftovers_and_cut_files_are_made_anew(tiny_path, tmp_path):
    wanted = load_weights(tiny_path, tmp_path, quiet).flat.copy()
    (flat,) = (tmp_path / "weights").glob("*.f32")
    flat.write_bytes(flat.read_bytes()[:1000])
    leftover = flat.with_name(f".{flat.stem}.1.tmp")
    leftover.write_bytes(b"of a killed conversion")
    assert np.array_equal(load_weights(tiny_path, tmp_path, quiet).flat, wanted)
    assert not leftover.exists()


LOAD = """
import sys
from pathlib import Path
from fabrictool.engines.reference.weights import load_weights
seen = []
weights = load_weights(Path(sys.argv[1]), Path(sys.argv[2]), seen.append)
print(weights.shared, float(weights.flat.sum()), seen[-1])
"""


def test_replicas_that_start_together_share_one_file(tiny_path, tmp_path):
    command = [sys.executable, "-c", LOAD, str(tiny_path), str(tmp_path)]
    many = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=60)[0] for process in many}
    assert len(answers) == 1
    assert answers.pop().startswith("True ")
    assert len(list((tmp_path / "weights").glob("*.f32"))) == 1
    assert not list((tmp_path / "weights").glob("*.tmp"))


def rewrite(path, out, change):
    """Copy the tiny model through `change(writer)`, which may add to or replace metadata and tensors."""
    reader = gguf.GGUFReader(str(path))
    writer = gguf.GGUFWriter(out, "llama")
    extra = change(writer) or {}
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in writer.kv_data[0]:
            continue
        kind = field.types[0]
        writer.add_key_value(key, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if extra.get(tensor.name, True) is not None:
            writer.add_tensor(tensor.name, np.array(extra.get(tensor.name, tensor.data)))
    for name in extra.keys() - {tensor.name for tensor in reader.tensors}:
        writer.add_tensor(name, extra[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_an_unchanged_copy_is_accepted(tiny_path, tmp_path):
    rewrite(tiny_path, tmp_path / "copy.gguf", lambda _: None)
    copy, original = (load_weights(path, None, quiet) for path in (tmp_path / "copy.gguf", tiny_path))
    assert np.array_equal(copy.flat, original.flat)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "FT7021"),
        (lambda w: w.add_expert_count(8), "FT7021"),
        (lambda _: {"blk.0.attn_q.bias": np.zeros(64, np.float32)}, "FT7021"),
        (lambda w: w.add_rope_dimension_count(8), "FT7021"),
        (lambda _: {"blk.1.ffn_up.weight": None}, "FT7020"),
        (lambda _: {"blk.1.ffn_up.weight": np.zeros((3, 64), np.float32)}, "FT7020"),
    ],
    ids=["yarn", "experts", "bias", "partial-rope", "missing-tensor", "wrong-shape"],
)
def test_models_that_would_compute_wrongly_are_refused(tiny_path, tmp_path, change, code):
    rewrite(tiny_path, tmp_path / "changed.gguf", change)
    with pytest.raises(InvalidInputError) as caught:
        load_weights(tmp_path / "changed.gguf", tmp_path / "cache", quiet)
    assert [p.code for p in caught.value.problems] == [code]


@pytest.mark.parametrize("cut", [0, 3, 100, 5000, 200_000])
def test_cut_files_are_refused(tiny_path, tmp_path, cut):
    path = tmp_path / "cut.gguf"
    path.write_bytes(tiny_path.read_bytes()[:cut])
    with pytest.raises(InvalidInputError) as caught:
        load_weights(path, tmp_path, quiet)
    assert caught.value.problems[0].code == "FT7020"


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a model\n" * 1000)
    with pytest.raises(InvalidInputError, match="FT7020"):
        load_weights(path, None, quiet)
