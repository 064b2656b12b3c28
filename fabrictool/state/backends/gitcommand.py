"""The few Git commands that a store needs, on one branch of one repository. It never asks a person anything."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, NoReturn

from fabrictool.base.errors import FabrictoolError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SECONDS = 60.0
"""For one command; a repository of states is small."""
_OURS = frozenset({
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_CEILING_DIRECTORIES", "GIT_QUARANTINE_PATH",
})  # fmt: skip
"""Variables that name a repository: inside a hook or an alias they name another one."""
_CALM = ("core.hooksPath=/dev/null", "gc.autoDetach=false", "maintenance.autoDetach=false", "advice.pushNonFFCurrent=0")
_REFUSED = re.compile(
    r"authentication failed|could not read (username|password)|permission denied|access denied|host key verification"
    r"|not found|does not appear to be a git repository|does not exist|\b40[13]\b|not allowed|dubious ownership"
    r"|declined|protected branch|unsupported protocol|transport '.*' not allowed",
    re.IGNORECASE,
)
_MOVING = re.compile(r"cannot lock ref|failed to update ref|incorrect old value|already exists", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]*@")


class Git:
    """`cache` is a bare repository of ours that may vanish at any time."""

    def __init__(self, url: str, branch: str, cache: Path, environment: Mapping[str, str]) -> None:
        self.url = _CREDENTIALS.sub("", url)
        self._url = url
        self._branch = branch
        self._ref = f"refs/heads/{branch}"
        self._cache = cache
        self._given = environment
        who = f"{environment.get('USER') or os.getuid()}"
        names = {f"GIT_{role}_{what}" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        self._environment = {name: value for name, value in environment.items() if name not in _OURS}
        self._environment |= {name: f"{who}@{socket.gethostname()}" for name in names if "EMAIL" in name}
        self._environment |= {name: who for name in names if "NAME" in name}
        self._environment |= {"GIT_TERMINAL_PROMPT": "0", "SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}

    def elsewhere(self, cache: Path) -> Git:
        return Git(self._url, self._branch, cache, self._given)

    def fetch(self) -> str:
        """The branch's commit as the repository has it now, and its content here; "" when there is no such branch."""
        there = self._there()
        if there and self._here() != there:
            self._prepare()
            refs = f"+{self._ref}:{self._ref}"
            done = self._run("fetch", "--no-tags", "--quiet", "--", self._url, refs)
            if done.returncode:  # the repository answered just now, so it may be the cache: a kill -9 leaves locks
                shutil.rmtree(self._cache, ignore_errors=True)
                self._prepare()
                done = self._run("fetch", "--no-tags", "--quiet", "--", self._url, refs)
            if done.returncode:
                self._fail(done)
            there = self._here()
        return there

    def content(self, commit: str, name: str) -> bytes | None:
        """A file at the top of a commit; None when it has none of that name."""
        entry = self._local("ls-tree", "-z", commit, "--", name).decode()
        return self._local("cat-file", "blob", entry.split("\t")[0].split(" ")[2]) if entry else None

    def log(self, commit: str, name: str, most: int) -> list[tuple[str, float]]:
        """Commits that changed a file, youngest first, each with its wall second."""
        if not commit:
            return []
        lines = self._local("log", f"--max-count={most}", "--format=%H %ct", commit, "--", name).decode().splitlines()
        return [(line.split(" ")[0], float(line.split(" ")[1])) for line in lines]

    def commit(self, head: str, files: Mapping[str, bytes | None], message: str) -> str:
        """A child of `head` with some files written or, with None, taken away; the others stay."""
        self._prepare()
        entries = {}
        for line in self._local("ls-tree", "-z", head).decode(errors="surrogateescape").split("\0") if head else ():
            if line:
                entries[line.partition("\t")[2]] = line
        for name, data in files.items():
            entries.pop(name, None)
            if data is not None:
                blob = self._local("hash-object", "-w", "--stdin", stdin=data).decode().strip()
                entries[name] = f"100644 blob {blob}\t{name}"
        listing = "".join(f"{line}\0" for line in entries.values()).encode(errors="surrogateescape")
        tree = self._local("mktree", "-z", stdin=listing).decode().strip()
        parent = ("-p", head) if head else ()
        return self._local("commit-tree", tree, *parent, stdin=message.encode()).decode().strip()

    def push(self, head: str, commit: str) -> bool:
        """Make `commit` the branch, if `head` is; False when it no longer is.

        Raises
        ------
        FabrictoolError
            FT4202 no answer: whether it was pushed is not known. FT4203 refused.
        """
        done = self._run("push", "--porcelain", "--", self._url, f"{commit}:{self._ref}")
        if done.returncode:
            there = self._there()  # the answer may have been lost on the way back
            if there != commit:
                if there != head or _MOVING.search(_complaint(done)):
                    return False
                self._fail(done, refused=True)
        self._run("update-ref", self._ref, commit)
        return True

    def _there(self) -> str:
        done = self._run("ls-remote", "--", self._url, self._ref)
        if done.returncode:
            self._fail(done)
        for line in done.stdout.decode().splitlines():
            commit, _, ref = line.partition("\t")
            if ref == self._ref:
                return commit
        return ""

    def _here(self) -> str:
        if not (self._cache / "HEAD").exists():
            return ""
        done = self._run("rev-parse", "--verify", "--quiet", f"{self._ref}^{{commit}}")
        return done.stdout.decode().strip() if done.returncode == 0 else ""

    def _prepare(self) -> None:
        if not (self._cache / "HEAD").exists():
            self._local("init", "--quiet", "--bare", "--initial-branch=fabrictool", "--template=", str(self._cache))

    def _local(self, *arguments: str, stdin: bytes = b"") -> bytes:
        """Runs a command that needs only the cache; raises FT4206 when it fails."""
        done = self._run(*arguments, stdin=stdin)
        if done.returncode:
            message = f"git {arguments[0]} failed: {_complaint(done)}"
            hint = f"free some space, or remove {self._cache}: it is only a cache"
            raise FabrictoolError.of("FT4206", message, file=str(self._cache), hint=hint, transient=True)
        return done.stdout

    def _run(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        options = [word for setting in _CALM for word in ("-c", setting)]
        argv = ["git", f"--git-dir={self._cache}", *options, *arguments]
        # A session of its own: Ctrl-C does not cut a push, and ssh finds no terminal to ask on.
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise FabrictoolError.of("FT4204", "the state is in a Git repository, and there is no git here",
                                     hint="install git") from error  # fmt: skip
        with process:
            try:
                stdout, stderr = process.communicate(stdin, timeout=SECONDS)
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)
                message = f"git {arguments[0]} did not end within {SECONDS:.0f} s"
                raise self._silent(message) from error
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)

    def _fail(self, done: subprocess.CompletedProcess[bytes], *, refused: bool = False) -> NoReturn:
        why = _complaint(done)
        if refused or _REFUSED.search(why):
            hint = f"try it by hand: git ls-remote {self.url}; fabrictool brings no credentials of its own"
            message = f"the repository refused: {why}"
            raise FabrictoolError.of("FT4203", message, file=self._place, hint=hint)
        raise self._silent(f"the repository does not answer: {why}")

    def _silent(self, message: str) -> FabrictoolError:
        hint = f"try it by hand: git ls-remote {self.url}"
        return UnreachableError.of("FT4202", message, file=self._place, hint=hint, transient=True)

    @property
    def _place(self) -> str:
        return f"{self.url} {self._branch}"


def _complaint(done: subprocess.CompletedProcess[bytes]) -> str:
    """The lines that say why, on one line."""
    lines = [*done.stdout.decode(errors="replace").splitlines(), *done.stderr.decode(errors="replace").splitlines()]
    kept = [line.strip() for line in lines if line.strip() and not line.startswith(("To ", "Done", "hint:"))]
    return _CREDENTIALS.sub("", "; ".join(kept))[-400:] or f"exit {done.returncode}"
