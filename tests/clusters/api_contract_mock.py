"""An API contract mock: the part of Kubernetes' HTTP API that `kubectl` needs for our objects, with their state.

It discovers, creates, lists by labels, patches, deletes, and refuses as an API server does: 409 for a name that is
taken, 422 for what the schemas refuse, 404. It is no API server: nothing is admitted, scheduled or run. A test plays
controller and kubelet with `pod` and `gone`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import uuid
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate

RESOURCES = {
    "configmaps": ("v1", "ConfigMap", "cm"),
    "secrets": ("v1", "Secret", ""),
    "services": ("v1", "Service", "svc"),
    "pods": ("v1", "Pod", "po"),
    "jobs": ("batch/v1", "Job", ""),
    "deployments": ("apps/v1", "Deployment", "deploy"),
}
MARK = "fabrictool.io/operation"
BORN = "2027-01-15T08:00:00Z"
SCHEMA = "1.31"
_PATH = re.compile(r"/(?:api|apis/\w+)/v1/namespaces/([^/]+)/([^/]+)(?:/([^/]+))?(/log)?")
_SELECTOR = re.compile(r"([\w./-]+)(?:=| in )(?:\(([^)]*)\)|([^,]*))")
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


class ApiContractMock:
    """See the module's docstring; `objects` is (resource, name) → object, of one namespace."""

    def __init__(self, namespace="llm"):
        self.namespace = namespace
        self.objects = {}
        self.logs = {}
        self.requests = []
        """(method, path) of each one."""
        self.failures = {}
        """(method, resource) → (status, reason, message): refused before it is carried out."""
        self.lose_answers = Counter()
        """(method, resource) → how many are carried out, and answered by a closed connection."""
        self.lock = threading.Lock()

    def pod(self, operation, phase="Running", ready=True, **status):
        """What a controller and a kubelet would have made of an operation's Job or Deployment."""
        owner = next(
            o
            for (resource, _), o in self.objects.items()
            if resource in ("jobs", "deployments") and o["metadata"]["annotations"][MARK] == operation
        )
        template = owner["spec"]["template"]
        name = f"{owner['metadata']['name']}-x7k2p"
        found = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": template["metadata"] | {
                "name": name, "namespace": self.namespace, "uid": str(uuid.uuid4()), "creationTimestamp": BORN,
                "ownerReferences": [{"uid": owner["metadata"]["uid"], "kind": owner["kind"]}],
            },
            "spec": template["spec"],
            "status": {"phase": phase, "startTime": BORN} | status,
        }  # fmt: skip
        found["status"].setdefault("conditions", [{"type": "Ready", "status": "True" if ready else "False"}])
        self.objects["pods", name] = found
        return name

    def gone(self, name):
        """A kubelet says that a pod has ended."""
        del self.objects["pods", name]

    @contextlib.contextmanager
    def play(self):
        """Controller and kubelet, while it lasts: every owner gets a ready pod, and pods leave when told to."""
        over = threading.Event()

        def step():
            with self.lock:
                pods = [each for (kind, _), each in self.objects.items() if kind == "pods"]
                held = {each["metadata"]["annotations"][MARK] for each in pods}
                owners = [each for (kind, _), each in self.objects.items() if kind in ("jobs", "deployments")]
                for owner in owners:
                    operation = owner["metadata"]["annotations"][MARK]
                    if operation not in held:
                        self.pod(operation)
                for (kind, name), each in list(self.objects.items()):
                    if kind == "pods" and "deletionTimestamp" in each["metadata"]:
                        self.gone(name)

        def steps():
            while not over.wait(0.1):
                step()

        thread = threading.Thread(target=steps)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def names(self, resource):
        return sorted(name for each, name in self.objects if each == resource)

    # -- the API ----------------------------------------------------------------------------------------------

    def answer(self, method, url, body):
        """Status and document."""
        parts = urlsplit(url)
        self.requests.append((method, parts.path))
        if method == "GET" and (found := discovery(parts.path)) is not None:
            return 200, found
        match = _PATH.fullmatch(parts.path)
        if match is None or match[2] not in RESOURCES or match[1] != self.namespace:
            return refusal(404, "NotFound", "the server could not find the requested resource")
        resource, name = match[2], match[3]
        if (method, resource) in self.failures:
            return refusal(*self.failures[method, resource])
        with self.lock:
            return copy.deepcopy(self._carried_out(method, resource, name, match[4], parts.query, body))

    def _carried_out(self, method, resource, name, log, query, body):
        if log:
            return 200, self.logs.get(name, "")
        if name is None:
            return self._create(resource, body) if method == "POST" else self._list(resource, parse_qs(query))
        if (resource, name) not in self.objects:
            return refusal(404, "NotFound", f'{resource} "{name}" not found')
        if method == "PATCH":
            merge(self.objects[resource, name], body)
        if method == "DELETE":
            return self._delete(resource, name, body or {})
        return 200, self.objects[resource, name]

    def _create(self, resource, body):
        api, kind, _ = RESOURCES[resource]
        name = body["metadata"]["name"]
        if (body["apiVersion"], body["kind"]) != (api, kind):
            return refusal(400, "BadRequest", f"{body['kind']} is no {kind}")
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            return refusal(422, "Invalid", f'{kind} "{name}" is invalid: metadata.name')
        try:
            kubernetes_validate.validate(body, SCHEMA, strict=True)
        except kubernetes_validate.ValidationError as error:
            return refusal(422, "Invalid", f'{kind} "{name}" is invalid: {error.message}')
        if (resource, name) in self.objects:
            group = "" if "/" not in api else f".{api.partition('/')[0]}"
            return refusal(409, "AlreadyExists", f'{resource}{group} "{name}" already exists')
        made = {"namespace": self.namespace, "uid": str(uuid.uuid4()), "creationTimestamp": BORN}
        self.objects[resource, name] = body | {"metadata": body["metadata"] | made}
        return 201, self.objects[resource, name]

    def _list(self, resource, query):
        api, kind, _ = RESOURCES[resource]
        wanted = [term for text in query.get("labelSelector", ()) for term in _SELECTOR.findall(text)]
        found = [
            each
            for (held, _), each in sorted(self.objects.items())
            if held == resource
            and all(
                each["metadata"].get("labels", {}).get(key) in (many or one).split(",") for key, many, one in wanted
            )
        ]
        return 200, {"apiVersion": api, "kind": f"{kind}List", "metadata": {"resourceVersion": "1"}, "items": found}

    def _delete(self, resource, name, options):
        gone = self.objects[resource, name]
        if resource == "pods":  # it stays until its kubelet says that it is gone
            grace = options.get("gracePeriodSeconds")
            gone["metadata"] |= {"deletionTimestamp": BORN, "deletionGracePeriodSeconds": grace}
            return 200, gone
        del self.objects[resource, name]
        for (held, _), each in self.objects.items():
            owners = [owner["uid"] for owner in each["metadata"].get("ownerReferences", ())]
            if (
                held == "pods"
                and gone["metadata"]["uid"] in owners
                and options.get("propagationPolicy") == "Background"
            ):
                each["metadata"]["deletionTimestamp"] = BORN
        return 200, {"apiVersion": "v1", "kind": "Status", "status": "Success", "metadata": {}}

    # -- HTTP -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def serve(self):
        """The URL, while it lasts."""
        mock = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                status, document = mock.answer(self.command, self.path, body)
                match = _PATH.fullmatch(urlsplit(self.path).path)
                key = (self.command, match[2]) if match else None
                if mock.lose_answers[key] > 0:
                    mock.lose_answers[key] -= 1
                    self.close_connection = True
                    return
                text = isinstance(document, str)
                data = document.encode() if text else json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Type", "text/plain" if text else "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = _do  # noqa: N815

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def refusal(status, reason, message):
    document = {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure"}
    return status, document | {"reason": reason, "message": message, "code": status}


def merge(target, patch):
    """RFC 7396; for labels and annotations a strategic merge is the same."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def discovery(path):
    groups = sorted({api.partition("/")[0] for api, _, _ in RESOURCES.values() if "/" in api})
    if path == "/version":
        return {"major": "1", "minor": "31", "gitVersion": "v1.31.0-mock"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        versions = {group: {"groupVersion": f"{group}/v1", "version": "v1"} for group in groups}
        listed = [{"name": g, "versions": [v], "preferredVersion": v} for g, v in versions.items()]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
    for api in ("v1", *(f"{group}/v1" for group in groups)):
        if path == (f"/api/{api}" if api == "v1" else f"/apis/{api}"):
            listed = [
                {
                    "name": name,
                    "singularName": kind.lower(),
                    "namespaced": True,
                    "kind": kind,
                    "verbs": _VERBS,
                    "shortNames": [short] * bool(short),
                }
                for name, (version, kind, short) in RESOURCES.items()
                if version == api
            ]
            return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api, "resources": listed}
    return None
