"""Fixtures of the SSH adapters' tests."""

import os
from pathlib import Path

import pytest

from tests.clusters.connections.servers import SSHD, Yard


@pytest.fixture(scope="session")
def _sshd():
    if not Path(SSHD).exists():
        pytest.skip("sshd is not installed: the SSH adapters are NOT tested here (apt-get install openssh-server)")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)


@pytest.fixture
def yard(_sshd, tmp_path, monkeypatch):
    """No agent, no keys of the person who runs the tests."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    found = Yard(tmp_path)
    yield found
    found.stop()


HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """The testbed asks all three adapters; here the default one is asked always, the others by `make test-extended`."""
    for item in items:
        params = getattr(item, "callspec", None)
        words = {str(value) for value in params.params.values()} if params is not None else set()
        if HERE in item.path.parents and words & {"openssh", "fabric"}:
            item.add_marker("extended")
