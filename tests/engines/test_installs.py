"""Where an engine is, with real environments and a real `module`: found there, and started from there."""

import os
import shutil
import subprocess
import sys
import venv

import pytest

from fabrictool.domain.specs import EngineInstall
from fabrictool.engines.adapter import EngineLaunch, adapter

MODULES = "/usr/share/modules/init/sh"


def command(engine, **install):
    launch = EngineLaunch(
        engine=engine, model="/model", served_name="m", host="127.0.0.1", port=1, python=sys.executable,
        install=EngineInstall(**install),
    )  # fmt: skip
    return adapter(engine).command(launch)


def run(argv, unset=(), **environment):
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(argv, env=inherited | environment, capture_output=True, text=True, check=False)


@pytest.fixture
def environment(tmp_path):
    """A virtual environment without any package but those that `put` writes."""
    folder = tmp_path / "engine"
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))

    def put(package, text=""):
        (packages / package).mkdir()
        (packages / package / "__init__.py").write_text("")
        (packages / package / "__main__.py").write_text(text)
        return folder

    return put


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_package_is_looked_for_in_the_environment_that_has_it_and_in_no_other(environment, engine):
    folder = environment("other")
    asked = command(engine, venv=str(folder))
    assert run(asked.probe, asked.unset).returncode == 1
    environment(engine)
    assert run(asked.probe, asked.unset).returncode == 0
    assert asked.argv[0] == f"{folder}/bin/python"
    assert run(command(engine).probe).returncode == 1  # not in ours


def test_another_python_does_not_load_what_the_agents_brings_along(environment, tmp_path):
    """`bootstrap` starts agents with PYTHONPATH: to an engine of another Python its packages would be poison."""
    (tmp_path / "agents" / "vllm").mkdir(parents=True)
    asked = command("vllm", venv=str(environment("other")))
    agents = {"PYTHONPATH": str(tmp_path / "agents"), "PYTHONNOUSERSITE": "1"}
    inherited = {name: value for name, value in (os.environ | agents).items() if name not in asked.unset}
    assert subprocess.run(asked.probe, env=inherited, check=False).returncode == 1
    own = command("vllm")
    assert subprocess.run(own.probe, env=os.environ | agents, check=False).returncode == 0


def test_a_program_is_looked_for_at_its_path(tmp_path):
    server = tmp_path / "llama-server"
    asked = command("llama.cpp", path=str(server))
    assert run(asked.probe).returncode != 0
    server.write_text("#!/bin/sh\n")
    assert run(asked.probe).returncode != 0  # nobody may execute it
    server.chmod(0o755)
    assert run(asked.probe).returncode == 0
    assert run(command("llama.cpp").probe, PATH=str(tmp_path)).returncode == 0


@pytest.mark.skipif(not os.path.exists(MODULES), reason="Debian's environment-modules is not installed")  # noqa: PTH110
def test_a_module_is_loaded_before_the_engine_is_looked_for_and_started(environment, tmp_path):
    folder = environment("vllm")
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "vllm").write_text(f"#%Module1.0\nprepend-path PATH {folder}/bin\nsetenv OF_MODULE yes\n")
    asked = command("vllm", module="vllm")
    there = {"MODULEPATH": str(tmp_path / "modules")}
    assert run(asked.probe, asked.unset, **there).returncode == 0
    loads = asked.argv[: asked.argv.index("vllm") + 1]
    shown = run([*loads, "sh", "-c", "command -v python3; echo $OF_MODULE"], asked.unset, **there)
    assert shown.stdout.split() == [f"{folder}/bin/python3", "yes"]
    missing = command("vllm", module="no-such-module")
    refused = run(missing.probe, missing.unset, **there)
    assert refused.returncode == 66
    assert "no-such-module" in refused.stderr
    shutil.rmtree(folder / "lib")
    assert run(asked.probe, asked.unset, **there).returncode != 0
