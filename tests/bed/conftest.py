"""Tests on two real Slurm clusters: one testbed for the session, its logs beside a failure.

All tests in this folder bear the marker `bed`. Where a bed cannot run they are skipped, and the summary says why.
FTBED_REUSE=1 takes the bed that is up and leaves it up; FTBED_LOGS=FOLDER keeps all logs when a test failed.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.bed.federation import Federation
from tests.testbed.bed import Bed
from tests.testbed.requirements import missing
from tests.warm import WarmCommandLine

HERE = Path(__file__).parent
BED = pytest.StashKey[Bed]()
MISSING = pytest.StashKey[str]()
BEGUN = pytest.StashKey[float]()
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("bed")


@pytest.fixture(scope="session")
def bed(request):
    if reason := missing():
        request.config.stash[MISSING] = reason
        pytest.skip(f"the Slurm testbed did not run: {reason}")
    reuse = os.environ.get("FTBED_REUSE") == "1"
    bed = Bed.attach() if reuse else Bed.up(owned=True)
    request.config.stash[BED] = bed
    try:
        yield bed
    finally:
        folder = os.environ.get("FTBED_LOGS")
        if folder and request.config.stash.get(FAILED, False):
            bed.collect_logs(Path(folder))
        if not reuse:
            bed.down()
            assert bed.remains() == []


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[BEGUN] = time.time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed and (bed := item.config.stash.get(BED, None)):
        item.config.stash[FAILED] = True
        for name, tail in bed.log_tails(lines=12, since=item.stash.get(BEGUN, 0.0)).items():
            report.sections.append((f"testbed log {name}", tail))
    return report


def pytest_terminal_summary(terminalreporter, config):
    if reason := config.stash.get(MISSING, None):
        terminalreporter.section("the Slurm testbed did not run", yellow=True)
        terminalreporter.line(f"{reason}")
    elif bed := config.stash.get(BED, None):
        times = ", ".join(f"{step} {seconds:.1f} s" for step, seconds in bed.times.items())
        terminalreporter.line(f"Slurm testbed: {times or 'was up already'}")


@pytest.fixture(scope="session")
def shared_model():
    """A tiny random model where every user of every machine can read it."""
    from tests.tiny_model import write_tiny_model

    folder = Path(tempfile.mkdtemp(prefix="ft-model-", dir="/var/tmp"))
    folder.chmod(0o755)
    write_tiny_model(folder / "tiny.gguf", seed=7, context=512)
    (folder / "tiny.gguf").chmod(0o644)
    yield folder / "tiny.gguf"
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def warm_command_line(bed):
    command_line = WarmCommandLine(bed.operator_popen)
    yield command_line
    command_line.close()


@pytest.fixture(scope="module")
def make_federation(bed, shared_model, warm_command_line):
    """A module's fabrics end with the module: the next one finds the machines and their ports free."""
    federations = []

    def make(name):
        folder = Path(tempfile.mkdtemp(prefix=f"ft-{name}-"))
        federations.append(Federation(bed, folder, shared_model, name, warm_command_line))
        return federations[-1]

    yield make
    for federation in federations:
        federation.clean_up()
