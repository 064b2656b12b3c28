"""What `doctor` says of a fabric, without one that runs."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fabrictool.blueprint import load
from fabrictool.domain.observed import ClusterFacts, Observed
from fabrictool.mesh.identity import CLOCK_SKEW_S
from fabrictool.state import checkup
from fabrictool.state.truststore import TrustStore

ROOT = Path(__file__).parents[2]


@pytest.fixture
def federation():
    return load(ROOT / "examples/slurm-federation/blueprint.yaml", environment={})


def test_an_engine_that_runs_on_clusters_is_not_looked_for_here(federation, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    (check,) = checkup._engines(federation)
    assert check.good
    assert "alps (container /capstor/images/vllm-0.11.sqsh), juno (venv /p/software/vllm-0.11)" in check.text
    assert "doctor alps" in check.hint


def test_models_of_clusters_are_not_looked_for_here_and_those_of_this_machine_are(federation, monkeypatch):
    assert all(check.good and "not on this machine" in check.text for check in checkup._models(federation))
    here = load(ROOT / "blueprints/local.yaml", environment={})
    asked = []
    monkeypatch.setattr(checkup, "check_intact", lambda source: asked.append(source) or "/there")
    assert [check.text for check in checkup._models(here)] == ["/there"]
    assert asked == [here.blueprint.models["smollm2-135m"].source]


@pytest.mark.parametrize(
    ("off", "good"), [(0.0, None), (CLOCK_SKEW_S / 2, True), (-CLOCK_SKEW_S * 2, False), (CLOCK_SKEW_S * 2, False)]
)
def test_clocks_are_held_against_what_certificates_allow(off, good):
    facts = ClusterFacts(cluster="a", known=True, now=1000.0 + off)
    checks = checkup._clocks(Observed(clusters={"a": facts}), 1000.0)
    assert [check.good for check in checks] == ([] if good is None else [good])


def test_a_certificate_of_tomorrow_is_a_matter_of_the_clock(tmp_path, monkeypatch):
    trust = TrustStore(tmp_path)
    trust.init("f", now=1_800_000_000.0)
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0 - 86400)
    loaded = SimpleNamespace(inventory=SimpleNamespace(providers={}))
    (check,) = checkup._trust(SimpleNamespace(trust=trust), loaded)
    assert not check.good
    assert "the clock of this machine is behind" in check.text
