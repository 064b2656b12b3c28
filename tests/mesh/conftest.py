"""A federation in a temporary folder, and nodes on loopback."""

import time

import pytest_asyncio

from fabrictool.base.clock import SystemClock
from fabrictool.mesh.identity import create_root, issue_provider, issue_session
from fabrictool.mesh.transport.node import MeshNode
from fabrictool.mesh.transport.tls import IdentityFiles


class RecordingListener:
    """Keeps what the mesh told it; serves streams through `accept` when set."""

    def __init__(self):
        self.records = []
        self.links = []
        self.loads = []
        self.ended = []
        self.tails = []
        self.accept = None

    def record_changed(self, record):
        self.records.append(record)

    def session_ended(self, reason):
        self.ended.append(reason)

    def tail_heard(self, session, service, text):
        self.tails.append((session, service, text))

    def link_changed(self, session, *, up, reason):
        self.links.append((session, up, reason))

    def load_reported(self, session, load):
        self.loads.append((session, load))

    def load(self, peer):
        return ()

    def stream_opened(self, stream, head, peer):
        return self.accept(stream, head, peer) if self.accept else None


class Federation:
    """A root and two providers."""

    def __init__(self, folder, fabric="test"):
        self.folder = folder
        self.nodes = []
        self.root = create_root(fabric, now=time.time())
        self.providers = {name: issue_provider(self.root, name, now=time.time()) for name in ("alpha", "beta")}

    def node(self, name, role="agent", provider="alpha", clock=None, trace=None, **options):
        files = IdentityFiles(self.folder / name)
        files.folder.mkdir(parents=True)
        files.write(issue_session(self.providers[provider], role, now=time.time(), **options), self.root)
        listener = RecordingListener()
        node = MeshNode(files, listener, clock or SystemClock(), hub=role == "gateway", trace=trace)
        self.nodes.append(node)
        return node, listener


@pytest_asyncio.fixture
async def federation(tmp_path):
    federation = Federation(tmp_path)
    yield federation
    for node in federation.nodes:  # of a test that failed, too: what it left open would fail another one
        await node.close()
