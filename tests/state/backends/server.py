"""An HTTP server for tests that keeps one state and one lock, with the verbs of Terraform's ``http`` backend."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class StateTestServer:
    """`renews`: the holder may lock again, which replaces the lock info. `trouble` makes an answer by (method) → status
    or "hang up after doing it".
    """

    def __init__(self, *, renews=True):
        self.renews = renews
        self.token = "planted-state-token"
        self.state = None
        self.lock = None
        self.version = 0
        self.etags = True
        self.trouble = {}
        self.seen = []
        """(method, path with query, headers) of every request."""
        self.mutex = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def answer(self, method, query, headers, body):
        """Status, body, headers."""
        with self.mutex:
            if method == "GET":
                if self.state is None:
                    return 404, b"", {}
                return 200, self.state, {"ETag": f'"{self.version}"'} if self.etags else {}
            if method == "POST":
                given = parse_qs(query).get("ID", [None])[0]
                if (self.lock or {}).get("ID") != given:
                    return 409, json.dumps(self.lock or {}).encode(), {}
                expected = headers.get("If-Match")
                if expected not in (None, f'"{self.version}"'):
                    return 412, b"", {}
                self.state = body
                self.version += 1
                return 200, b"", {}
            info = json.loads(body)
            ours = self.lock is not None and self.lock["ID"] == info["ID"]
            if method == "LOCK":
                if self.lock is not None and not (self.renews and ours):
                    return 423, json.dumps(self.lock).encode(), {}
                self.lock = info
                return 200, b"", {}
            if self.lock is not None and not ours:
                return 409, json.dumps(self.lock).encode(), {}
            self.lock = None
            return 200, b"", {}

    def _handler(server):  # noqa: N805 - the handler below has the other self
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                server.seen.append((self.command, self.path, dict(self.headers)))
                if self.headers.get("Authorization") != f"Bearer {server.token}":
                    self.reply(401, b"", {})
                    return
                trouble = server.trouble.pop(self.command, None)
                if isinstance(trouble, int):
                    self.reply(trouble, b"", {"Location": "http://127.0.0.1:9/elsewhere"})
                    return
                found = server.answer(self.command, urlsplit(self.path).query, self.headers, body)
                if trouble is None:
                    self.reply(*found)
                else:
                    self.close_connection = True

            do_GET = do_POST = do_LOCK = do_UNLOCK = handle_any  # noqa: N815 - as the library calls them

            def reply(self, status, body, headers):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        return Handler
