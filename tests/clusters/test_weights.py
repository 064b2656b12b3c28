"""Weights on a site: the real programs, here; and a list that is pinned."""

import os
import random
import subprocess
import threading

import pytest

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.clusters.connections.protocol import Completed
from fabrictool.clusters.protocol import NewUnit
from fabrictool.clusters.weights import depot as depot_module
from fabrictool.clusters.weights.depot import ThisMachine, WeightsDepot, read_compared, set_name
from fabrictool.clusters.weights.listing import files_of, list_folder, parse_listing
from fabrictool.clusters.weights.readiness import not_ready
from fabrictool.domain.specs import AdapterSpec, AgentSpec


class CutOff:
    """Runs programs here until as many have run, then breaks, now and then after the program has."""

    def __init__(self, after, rng):
        self.left, self.rng = after, rng

    def run(self, argv, *, stdin=b"", timeout_s=60.0):
        self.left -= 1
        if self.left < 0:
            if stdin and self.rng.random() < 0.7:  # as much of it came through as would have
                ThisMachine().run(argv, stdin=stdin[: self.rng.randrange(len(stdin) + 1)])
            return Completed(255, b"", b"the connection broke")
        return ThisMachine().run(argv, stdin=stdin, timeout_s=timeout_s)


@pytest.fixture
def source(tmp_path):
    rng = random.Random()
    folder = tmp_path / "model"
    (folder / "parts").mkdir(parents=True)
    for name, size in (("config.json", 300), ("parts/one of two.safetensors", 70_000), ("empty.txt", 0)):
        (folder / name).write_bytes(rng.randbytes(size))
    (folder / ".hidden").write_text("not listed")
    return folder


@pytest.fixture
def depot(tmp_path, monkeypatch):
    monkeypatch.setattr(depot_module, "PART", 16_384)
    return WeightsDepot("here", str(tmp_path / "depot"), ThisMachine())


def listed(folder):
    return list_folder(folder, lambda _, __: None)


def staged(depot, folder):
    listing = listed(folder)
    depot.stage(listing, files_of(folder), lambda _, __: None)
    return set_name(listing.sha256)


def condition(depot, name, *, everything=False):
    (compared,) = depot.compare([name], everything=everything)
    return compared.condition, compared.files


def test_a_list_is_read_by_sha256sum_and_by_us(source):
    listing = listed(source)
    assert [file.name for file in listing.files] == ["config.json", "empty.txt", "parts/one of two.safetensors"]
    checked = subprocess.run(
        ["sha256sum", "-c"], input=listing.text, cwd=source, text=True, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert parse_listing(listing.text, "f").sha256 == listing.sha256
    assert listed(source / "config.json").files[0].name == "config.json"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x\n",
        f"{'0' * 64}  ../up\n",
        f"{'0' * 64}  /etc/passwd\n",
        f"{'0' * 64}  a\n{'0' * 64}  a\n",
        f"{'0' * 64}  .x\n",
    ],
)
def test_what_is_no_list_is_refused(text):
    with pytest.raises(InvalidInputError, match="FT5601"):
        parse_listing(text, "weights/m.sha256")


def test_a_name_that_a_list_cannot_hold_is_told(source):
    (source / "new\nline").write_text("x")
    with pytest.raises(FabrictoolError, match="FT5602"):
        files_of(source)


def test_what_is_staged_is_what_was_listed_and_a_second_time_sends_nothing(depot, source, tmp_path):
    name = staged(depot, source)
    assert condition(depot, name) == ("whole", ())
    for file, path in files_of(source).items():
        assert (tmp_path / "depot" / name / file).read_bytes() == path.read_bytes()
    listing = listed(source)
    assert depot.stage(listing, {}, lambda _, __: None) is False


def test_broken_off_anywhere_it_goes_on_and_arrives_whole(source, tmp_path, monkeypatch):
    monkeypatch.setattr(depot_module, "PART", 4_096)
    rng = random.Random()
    folder, listing, paths = tmp_path / "depot", listed(source), files_of(source)
    name, codes = set_name(listing.sha256), set()
    for _ in range(200):
        broken = WeightsDepot("here", str(folder), CutOff(rng.randrange(6), rng))
        try:
            broken.stage(listing, paths, lambda _, __: None)
        except FabrictoolError as error:
            codes.add(error.problems[0].code)
        else:
            break
        assert condition(WeightsDepot("here", str(folder), ThisMachine()), name)[0] in ("absent", "partial")
    assert codes <= {"FT5603"}
    assert condition(WeightsDepot("here", str(folder), ThisMachine()), name, everything=True) == ("whole", ())


def test_a_file_that_another_set_has_is_linked_and_not_sent(depot, source, tmp_path):
    first = staged(depot, source)
    (source / "config.json").write_text("another revision")
    second = staged(depot, source)
    large = "parts/one of two.safetensors"
    inodes = {(tmp_path / "depot" / name / large).stat().st_ino for name in (first, second)}
    assert len(inodes) == 1
    assert condition(depot, first, everything=True) == condition(depot, second, everything=True) == ("whole", ())


def test_damage_is_seen_before_anything_starts(depot, source, tmp_path):
    name = staged(depot, source)
    file = tmp_path / "depot" / name / "parts/one of two.safetensors"
    data = bytearray(file.read_bytes())
    data[35_000] ^= 1
    file.write_bytes(data)  # as long as before
    assert condition(depot, name) == ("damaged", ("parts/one of two.safetensors",))
    data[35_000] ^= 1
    file.write_bytes(data)
    assert condition(depot, name) == ("whole", ())
    file.unlink()
    assert condition(depot, name) == ("damaged", ("parts/one of two.safetensors",))


def test_what_is_damaged_is_mended_by_staging_it_again(depot, source, tmp_path):
    first = staged(depot, source)
    (source / "config.json").write_text("another revision")
    second = staged(depot, source)
    large = tmp_path / "depot" / second / "parts/one of two.safetensors"  # one file of both
    large.write_bytes(bytes(70_000))
    assert condition(depot, second)[0] == condition(depot, first)[0] == "damaged"
    assert staged(depot, source) == second
    assert condition(depot, second, everything=True) == ("whole", ())
    assert condition(depot, first)[0] == "damaged", "of which only this list is known"


def test_a_change_that_hides_its_time_is_seen(depot, source, tmp_path):
    name = staged(depot, source)
    file = tmp_path / "depot" / name / "config.json"
    before = file.stat()
    file.write_bytes(bytes(before.st_size))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert condition(depot, name) == ("damaged", ("config.json",))
    assert condition(depot, name)[0] == "damaged", "once known it stays so"


def test_what_rots_without_a_sign_is_found_by_hashing_all(depot, source, tmp_path):
    name = staged(depot, source)
    folder = tmp_path / "depot" / name
    (folder / "config.json").write_bytes(bytes(300))
    names = [line[66:] for line in (folder / ".LIST").read_text().splitlines()]
    signs = subprocess.run(["stat", "-c", "%s %.Z %i", *names], cwd=folder, capture_output=True, check=True).stdout
    (folder / ".seen").write_bytes(signs)  # as if the disk had changed it
    assert condition(depot, name) == ("whole", ())
    assert condition(depot, name, everything=True) == ("damaged", ("config.json",))
    assert condition(depot, name)[0] == "damaged"


def test_units_wait_for_their_weights(depot, source, tmp_path):
    name = set_name(listed(source).sha256)
    about = {"fabric": "f", "provider": "p", "site": "s", "cluster": "here", "partition": "n", "model": "m"}

    def unit(number, weights):
        spec = AgentSpec(**about, replica=f"m/{number}", source="file:///x", engine="vllm", weights=weights)
        return NewUnit(f"op-{number}", f"replica/m/{number}", spec, {})

    units = [unit(0, f"{tmp_path}/depot/{name}"), unit(1, f"{tmp_path}/depot/{name}")]
    refused = not_ready(units, "here", ThisMachine())
    assert {str(error).partition(":")[0] for error in refused.values()} == {"FT5605"}
    assert "are not staged in" in str(refused["op-1"])
    (tmp_path / "depot" / f"part-{name}").mkdir(parents=True)
    assert "in part only" in str(not_ready(units, "here", ThisMachine())["op-0"])
    staged(depot, source)
    assert not_ready(units, "here", ThisMachine()) == {}
    (tmp_path / "depot" / name / "empty.txt").write_text("no more")
    assert "empty.txt" in str(not_ready(units, "here", ThisMachine())["op-0"])


def test_a_unit_waits_for_its_adapters_too(tmp_path):
    absent = AdapterSpec(source=f"file://{tmp_path}/depot/sha256-1/x", rank=8, weights=f"{tmp_path}/depot/sha256-1")
    spec = AgentSpec(
        fabric="f", provider="p", site="s", cluster="here", partition="n", model="m", replica="m/0", engine="vllm",
        source="file:///x", adapters={"law": AdapterSpec(source="file:///law", rank=8), "sql": absent},
    )  # fmt: skip
    refused = not_ready([NewUnit("op", "replica/m/0", spec, {})], "here", ThisMachine())
    assert str(refused["op"]).startswith("FT5605")


def test_what_is_there_is_listed_with_who_uses_it_and_removed(depot, source, tmp_path):
    name = staged(depot, source)
    folder = tmp_path / "units" / "fab" / "op-1"
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(f'{{"weights":"{tmp_path}/depot/{name}"}}')
    (tmp_path / "depot" / f"part-sha256-{'0' * 64}").mkdir()
    sets, free = depot.look(str(tmp_path / "units"))
    assert [(s.name, s.complete, s.units) for s in sets] == [(name, True, 1), (f"sha256-{'0' * 64}", False, 0)]
    assert free > 0
    depot.remove([s.name for s in sets])
    assert depot.look(str(tmp_path / "units"))[0] == []


def test_files_that_changed_since_they_were_listed_are_refused(depot, source):
    listing = listed(source)
    (source / "config.json").write_bytes(bytes(300))
    with pytest.raises(FabrictoolError, match=r"FT5604.*config\.json"):
        depot.stage(listing, files_of(source), lambda _, __: None)
    assert condition(depot, set_name(listing.sha256))[0] == "partial"


def test_a_part_that_is_longer_than_its_file_is_sent_anew(depot, source, tmp_path):
    """As two that staged at once leave it: each had added the same octets."""
    name = set_name(listed(source).sha256)
    part = tmp_path / "depot" / f"part-{name}"
    part.mkdir(parents=True)
    (part / "config.json.part").write_bytes(2 * (source / "config.json").read_bytes())
    staged(depot, source)
    assert condition(depot, name, everything=True)[0] == "whole"


def test_what_is_left_of_a_damaged_file_is_removed_with_it(depot, source, tmp_path):
    name = set_name(listed(source).sha256)
    part = tmp_path / "depot" / f"part-{name}"
    part.mkdir(parents=True)
    (part / "config.json").write_bytes(b"damaged")
    (part / "config.json.part").write_bytes(b"longer than the file")
    with pytest.raises(FabrictoolError, match="FT5604"):
        staged(depot, source)
    assert not list(part.glob("config.json*"))
    staged(depot, source)


def test_two_that_stage_at_once_leave_a_whole_set_or_say_so(source, tmp_path):
    listing, paths = listed(source), files_of(source)
    failed = []

    def run():
        try:
            WeightsDepot("here", str(tmp_path / "depot"), ThisMachine()).stage(listing, paths, lambda _, __: None)
        except FabrictoolError as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Two that wrote into one file may have spoilt it after both had looked: who comes next says so, and removes it.
    run()
    staged(WeightsDepot("here", str(tmp_path / "depot"), ThisMachine()), source)
    assert {error.problems[0].code for error in failed} <= {"FT5603", "FT5604"}
    # Spoilt after all three and the fourth had looked, it has its name: then whoever compares before a start says so.
    depot, name = WeightsDepot("here", str(tmp_path / "depot"), ThisMachine()), set_name(listing.sha256)
    said = condition(depot, name, everything=False)[0]
    assert said == condition(depot, name, everything=True)[0]
    assert said in ("whole", "damaged")


def test_a_cut_answer_is_no_answer():
    with pytest.raises(FabrictoolError, match="FT5407"):
        read_compared("whole\tsha256-a\n", ["sha256-a", "sha256-b"])
