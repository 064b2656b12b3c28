"""The agents' environment: what is packed, what its programs do in a real shell on this machine.

tests/bed/test_site.py has the same over real connections, and runs a replica from it.
"""

import base64
import gzip
import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import types
import zipfile

import pytest

from fabrictool.base.errors import FabrictoolError
from fabrictool.clusters.connections.protocol import Completed
from fabrictool.clusters.environment import bootstrap as whole
from fabrictool.clusters.environment import installed, locked, pack
from fabrictool.clusters.environment.requirements import Requirement, TargetPlatform, closure, holds, requirement, roots
from fabrictool.clusters.environment.site import EnvironmentFolder, Interpreter, read_look
from fabrictool.clusters.schedulers.shell import program
from fabrictool.domain.inventory import ClusterSpec
from fabrictool.mesh.attestation import BUILD_FILE

HERE = TargetPlatform((3, 11), "x86_64", (2, 36))


def code_of(work):
    with pytest.raises(FabrictoolError) as caught:
        work()
    return caught.value.problems[0].code


# -- requirements -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("numpy", Requirement("numpy")),
        ("numpy (>=1.17)", Requirement("numpy")),
        (
            "typing_extensions>=4.4; python_version < '3.13'",
            Requirement("typing-extensions", (), "python_version < '3.13'"),
        ),
        ("uvicorn[Standard, x_y]>=1,<2", Requirement("uvicorn", ("standard", "x-y"))),
        ("pkg @ https://example.org/x.whl ; extra == 'a'", Requirement("pkg", (), "extra == 'a'")),
    ],
)
def test_requirements(text, found):
    assert requirement(text) == found


@pytest.mark.parametrize(
    ("marker", "true"),
    [
        ("", True),
        ('python_version < "3.11"', False),
        ('python_version < "3.13"', True),
        ("python_version >= '3.9' and python_version < '3.12'", True),
        ("python_full_version < '3.11.1'", True),
        ("python_version ~= '3.8'", True),
        ("python_version == '3.11'", True),
        ("python_version != '3.11'", False),
        ("platform_python_implementation != 'PyPy'", True),
        ('sys_platform == "win32" or platform_machine == "x86_64"', True),
        ('(sys_platform == "win32" or os_name == "nt") and platform_machine == "x86_64"', False),
        ("extra == 'Gate_way'", True),
        ("platform_machine in 'x86_64 aarch64'", True),
        ("'linux' not in sys_platform", False),
        ("platform_machine not  in 'x86_64'", False),
    ],
)
def test_markers(marker, true):
    assert holds(marker, HERE.markers("gate-way")) is true


@pytest.mark.parametrize(
    "marker", ["colour == 'red'", "python_version <", "(os_name == 'nt'", "a b c", "os_name < 'x'", "%"]
)
def test_markers_that_are_none(marker):
    with pytest.raises(ValueError, match="not an environment marker"):
        holds(marker, HERE.markers())


def test_the_closure_follows_extras_and_the_targets_markers():
    world = {
        "a": ["B[fast]>1", "old; python_version<'3.9'", "arm; platform_machine=='aarch64'"],
        "b": ["c", "speed; extra == 'fast'", "doc; extra == 'docs'"],
        "speed": ["a"],
        "c": [],
    }
    assert closure([Requirement("a")], world.get, HERE) == {"a": True, "b": True, "c": True, "speed": True}
    other = closure([Requirement("a")], world.get, TargetPlatform((3, 11), "aarch64"))
    assert other == {"a": True, "arm": False, "b": True, "c": True, "speed": True}


def test_roots_are_the_extras_without_the_base_set():
    own = [
        "ortools",
        "aiohttp; extra == 'agent'",
        "fabrictool[agent]; extra == 'gateway'",
        "uvloop; extra == 'gateway'",
    ]
    assert [each.name for each in roots(own, ["gateway"], HERE)] == ["uvloop", "aiohttp"]
    assert [each.name for each in roots(own, ["agent"], HERE)] == ["aiohttp"]


def test_what_agents_need_stays_small():
    extras = roots(installed.requires("fabrictool"), ["agent", "reference", "gateway"], HERE)
    names = closure(extras, installed.requires, HERE)
    assert {"aiohttp", "cryptography", "msgspec", "numpy", "uvloop"} <= set(names)
    assert not {"ortools", "textual", "typer", "paramiko", "fabric", "asyncssh", "pydantic"} & set(names)


# -- packages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tag", "true"),
    [
        ("any", True),
        ("linux_x86_64", True),
        ("linux_aarch64", False),
        ("manylinux_2_36_x86_64", True),
        ("manylinux_2_37_x86_64", False),
        ("manylinux_2_17_aarch64", False),
        ("manylinux2014_x86_64", True),
        ("manylinux9999_x86_64", False),
        ("musllinux_1_2_x86_64", False),
        ("macosx_11_0_arm64", False),
    ],
)
def test_platform_tags(tag, true):
    assert installed.fits(tag, HERE) is true


@pytest.mark.parametrize(
    ("path", "true"),
    [
        ("numpy/__init__.py", True),
        ("_cffi_backend.cpython-311-x86_64-linux-gnu.so", True),
        ("numpy.libs/libx-1.so.3", True),
        ("a-1.dist-info/METADATA", True),
        ("a-1.dist-info/licenses/LICENSE", True),
        ("a-1.dist-info/RECORD", False),
        ("a-1.dist-info/direct_url.json", False),
        ("../../../bin/f2py", False),
        ("/etc/passwd", False),
        ("a/../../b", False),
        ("a/__pycache__/b.cpython-311.pyc", False),
        ("a/b.pyi", False),
        ("x.pth", False),
    ],
)
def test_what_belongs_into_an_environment(path, true):
    assert installed.wanted(path) is true


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of one module, installed as pip does it."""

    def digest(data):
        return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()

    name = f"ftprobe{os.getpid()}"
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_bytes(b"x = 1\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    rows = [
        (f"{name}/__init__.py", digest(b"x = 1\n")),
        (f"{info.name}/METADATA", digest((info / "METADATA").read_bytes())),
    ]
    (info / "RECORD").write_text("".join(f"{path},{found},9\n" for path, found in rows) + f"{info.name}/RECORD,,\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    installed._distribution.cache_clear()
    yield types.SimpleNamespace(name=name, module=tmp_path / name / "__init__.py", record=info / "RECORD")
    installed._distribution.cache_clear()


@pytest.mark.parametrize("finder", ["ours", "another"])
def test_files_are_compared_with_their_record(package, finder):
    if finder == "another":  # a later one, which passes over files that are missing, as Python 3.12's own does
        pytest.importorskip("importlib_metadata")
        installed._distribution.cache_clear()
    assert set(installed.files_of(package.name)) == {
        f"{package.name}/__init__.py",
        f"{package.name}-1.0.dist-info/METADATA",
    }
    package.module.write_bytes(b"x = 2\n")
    assert code_of(lambda: installed.files_of(package.name)) == "FT5503"
    package.module.unlink()
    assert code_of(lambda: installed.files_of(package.name)) == "FT5503"


def test_a_package_without_record_or_hash_is_not_packed(package):
    package.record.write_text(f"{package.name}/__init__.py,,\n")
    assert code_of(lambda: installed.files_of(package.name)) == "FT5503"
    package.record.unlink()
    installed._distribution.cache_clear()
    assert code_of(lambda: installed.files_of(package.name)) == "FT5503"
    assert code_of(lambda: installed.files_of("no-such-package")) == "FT5508"


def test_this_package_is_packed_with_its_data_and_without_caches():
    own = installed.files_of("fabrictool")
    assert {"fabrictool/agent/__main__.py", "fabrictool/clusters/shell/submit.sh"} <= set(own)
    assert any(path.startswith("fabrictool/catalog/data/") for path in own)
    assert not any("__pycache__" in path for path in own)


# -- releases -----------------------------------------------------------------------------------------------------


def test_the_same_content_is_the_same_release():
    python = pack.wrapper("/usr/bin/python3")
    one = pack.packed({"a/b.py": b"1", "c.py": b"2"}, python)
    two = pack.packed({"c.py": b"2", "a/b.py": b"1"}, python)
    assert (one.name, one.archive) == (two.name, two.archive)
    assert pack.packed({"a/b.py": b"1", "c.py": b"3"}, python).name != one.name
    assert pack.packed({"a/b.py": b"1", "c.py": b"2"}, pack.wrapper("/opt/python3")).name != one.name
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(one.archive))) as archive:
        modes = {entry.name: (entry.mode, entry.mtime, entry.uid) for entry in archive}
        manifest = archive.extractfile("MANIFEST").read()
    assert modes["bin/python"] == (0o555, 315532800, 0)
    assert set(modes) == {"bin/python", "lib/a/b.py", "lib/c.py", "MANIFEST"}
    assert hashlib.sha256(manifest).hexdigest()[:16] == one.name


@pytest.mark.parametrize("path", ["a/../b", "a\nb", "/etc/x", "a//b", "a/-b", "a\\b"])
def test_names_that_a_shell_could_misread_are_not_packed(path):
    assert code_of(lambda: pack.packed({path: b""}, b"")) == "FT5503"


# -- from the lock file -------------------------------------------------------------------------------------------

LOCK = """\
# Generated
aiohttp==3.1 \\
    --hash=sha256:{a} \\
    --hash=sha256:{b}
Some_Thing==1.0 ; sys_platform == 'linux' \\
    --hash=sha256:{a}
unhashed==1
""".format(a="a" * 64, b="b" * 64)


def test_the_lock_is_read_without_its_markers(tmp_path):
    (tmp_path / "l").write_text(LOCK)
    lock = locked.read_lock(tmp_path / "l")
    assert locked.subset(lock, ["some-thing"]) == f"Some_Thing==1.0 --hash=sha256:{'a' * 64}\n"
    assert locked.subset(lock, ["aiohttp"]).count("--hash") == 2
    assert code_of(lambda: locked.subset(lock, ["aiohttp", "unhashed"])) == "FT5506"
    assert code_of(lambda: locked.read_lock(None)) == "FT5506"
    assert code_of(lambda: locked.read_lock(tmp_path / "none")).startswith("FT43")


def test_the_shipped_lock_pins_all_that_agents_need():
    target = TargetPlatform((3, 13), "aarch64", (2, 34))
    extras = roots(installed.requires("fabrictool"), ["agent", "gateway", "reference"], target)
    names = closure(extras, installed.requires, target)
    assert locked.subset(locked.read_lock(locked.shipped_lock()), names).count("==") == len(names)


def wheel(files, name="thing"):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        rows = ""
        for path, data in files.items():
            archive.writestr(path, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows += f"{path},sha256={digest},{len(data)}\n"
        archive.writestr(f"{name}-1.0.dist-info/RECORD", rows + f"{name}-1.0.dist-info/RECORD,,\n")
    return out.getvalue()


THING = {
    "thing/__init__.py": b"y = 2\n",
    "thing-1.0.data/purelib/more.py": b"z = 3\n",
    "thing-1.0.data/scripts/run": b"#!/bin/sh\n",
    "thing-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
    "thing-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
}


def test_wheels_are_compared_with_their_record():
    found = locked.wheel_files("thing-1.0-py3-none-any.whl", wheel(THING))
    assert found["more.py"] == b"z = 3\n"
    assert set(found) == {"thing/__init__.py", "more.py", "thing-1.0.dist-info/METADATA", "thing-1.0.dist-info/WHEEL"}
    out = io.BytesIO(wheel(THING))
    with zipfile.ZipFile(out) as archive:
        record = archive.read("thing-1.0.dist-info/RECORD")
    with zipfile.ZipFile(out := io.BytesIO(), "w") as archive:
        archive.writestr("thing-1.0.dist-info/RECORD", record)
        for path in THING:
            archive.writestr(path, b"other")
    assert code_of(lambda: locked.wheel_files("thing.whl", out.getvalue())) == "FT5503"
    assert code_of(lambda: locked.wheel_files("thing.whl", b"no zip")) == "FT5503"


def test_pip_takes_only_what_has_the_locks_hash(tmp_path, monkeypatch):
    pytest.importorskip("pip")
    data = wheel(THING)
    (tmp_path / "thing-1.0-py3-none-any.whl").write_bytes(data)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    target = TargetPlatform((3, 12), "aarch64", (2, 28))
    right = f"thing==1.0 --hash=sha256:{hashlib.sha256(data).hexdigest()}\n"
    assert locked.wheels_for(target, right)["thing/__init__.py"] == b"y = 2\n"
    assert code_of(lambda: locked.wheels_for(target, f"thing==1.0 --hash=sha256:{'0' * 64}\n")) == "FT5507"
    assert code_of(lambda: locked.wheels_for(target, f"nothing==1.0 --hash=sha256:{'0' * 64}\n")) == "FT5507"
    assert code_of(lambda: locked.wheels_for(target, right, ("/nonexistent",))) == "FT5507"


def test_pip_is_asked_for_the_sites_platform():
    words = locked.pip_arguments(TargetPlatform((3, 12), "aarch64", (2, 19)), "r", "d")
    asked = [words[index + 1] for index, word in enumerate(words) if word == "--platform"]
    assert asked[:3] == ["manylinux_2_19_aarch64", "manylinux_2_18_aarch64", "manylinux_2_17_aarch64"]
    assert "manylinux2014_aarch64" in asked
    assert {"--require-hashes", "--no-deps"} <= set(words)
    assert words[words.index("--abi") + 1] == "cp312"


# -- the site's side, in a real shell -----------------------------------------------------------------------------


class Shell:
    """A connection to this machine without SSH: the programs run in its shell, with a home of their own."""

    def __init__(self, home):
        self.home = home
        self.commands = []
        self.path = os.environ["PATH"]
        self.break_after = None  # uploads stop after so many parts

    def run(self, argv, *, stdin=b"", timeout_s=60.0):
        self.commands.append(argv[3])
        if argv[3] == "ft-environment-part" and self.break_after is not None:
            if self.break_after == 0:
                raise FabrictoolError.of("FT5321", "the connection broke", transient=True)
            self.break_after -= 1
        done = subprocess.run(
            argv, input=stdin, capture_output=True, check=False, timeout=timeout_s, cwd=self.home,
            env={"HOME": str(self.home), "PATH": self.path},
        )  # fmt: skip
        return Completed(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


def release(text="1", python=sys.executable):
    """One that answers like the real one, in a moment."""
    agent = {
        "fabrictool/__init__.py": b"__version__ = '0'\n",
        "fabrictool/agent/__init__.py": b"",
        "content.py": text.encode(),
    }
    return pack.packed(agent | {"fabrictool/agent/__main__.py": b""}, pack.wrapper(python))


def placed(site, one, keep=3):
    return site.place(one, site.upload(one, lambda *_: None), keep, run=True)


def current(shell):
    return str((shell.home / ".fabrictool/env/current").readlink())


def test_a_release_is_placed_whole_and_again_without_a_change(shell, monkeypatch):
    monkeypatch.setattr("fabrictool.clusters.environment.site.PART", 100)
    site, one = EnvironmentFolder("a", ".fabrictool", shell), release()
    sent = []
    said, _ = site.place(one, site.upload(one, lambda part, size: sent.append((part, size))), 3, run=True)
    assert said.startswith("0 python 3.")
    assert sent[-1] == (len(one.archive), len(one.archive))
    assert len(sent) > 2
    assert current(shell) == f"rel/{one.name}"
    assert site.verify(one.name) == ("whole", [])
    assert site.look().current == one.name
    site.place(one, "", 3, run=True)
    assert current(shell) == f"rel/{one.name}"
    assert list((shell.home / ".fabrictool/env").glob(".in.*")) == []
    folder = shell.home / ".fabrictool/env/rel" / one.name
    assert oct(folder.stat().st_mode)[-3:] == "700"


def test_the_wrapper_reaches_its_packages_by_any_way(shell, tmp_path):
    site, one = EnvironmentFolder("a", ".fabrictool", shell), release()
    placed(site, one)
    elsewhere = tmp_path / "link to it"
    elsewhere.symlink_to(shell.home / ".fabrictool/env/current")
    for python in (shell.home / ".fabrictool/env/current/bin/python", elsewhere / "bin/python"):
        argv = [
            str(python),
            "-P",
            "-c",
            "import content, fabrictool.agent, os, sys; print(content.__file__, sys.flags.no_user_site)",
        ]
        done = subprocess.run(
            argv, capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path, env={"PATH": os.environ["PATH"]}
        )
        # The release itself, not the link: what runs keeps its files when another release is put to use.
        assert done.stdout.split() == [
            str(shell.home.resolve() / f".fabrictool/env/rel/{one.name}/lib/content.py"),
            "1",
        ]


def test_a_damaged_file_is_found_and_mended(shell):
    site, one = EnvironmentFolder("a", ".fabrictool", shell), release()
    placed(site, one)
    lib = shell.home / ".fabrictool/env/rel" / one.name / "lib"
    assert (lib / "content.py").stat().st_mode & 0o222 == 0
    (lib / "content.py").unlink()
    (lib / "content.py").write_text("evil")
    assert site.verify(one.name) == ("damaged", ["lib/content.py"])
    placed(site, one)
    assert site.verify(one.name) == ("whole", [])
    (lib.parent / "MANIFEST").unlink()
    (lib.parent / "MANIFEST").write_text("")
    assert site.verify(one.name) == ("damaged", ["MANIFEST"])
    assert site.verify("0" * 16) == ("absent", [])


def test_a_broken_upload_leaves_the_environment_that_was(shell, monkeypatch):
    monkeypatch.setattr("fabrictool.clusters.environment.site.PART", 100)
    site, old, new = EnvironmentFolder("a", ".fabrictool", shell), release(), release("2")
    placed(site, old)
    shell.break_after = 2
    assert code_of(lambda: placed(site, new)) == "FT5321"
    assert current(shell) == f"rel/{old.name}"
    assert site.verify(new.name) == ("absent", [])
    shell.break_after = None
    placed(site, new)
    assert current(shell) == f"rel/{new.name}"


def test_what_arrives_otherwise_is_not_unpacked(shell):
    site, one = EnvironmentFolder("a", ".fabrictool", shell), release()
    token = site.upload(one, lambda *_: None)
    with (shell.home / f".fabrictool/env/.in.{token}/archive").open("r+b") as file:
        file.write(b"x")
    assert code_of(lambda: site.place(one, token, 3, run=True)) == "FT5509"
    assert not (shell.home / ".fabrictool/env/current").is_symlink()
    assert list((shell.home / ".fabrictool/env").glob(".in.*")) == []
    other = pack.Release("0" * 16, one.contents)  # an archive with another content than its name
    assert code_of(lambda: placed(site, other)) == "FT5509"


def test_what_does_not_run_is_not_put_to_use(shell):
    site, old = EnvironmentFolder("a", ".fabrictool", shell), release()
    placed(site, old)
    assert code_of(lambda: placed(site, release("2", python="/nonexistent/python"))) == "FT5510"
    broken = pack.packed({"fabrictool/__init__.py": b"raise ImportError('no libx.so')"}, pack.wrapper(sys.executable))
    with pytest.raises(FabrictoolError, match=r"no libx\.so"):
        placed(site, broken)
    assert current(shell) == f"rel/{old.name}"


STEPS = program("environment-place").count("\n: step\n") + program("environment-place").count("\n  : step\n")


@pytest.mark.parametrize("step", range(STEPS))
def test_a_kill_at_every_step_leaves_an_environment_that_runs(shell, step):
    """The old one or the new one is in use, whole, and the next call ends what was begun."""
    site, old, new, run = EnvironmentFolder("a", ".fabrictool", shell), release(), release("2"), shell.run
    placed(site, old)
    token = site.upload(new, lambda *_: None)

    def killed(argv, *, stdin=b"", timeout_s=60.0):
        return run([*argv[:2], _with_kill(argv[2], step), *argv[3:]], stdin=stdin, timeout_s=timeout_s)

    shell.run = killed
    assert code_of(lambda: site.place(new, token, 3, run=True)) == "FT5509"
    shell.run = run
    used = current(shell).removeprefix("rel/")
    assert used == (new.name if step == STEPS - 1 else old.name)
    assert site.verify(used) == ("whole", [])
    if site.verify(new.name)[0] == "whole":
        site.place(new, "", 3, run=True)
    else:
        placed(site, new)
    assert current(shell) == f"rel/{new.name}"


def _with_kill(text, at):
    lines = text.split("\n")
    places = [index for index, line in enumerate(lines) if line.strip() == ": step"]
    if at < len(places):
        lines[places[at]] = "kill -KILL $$"
    return "\n".join(lines)


def test_old_releases_go_when_no_unit_needs_them(shell):
    site = EnvironmentFolder("a", ".fabrictool", shell)
    made = [release(str(number)) for number in range(6)]
    run = shell.home / ".fabrictool/units/fab/replica-m-0"
    run.mkdir(parents=True)
    (run / "job.sh").write_text(f"exec srun /x/.fabrictool/env/rel/{made[0].name}/bin/python -P -m fabrictool.agent\n")
    ahead = run / "next/1-replica-m-0-g2-00000000"
    ahead.mkdir(parents=True)
    (ahead / "job.sh").write_text(
        f"exec srun /x/.fabrictool/env/rel/{made[1].name}/bin/python -P -m fabrictool.agent\n"
    )
    for number, one in enumerate(made):
        placed(site, one, keep=2)
        os.utime(shell.home / ".fabrictool/env/rel" / one.name, (number, number))
    left = {path.name for path in (shell.home / ".fabrictool/env/rel").iterdir()}
    assert left == {made[0].name, made[1].name, made[4].name, made[5].name}
    assert site.verify(made[0].name)[0] == "whole"
    site.place(made[4], "", 2, run=True)  # back to one that is there
    assert current(shell) == f"rel/{made[4].name}"


def test_two_at_once_end_with_one_whole_release(shell):
    site, one = EnvironmentFolder("a", ".fabrictool", shell), release()
    tokens = [site.upload(one, lambda *_: None) for _ in range(2)]
    for token in tokens:
        site.place(one, token, 3, run=True)
    assert site.verify(one.name) == ("whole", [])
    assert list((shell.home / ".fabrictool/env").glob(".in.*")) == []


# -- the choice of a Python ---------------------------------------------------------------------------------------

LOOK = """noise
@base
/home/u/.fabrictool
@machine
x86_64
glibc 2.28
@space
1000
@pythons
3.9|CPython|cpython-39-x86_64-linux-gnu|x86_64|glibc-2.17|3.9.1|/usr/bin/python3
3.13|CPython|cpython-313t-x86_64-linux-gnu|x86_64|glibc-2.28|3.13.0|/opt/free/python3.13
3.12|CPython|cpython-312-x86_64-linux-gnu|x86_64|glibc-2.28|3.12.4|/opt/python3.12
3.12|CPython|cpython-312-x86_64-linux-gnu|x86_64|glibc-2.28|3.12.4|/opt/python3.12
3.11|PyPy|pypy311-pp73|x86_64||3.11.1|/opt/pypy
3.11|CPython|cpython-311-x86_64-linux-musl|x86_64||3.11.1|/opt/musl
the module x cannot be loaded
@current
rel/0123456789abcdef
@releases
0123456789abcdef
@end
"""


def test_a_look_is_read():
    look = read_look(LOOK, thing="cluster/a")
    assert (look.base, look.free, look.current) == ("/home/u/.fabrictool", 1024000, "0123456789abcdef")
    why = {each.path: each.why_not for each in look.interpreters}
    assert [path for path, reason in why.items() if not reason] == ["/opt/python3.12"]
    assert look.interpreters[0].target.glibc == (2, 28)
    assert whole.choose(look.interpreters, "a").path == "/opt/python3.12"
    assert code_of(lambda: read_look(LOOK.replace("@end", ""), thing="x")) == "FT5407"
    with pytest.raises(FabrictoolError, match=r"FT5504.*/usr/bin/python3 is 3\.9\.1: older than 3\.11"):
        whole.choose(look.interpreters[:1], "a")


def test_ours_in_version_is_chosen_before_a_later_one():
    same = Interpreter("/b", TargetPlatform(sys.version_info[:2], "x86_64"), "x")
    later = Interpreter("/a", TargetPlatform((3, 99), "x86_64"), "y")
    assert whole.choose((later, same), "a") is same


def test_a_look_at_this_machine(shell):
    look = EnvironmentFolder("a", "some/folder", shell).look([sys.executable, "no-such-python"])
    (found,) = look.interpreters
    assert found.target.version == sys.version_info[:2]
    assert found.target.machine == platform.machine()
    assert found.why_not == ""
    assert look.base == str(shell.home / "some/folder")
    assert look.free > 0
    assert look.current == ""


def described(**software):
    values = {
        "site": "s",
        "kind": "slurm",
        "partitions": {"p": {"device": "cpu", "nodes": 1}},
        "software": software,
    }
    return ClusterSpec.model_validate(values)


@pytest.mark.parametrize("way", [{"venv": "/v"}, {"container": "/c.sif"}])
def test_a_cluster_with_an_environment_of_its_own_is_left_alone(way, shell):
    assert code_of(lambda: whole.bootstrap("a", described(python=way), shell, whole.Wishes(), print)) == "FT5505"
    assert shell.commands == []


@pytest.mark.parametrize(
    ("kind", "engines", "extras"),
    [
        ("slurm", {}, ["agent", "reference"]),
        ("slurm", {"vllm": {}}, ["agent"]),
        ("slurm", {"vllm": {}, "reference": {}}, ["agent", "reference"]),
        ("ssh", {}, ["agent", "reference", "gateway"]),
    ],
)
def test_extras(kind, engines, extras):
    cluster = ClusterSpec.model_validate(
        {
            "site": "s",
            "kind": kind,
            "partitions": {"p": {"device": "cpu", "nodes": 1}},
            "software": {"engines": engines},
        }
    )
    assert whole.extras_of(cluster) == extras


def test_a_dry_run_sends_nothing(shell):
    said = []
    wishes = whole.Wishes(python=sys.executable, dry_run=True)
    found = whole.bootstrap("a", described(engines={"vllm": {}}), shell, wishes, said.append)
    assert (found.changed, found.uploaded, found.source) == (False, False, "installed")
    assert "MB would be sent; in use now: none" in said[-1]
    assert not (shell.home / ".fabrictool").exists()


def test_another_platform_needs_the_lock(shell, tmp_path):
    machine = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    wishes = whole.Wishes(python=sys.executable, machine=machine, lock=tmp_path / "none", dry_run=True)
    said = []
    assert code_of(
        lambda: whole.bootstrap("a", described(engines={"vllm": {}}), shell, wishes, said.append)
    ).startswith("FT43")
    assert any(f"the site is {machine}" in line for line in said)


def test_a_build_that_was_signed_after_the_installation_travels_with_it(tmp_path, monkeypatch):
    """It came later than RECORD, which is all that an ordinary installation knows of its files."""
    (tmp_path / "fabrictool").mkdir()
    module = tmp_path / "fabrictool/x.py"
    module.write_bytes(b"x = 1\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(module.read_bytes()).digest()).rstrip(b"=").decode()
    texts = {"RECORD": f"fabrictool/x.py,sha256={digest},6\n"}
    distribution = types.SimpleNamespace(read_text=texts.get, locate_file=lambda path: tmp_path / path)
    monkeypatch.setattr(installed, "_distribution", lambda _: distribution)
    assert installed.files_of(installed.OWN) == {"fabrictool/x.py": b"x = 1\n"}
    (tmp_path / "fabrictool" / BUILD_FILE).write_bytes(b"signed")
    assert installed.files_of(installed.OWN) == {"fabrictool/x.py": b"x = 1\n", f"fabrictool/{BUILD_FILE}": b"signed"}
    assert installed.files_of("another") == {"fabrictool/x.py": b"x = 1\n"}
