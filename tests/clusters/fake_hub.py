"""A fake of a hub and of the host that its large files lie on, with the faults that real ones have."""

import contextlib
import hashlib
import json
import re
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
TOKEN = "hf_a-planted-token-that-must-not-leak"
REPOSITORY = "org/tiny"
LARGE = 10_000
"""Faults happen to files with more octets."""


class FakeHost:
    """Paths → what is served; every request is kept with its headers."""

    def __init__(self, host="127.0.0.1", port=0):
        self.pages, self.files, self.asked = {}, {}, []
        self.faults = []
        """Called with the handler, the path and the body of a file in turn, until one returns True: it has answered."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                fake.asked.append((self.path, dict(self.headers)))
                fake.answer(self)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def stop(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, handler):
        path = urllib.parse.unquote(urllib.parse.urlsplit(handler.path).path)
        if path in self.pages:
            return send(handler, 200, *self.pages[path])
        if path not in self.files:
            return send(handler, 404, b"no such thing")
        body = self.files[path]
        if any(fault(handler, path, body) for fault in list(self.faults)):
            return None
        return send_file(handler, body)

    def once(self, fault):
        """A fault that happens a single time."""

        def happen(handler, path, body):
            if fault(handler, path, body):
                self.faults.remove(happen)
                return True
            return False

        self.faults.append(happen)


class FakeHub(FakeHost):
    """One repository, whose large files are on another host."""

    def __init__(self, cdn, files, *, private=False, page=2, **where):
        super().__init__(**where)
        self._private, self.cdn = private, cdn
        api = f"/api/models/{REPOSITORY}"
        for revision in ("main", COMMIT):
            self.pages[f"{api}/revision/{revision}"] = (json.dumps({"sha": COMMIT}).encode(), {})
        entries = [{"type": "directory", "oid": "0", "size": 0, "path": "parts"}]
        self.redirected = {}
        for name, body in {**files, ".gitattributes": b"*.safetensors filter=lfs"}.items():
            entry = {"type": "file", "oid": hashlib.sha1(body, usedforsecurity=False).hexdigest(), "size": len(body)}
            path = f"/{REPOSITORY}/resolve/{COMMIT}/{name}"
            if name.endswith(".safetensors"):
                entry["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 134}
                self.redirected[path] = f"{cdn.url}/blob/{entry['lfs']['oid']}?X-Signature=planted"
                cdn.files[f"/blob/{entry['lfs']['oid']}"] = body
            else:
                self.files[path] = body
            entries.append({**entry, "path": name})
        self._tree, self._entries, self._page = f"{api}/tree/{COMMIT}", entries, page

    def answer(self, handler):
        if self._private and handler.headers.get("Authorization") != f"Bearer {TOKEN}":
            return send(handler, 401, b"who are you?")
        parts = urllib.parse.urlsplit(handler.path)
        path = urllib.parse.unquote(parts.path)
        if path in self.redirected:
            return send(handler, 302, b"", {"Location": self.redirected[path]})
        if path != self._tree:
            return super().answer(handler)
        begin = int(urllib.parse.parse_qs(parts.query).get("cursor", ["0"])[0])
        end = begin + self._page
        more = {"Link": f'<{self.url}{path}?recursive=true&cursor={end}>; rel="next"'}
        page = json.dumps(self._entries[begin:end]).encode()
        return send(handler, 200, page, more if end < len(self._entries) else {})


def send(handler, status, body, headers=None):
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)
    return True


def send_file(handler, body, *, ranges=True, cut=None):
    """All of it or the part that was asked for; `cut`: the connection ends after so many octets of the answer."""
    asked = re.fullmatch(r"bytes=([0-9]+)-", handler.headers.get("Range", ""))
    begin = int(asked.group(1)) if asked and ranges else 0
    if begin and begin >= len(body):
        return send(handler, 416, b"", {"Content-Range": f"bytes */{len(body)}"})
    part = body[begin:]
    handler.send_response(206 if asked and ranges else 200)
    handler.send_header("Content-Length", str(len(part)))
    if asked and ranges:
        handler.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
    handler.end_headers()
    handler.wfile.write(part if cut is None else part[:cut])
    if cut is not None:
        handler.close_connection = True
    return True


def cut_after(octets, *, ranges=True):
    return lambda handler, path, body: len(body) > LARGE and send_file(handler, body, ranges=ranges, cut=octets)


def says(status, headers=None):
    return lambda handler, _, body: len(body) > LARGE and send(handler, status, b"", headers)


def wrong_octet(handler, _, body):
    return len(body) > LARGE and send_file(handler, bytes([body[0] ^ 1]) + body[1:])


def without_ranges(handler, _, body):
    return len(body) > LARGE and send_file(handler, body, ranges=False)


def slowly(seconds, piece=1 << 20):
    """As much at a time, with a pause after each."""

    def happen(handler, _, body):
        asked = re.fullmatch(r"bytes=([0-9]+)-", handler.headers.get("Range", ""))
        begin = int(asked.group(1)) if asked else 0
        if len(body) <= LARGE or begin >= len(body):
            return False
        handler.send_response(206 if asked else 200)
        handler.send_header("Content-Length", str(len(body) - begin))
        if asked:
            handler.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):  # who asked was killed
            for at in range(begin, len(body), piece):
                handler.wfile.write(body[at : at + piece])
                time.sleep(seconds)
        return True

    return happen


def serve(host, port, pause, *paths):
    """As a program: a hub with files of this machine, on two ports, until it is killed."""
    cdn = FakeHost(host, int(port) + 1)
    cdn.faults.append(slowly(float(pause)))
    FakeHub(cdn, {Path(path).name: Path(path).read_bytes() for path in paths}, host=host, port=int(port))
    print("ready", flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
