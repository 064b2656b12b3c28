"""Compiles the gateway's data path into the wheel, where FABRICTOOL_COMPILE is 1; needs a C compiler.

The modules are ordinary Python and stay in the wheel: who has another Python, or another processor, runs them as they
are. None of them may hold a msgspec.Struct, which is compiled already, nor be a base of a class that is not here, whose
methods compiled callers would not see. What is made for each request is no dataclass with slots, and no generic one:
dataclasses make another class of it, with Python's attributes. Constants are `Final`, or they are looked up by name;
but no tuples of numbers, which mypyc of mypy 2.4 finds unset.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILED = (
    "gateway/accounts.py", "gateway/admission.py", "gateway/density.py", "gateway/directory.py", "gateway/exchange.py",
    "gateway/gateway.py",
    "gateway/heads.py", "gateway/http.py", "gateway/keys.py", "gateway/metrics.py", "gateway/modelrequest.py",
    "gateway/openai.py", "gateway/options.py", "gateway/outbox.py", "gateway/pairs.py", "gateway/patience.py",
    "gateway/rooms.py", "gateway/rules.py", "gateway/segments.py", "gateway/spool.py", "gateway/upstream.py",
    "gateway/usage.py", "gateway/waking.py",
    "routing/admission.py", "routing/affinity.py", "routing/allowances.py", "routing/candidates.py",
    "routing/dealing.py", "routing/ejection.py", "routing/policies.py", "routing/requirements.py",
    "routing/retry_budget.py",
    "workload/prefixes.py",
)  # fmt: skip
GROUP = "fabrictool.gateway.compiled"
"""One library: they call each other without Python's detours."""


class CompileHook(BuildHookInterface[Any]):
    """Hatchling's hook; it finds the class by itself."""

    PLUGIN_NAME = "custom"
    _folder = Path()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries to a wheel that is asked to have them."""
        if self.target_name != "wheel" or version != "standard" or os.environ.get("FABRICTOOL_COMPILE") != "1":
            return
        self._folder = Path(tempfile.mkdtemp())
        built = _compiled(Path(self.root), self._folder)
        build_data["force_include"].update({path: name for name, path in built.items()})
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Leave nothing behind."""
        if self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)


def _compiled(root: Path, folder: Path) -> dict[str, str]:
    """Name in the wheel → file; what is made on the way is in `folder`."""
    from mypyc.build import mypycify  # noqa: PLC0415 - for this wheel alone
    from setuptools import Distribution  # noqa: PLC0415
    from setuptools.command.build_ext import build_ext  # noqa: PLC0415

    modules = [f"fabrictool/{name}" for name in COMPILED]
    before, argv = Path.cwd(), sys.argv
    os.chdir(root)
    try:
        options = ["--config-file", "pyproject.toml", "--cache-dir", str(folder / "types"), *modules]
        sources = str(folder / "c")
        extensions = mypycify(options, opt_level="3", debug_level="0", separate=[(modules, GROUP)], target_dir=sources)
        for extension in extensions:  # what only they themselves call is called directly, or not at all
            extension.extra_compile_args += ["-fvisibility=hidden", "-fno-plt"]
        command = build_ext(Distribution({"name": "fabrictool", "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(folder / "lib"), str(folder / "objects")
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
        sys.argv = argv
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    libraries = (folder / "lib").rglob(f"*{suffix}")
    return {path.relative_to(folder / "lib").as_posix(): str(path) for path in libraries}
