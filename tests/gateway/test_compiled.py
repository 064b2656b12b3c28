"""The compiled gateway, by the tests of the gateway that is not: `make test-extended`, for it takes minutes."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = (
    "test_accounts.py", "test_admission.py", "test_allowlist.py", "test_churn.py", "test_continuing.py",
    "test_failover.py", "test_groups.py", "test_handover.py", "test_hostile_engines.py", "test_http_corpus.py",
    "test_known_heads.py", "test_metrics.py",
    "test_moving.py", "test_pairs.py", "test_patience.py", "test_ranking.py", "test_raw_http.py", "test_requests.py",
    "test_recounting.py", "test_rooms.py", "test_run.py", "test_slow_readers.py", "test_spool.py",
    "test_usage.py", "conformance",
)  # fmt: skip
NEEDED = ("docs", "examples", "tests", "pyproject.toml")
TELL = "import fabrictool.gateway.exchange as e, fabrictool.gateway.http as h; print(e.__file__, h.__file__)"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder with the compiled package, and the tests beside it."""
    folder = tmp_path_factory.mktemp("compiled")
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder / "dist"]
    subprocess.run([*wheel, ROOT], env=os.environ | {"FABRICTOOL_COMPILE": "1"}, check=True)
    (path,) = (folder / "dist").iterdir()
    zipfile.ZipFile(path).extractall(folder)
    for name in NEEDED:
        source = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / name, ignore=ignored) if source.is_dir() else shutil.copy(source, folder)
    return folder


@pytest.mark.extended
@pytest.mark.timeout(1200)
def test_the_compiled_gateway_passes_the_gateways_tests(compiled):
    environment = os.environ | {"PYTHONPATH": str(compiled), "PYTHONDONTWRITEBYTECODE": "1"}
    told = subprocess.run(
        [sys.executable, "-P", "-c", TELL], env=environment, cwd=compiled, capture_output=True, text=True, check=True
    )
    assert all(path.startswith(str(compiled)) and path.endswith(".so") for path in told.stdout.split())
    chosen = "not interpreted and not long and not extended and not vllm"
    tests = [f"tests/gateway/{name}" for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen, *tests, "tests/routing"],
        env=environment, cwd=compiled, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 500
