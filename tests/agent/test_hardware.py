"""What a node says of its own hardware, from what its programs and its kernel print."""

import subprocess

import pytest

from fabrictool.agent import hardware
from fabrictool.agent.hardware import (
    gpus_of,
    infiniband_of,
    memory_of,
    nics_of,
    nvlinks_of,
    read_hardware,
    told,
    visible,
)
from fabrictool.mesh.records import MAX_LINKS, NodeLink

GPUS = """\
0, GPU-aaaa-1, NVIDIA A100-SXM4-80GB, 81920, 80994, 550.54.15
1, GPU-bbbb-2, NVIDIA A100-SXM4-80GB, 81920, 1200, 550.54.15
2, GPU-cccc-3, [Unknown Error], [N/A], [N/A], 550.54.15
"""
NVLINKS = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa-1)
\t Link 0: 25 GB/s
\t Link 1: 25 GB/s
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bbbb-2)
\t Link 0: 25 GB/s
\t Link 1: <inactive>
"""
MIB = 2**20


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(hardware, "_said", lambda *command: NVLINKS if "nvlink" in command else GPUS)
    monkeypatch.setattr(hardware, "nics_of", lambda _: [NodeLink("nic", 100_000)])
    monkeypatch.setattr(hardware, "infiniband_of", lambda _: [])


@pytest.mark.usefixtures("gpus")
def test_gpus_are_named_as_in_the_catalogue_with_what_is_free_on_each():
    found = read_hardware({})
    assert (found.device, found.devices, found.memory) == ("a100-80g", 2, 2 * 81920 * MIB)
    assert (found.free, found.driver) == ((80994 * MIB, 1200 * MIB), "550.54.15")
    assert found.links == (NodeLink("nvlink", 200_000, 3), NodeLink("nic", 100_000))


@pytest.mark.usefixtures("gpus")
def test_a_job_tells_only_of_the_devices_that_it_was_given():
    for left in ("1", "GPU-bbbb"):
        found = read_hardware({"CUDA_VISIBLE_DEVICES": left})
        assert (found.devices, found.free, found.links[0].count) == (1, (1200 * MIB,), 1)
    assert read_hardware({"CUDA_VISIBLE_DEVICES": ""}).device == "cpu"
    slices = read_hardware({"CUDA_VISIBLE_DEVICES": "MIG-1234"})
    assert (slices.device, slices.devices, slices.free) == ("unknown", 0, ()), "what cannot be read is not said"
    assert visible(gpus_of(GPUS), "1,7") is None


def test_a_node_without_gpus_is_its_processors(monkeypatch):
    monkeypatch.setattr(hardware, "_said", lambda *_: "")
    found = read_hardware({})
    assert (found.device, found.devices) == ("cpu", 1)
    assert 0 < found.free[0] <= found.memory


def test_a_program_that_is_not_there_fails_or_hangs_says_nothing(monkeypatch):
    assert hardware._said("/nowhere/nvidia-smi") == hardware._said("false") == ""

    def hang(command, **_):
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", hang)
    assert hardware._said("nvidia-smi") == ""


def test_memory_is_what_could_be_had_now():
    assert memory_of("MemTotal:  100 kB\nMemFree:  1 kB\nMemAvailable:  60 kB\n") == (102_400, 61_440)
    assert memory_of("") == (0, 0)


def test_links_without_a_cable_or_without_a_device_are_not_told(tmp_path):
    for name, speed, real in (("eth0", "25000", True), ("eth1", "-1", True), ("veth", "10000", False)):
        (tmp_path / name / "device").mkdir(parents=True) if real else (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    assert nics_of(tmp_path) == [NodeLink("nic", 25_000)]
    assert nics_of(tmp_path / "nowhere") == []
    for number, state in (("1", "4: ACTIVE"), ("2", "1: DOWN")):
        port = tmp_path / "ib" / "mlx5_0" / "ports" / number
        port.mkdir(parents=True)
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
        (port / "state").write_text(state)
    assert infiniband_of(tmp_path / "ib") == [NodeLink("infiniband", 200_000)]
    assert nvlinks_of("nonsense", ["GPU-aaaa-1"]) == []


def test_a_record_has_room_for_the_fastest_kinds():
    many = [NodeLink("nic", speed) for speed in range(1, 30)]
    assert told([*many, NodeLink("nic", 29)]) == tuple(
        NodeLink("nic", speed, 2 if speed == 29 else 1) for speed in range(29, 29 - MAX_LINKS, -1)
    )
