"""The three places, each real: a folder, a bare Git repository, an HTTP server of the tests with locking verbs."""

import os
import subprocess

import pytest

from fabrictool.domain.statebackend import HttpState
from fabrictool.state.backends.git import GitStore
from fabrictool.state.backends.http import HttpStore
from fabrictool.state.backends.local import LocalStore
from tests.state.backends.server import StateTestServer

PLACES = ("local", "git", "http", "http-fixed")
"""``http-fixed``: a server that lets nobody lock twice, so its leases have no expiry, as GitLab's."""


class Shelf:
    """Opens the same place again and again, as other processes would."""

    def __init__(self, kind, folder):
        self.kind, self.folder = kind, folder
        self.opened = 0
        self.server = StateTestServer(renews=kind == "http") if kind.startswith("http") else None
        self.repository = folder / "repository.git"
        if kind == "git":
            subprocess.run(["git", "init", "-q", "--bare", self.repository], check=True)

    def open(self, **options):
        self.opened += 1
        if self.kind == "local":
            options.pop("ttl_s", None)
            return LocalStore(self.folder / "t", **options)
        if self.kind == "git":
            cache = self.folder / f"machine{self.opened}/state.git"
            return GitStore(str(self.repository), "states", cache, environment=os.environ, **options)
        return HttpStore(HttpState(address=f"{self.server.url}/state/t"), lambda: self.server.token, **options)

    def content(self):
        """The state as it lies there, read by other means."""
        if self.kind == "local":
            return (self.folder / "t/state.json").read_bytes()
        if self.kind == "git":
            return self.git("show", "states:state.json")
        return self.server.state

    def spoil(self, data):
        """Put something else there by other means."""
        if self.kind == "local":
            (self.folder / "t/state.json").write_bytes(data)
        elif self.kind == "git":
            self.commit({"state.json": data})
        else:
            self.server.state = data

    def git(self, *arguments, stdin=None):
        return subprocess.run(
            ["git", f"--git-dir={self.repository}", *arguments], input=stdin, capture_output=True, check=True
        ).stdout

    def commit(self, files):
        """On the branch, by Git's own plumbing."""
        entries = {}
        for line in self.git("ls-tree", "states").decode().splitlines():
            entries[line.split("\t")[1]] = line
        for name, data in files.items():
            blob = self.git("hash-object", "-w", "--stdin", stdin=data).decode().strip()
            entries[name] = f"100644 blob {blob}\t{name}"
        tree = self.git("mktree", stdin="".join(f"{line}\n" for line in entries.values()).encode()).decode().strip()
        who = ["-c", "user.name=tester", "-c", "user.email=tester@localhost"]
        commit = self.git(*who, "commit-tree", tree, "-p", "states", "-m", "by hand").decode().strip()
        self.git("update-ref", "refs/heads/states", commit)

    def close(self):
        if self.server is not None:
            self.server.close()


@pytest.fixture(params=PLACES)
def shelf(request, tmp_path):
    found = Shelf(request.param, tmp_path)
    yield found
    found.close()


@pytest.fixture
def shelf_of(tmp_path):
    """For tests of one kind."""
    opened = []

    def make(kind):
        opened.append(Shelf(kind, tmp_path))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
