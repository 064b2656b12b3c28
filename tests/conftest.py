"""Fabrics of real processes for tests that apply: a tiny random model, free ports, a state folder of their own."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from tests.answers import check_answer
from tests.ports import free_port
from tests.seeds import leave_out_long
from tests.warm import WarmCommandLine

ROOT = Path(__file__).parent.parent


def pytest_configure(config):
    """No example has a deadline. Programs that tests start hear Ctrl-C, also where the test run itself was started in
    the background.
    """
    leave_out_long(config.option.markexpr)
    # How long an example takes says something of the machine, whose other work nobody knows.
    hypothesis.settings.register_profile("patient", deadline=None)
    hypothesis.settings.load_profile("patient")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The collector of garbage does not walk, again and again, what stays until the end anyway: trees of the modules
    whose asserts are rewritten, and then the tests. That was a quarter of the time that it takes to collect them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


INVENTORY = """\
apiVersion: fabrictool/v1
kind: Inventory
providers: {alpha: {}, beta: {}}
sites: {a: {provider: alpha}, b: {provider: beta}}
clusters:
  one:
    site: a
    kind: local
    partitions: {cpu: {device: cpu, nodes: 1, memory_per_node: 4GiB}}
  two:
    site: b
    kind: local
    partitions: {cpu: {device: cpu, nodes: 1, memory_per_node: 4GiB}}
"""
BLUEPRINT = """\
apiVersion: fabrictool/v1
kind: Blueprint
fabric: t
inventory: inventory.yaml
models:
  tiny:
    source: file://%(model)s
    architecture: HuggingFaceTB/SmolLM2-135M-Instruct
    engine: reference
    variant: {precision: %(precision)s, context: %(context)s tok}
    demand: {rate: 1 req/s, input: 8 tok, output: 8 tok}
    replicas: {min: %(replicas)s, max: %(replicas)s}
    place: {spread: site}
trust: {groups: {all: {allow: [alpha, beta]}, only-alpha: {allow: [alpha]}}}
tenants:
  tester: {group: all, key: secret://env/FT_TEST_KEY}
  alphie: {group: only-alpha, key: secret://env/FT_ALPHA_KEY}
routing: {affinity: false}
gateway: {cluster: one, listen: 127.0.0.1:%(listen)s, mesh: 127.0.0.1:%(mesh)s}
"""
KEY = "ftk_a-planted-key-that-must-not-leak"
ALPHA_KEY = "ftk_a-key-of-those-who-trust-alpha-only"


class FabricBed:
    """A blueprint in a folder, and the command line on it."""

    def __init__(self, folder, model, command_line=None):
        self.folder, self._command_line = folder, command_line
        self.values = {
            "model": model,
            "precision": "bf16",
            "context": 256,
            "replicas": 2,
            "listen": free_port(),
            "mesh": free_port(),
        }
        self.environment = os.environ | {
            "FABRICTOOL_STATE_DIR": str(folder / "state"),
            "FABRICTOOL_CACHE_DIR": str(folder / "cache"),
            "FT_TEST_KEY": KEY,
            "FT_ALPHA_KEY": ALPHA_KEY,
            "NO_COLOR": "1",
        }
        self.write()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.values['listen']}"

    def write(self, inventory=INVENTORY, blueprint=BLUEPRINT, **changes):
        self.values |= changes
        (self.folder / "inventory.yaml").write_text(inventory)
        (self.folder / "blueprint.yaml").write_text(blueprint % self.values)

    def run(self, *arguments, code=0, timeout=120, **environment):
        done = self._command_line.run(arguments, cwd=self.folder, env=self.environment | environment, timeout=timeout)
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        check_answer(arguments, done.stdout)
        return done

    def start(self, *arguments, **environment):
        return subprocess.Popen(
            [sys.executable, "-m", "fabrictool.cli.main", *arguments],
            cwd=self.folder,
            env=self.environment | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def up(self):
        self.run("trust", "init")
        self.run("apply", "--yes")

    def clusters(self):
        from fabrictool.clusters.local import LocalCluster

        return {n: LocalCluster(n, self.folder / "state" / "t" / "clusters" / n) for n in ("one", "two")}

    def units(self):
        return {(u.address, u.state): u for c in self.clusters().values() for u in c.observe().units}

    def running(self):
        return sorted(address for address, state in self.units() if state == "running")

    def clean_up(self):
        for unit in self.units().values():
            if unit.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(unit.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    from tests.tiny_model import write_tiny_model

    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path, seed=7, context=512)
    return path


@pytest.fixture(scope="session")
def command_line():
    line = WarmCommandLine()
    yield line
    line.close()


@pytest.fixture
def fabric_bed(tmp_path, tiny_model, command_line):
    bed = FabricBed(tmp_path, tiny_model, command_line)
    yield bed
    bed.clean_up()
