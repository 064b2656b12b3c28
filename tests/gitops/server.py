"""An HTTP server for tests in the place of GitHub's and GitLab's comments: list, create, change; nothing else."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class CommentsTestServer:
    """`comments` is a list of (author, body)."""

    def __init__(self, kind, token):
        self.kind, self.token = kind, token
        self.me = "github-actions[bot]" if kind == "github" else "project_42_bot"
        self.comments = []
        self.asked = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def environment(self):
        if self.kind == "github":
            return {
                "GITHUB_API_URL": self.url, "GITHUB_REPOSITORY": "o/r", "GITHUB_TOKEN": self.token, "PULL_REQUEST": "7",
            }  # fmt: skip
        return {
            "CI_API_V4_URL": self.url, "CI_PROJECT_ID": "42", "CI_MERGE_REQUEST_IID": "7", "GITLAB_TOKEN": self.token,
        }  # fmt: skip

    def shown(self, index):
        author, body = self.comments[index]
        who = {"user": {"login": author}} if self.kind == "github" else {"author": {"username": author}}
        return {"id": index, "body": body, **who}

    def answer(self, method, path, query, body):
        self.asked.append(method)
        if self.kind == "github":
            every, one, change = "/repos/o/r/issues/7/comments", r"/repos/o/r/issues/comments/(\d+)", "PATCH"
        else:
            every = "/projects/42/merge_requests/7/notes"
            one, change = rf"{every}/(\d+)", "PUT"
            if (method, path) == ("GET", "/user"):
                return {"username": self.me}
        if (method, path) == ("GET", every):
            size, page = int(query["per_page"][0]), int(query["page"][0])
            return [self.shown(i) for i in range(len(self.comments))][(page - 1) * size : page * size]
        if (method, path) == ("POST", every):
            self.comments.append((self.me, body["body"]))
            return self.shown(-1)
        match = re.fullmatch(one, path)
        if match and method == change:
            self.comments[int(match[1])] = (self.comments[int(match[1])][0], body["body"])
            return {}
        return None

    def _handler(server):  # noqa: N805 - the handler below has the other self
        class Handler(BaseHTTPRequestHandler):
            def handle_any(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                given = self.headers.get("PRIVATE-TOKEN") or (self.headers.get("Authorization") or "")[7:]
                parts = urlsplit(self.path)
                found = server.answer(
                    self.command, parts.path, parse_qs(parts.query), json.loads(body) if body else None
                )
                good = given == server.token and found is not None
                data = json.dumps(found).encode() if good else b"{}"
                self.send_response(200 if good else 404)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_PUT = handle_any  # noqa: N815 - as the library calls them

            def log_message(self, *_):
                pass

        return Handler
