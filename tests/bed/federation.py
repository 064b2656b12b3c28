"""A fabric over the whole testbed: both Slurm clusters, the plain host, the ingress and the operator's own machine."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time

from tests.testbed.waiting import wait_until

KEY = "ftk_a-key-planted-on-the-testbed-that-must-not-leak"
CLIENT_PORT, MESH_PORT = 8011, 8443

LOGINS = {"a": "a-login", "b": "b-login", "host": "host", "ing": "ing"}
USERS = {"a": "alice", "b": "u7781", "host": "hostuser", "ing": "web"}

ASK = """
import json, sys, urllib.request
request = urllib.request.Request(
    "http://%s:%d/v1/chat/completions" % (sys.argv[1], int(sys.argv[2])),
    json.dumps({"model": sys.argv[3], "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}).encode(),
    {"authorization": "Bearer " + sys.argv[4], "content-type": "application/json"} | json.loads(sys.argv[5]),
)
try:
    with urllib.request.urlopen(request, timeout=60) as answer:
        print(answer.status, answer.headers.get("x-fabrictool-replica", ""), answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, "", error.read().decode())
"""


class Federation:
    """One blueprint in a folder of its own, applied from the operator's machine."""

    def __init__(self, bed, folder, model, name, command_line):
        self.bed, self.folder, self.model, self.name = bed, folder, model, name
        self._command_line = command_line
        self.gateway = bed.address("ing")
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "FABRICTOOL_STATE_DIR": str(folder / "state"),
            "FABRICTOOL_CACHE_DIR": str(folder / "cache"),
            "FT_TEST_KEY": KEY,
            "NO_COLOR": "1",
        }

    # -- files ----------------------------------------------------------------------------------------------------

    def cluster(self, name, partitions, *, kind="slurm", login=None, **more):
        login = login or {}
        described = {
            "site": name,
            "kind": kind,
            "login": [
                {
                    "host": self.bed.address(LOGINS[name]),
                    "user": USERS[name],
                    "identity": str(self.bed.key_file),
                    "host_keys": self.bed.host_keys(LOGINS[name]),
                }
                | login
            ],
            "poll": "1 s",
            "partitions": partitions,
            "software": {"python": {"venv": sys.prefix}},
        }
        return described | more

    def write(self, clusters, models, *, client_port=CLIENT_PORT, mesh_port=MESH_PORT, **more):
        """Files in JSON, which is YAML; `models` are merged into what all of them say."""
        sites = sorted({c["site"] for c in clusters.values()})
        inventory = {
            "apiVersion": "fabrictool/v1",
            "kind": "Inventory",
            "providers": {f"p-{site}": {} for site in sites},
            "sites": {site: {"provider": f"p-{site}"} for site in sites},
            "clusters": clusters,
        }
        base = {
            "source": f"file://{self.model}",
            "architecture": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "engine": "reference",
            "variant": {"precision": "bf16", "context": "256 tok"},
            "demand": {"rate": "0.01 req/s", "input": "8 tok", "output": "8 tok"},
        }
        blueprint = {
            "apiVersion": "fabrictool/v1",
            "kind": "Blueprint",
            "fabric": self.name,
            "inventory": "inventory.yaml",
            "models": {name: base | model for name, model in models.items()},
            "routing": {"affinity": False},  # the same prompt again and again must reach every replica
            "trust": {"groups": {"all": {"allow": [f"p-{site}" for site in sites]}}},
            "tenants": {"tester": {"group": "all", "key": "secret://env/FT_TEST_KEY"}},
            "gateway": {
                "cluster": "ing",
                "listen": f"{self.gateway}:{client_port}",
                "mesh": f"{self.gateway}:{mesh_port}",
            },
        } | more
        blueprint = {key: value for key, value in blueprint.items() if value is not None}
        (self.folder / "inventory.yaml").write_text(json.dumps(inventory, indent=1))
        (self.folder / "blueprint.yaml").write_text(json.dumps(blueprint, indent=1))
        self.client_port = client_port

    # -- commands -------------------------------------------------------------------------------------------------

    def command(self, *arguments):
        return [sys.executable, "-m", "fabrictool.cli.main", *arguments]

    def run(self, *arguments, code=0, timeout=180, kill_after=None, **environment):
        done = self._command_line.run(
            arguments, cwd=self.folder, env=self.environment | environment, timeout=timeout, kill_after=kill_after
        )
        assert "Traceback" not in done.stderr, done.stderr
        if code is not None:
            assert done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *arguments, **environment):
        return self.bed.operator_popen(
            self.command(*arguments), env=self.environment | environment, cwd=self.folder,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def up(self):
        self.run("trust", "init")
        return self.run("apply", "--yes")

    def status(self):
        return json.loads(self.run("status", "--json", code=None).stdout)

    def units(self):
        return {unit["address"]: unit for unit in self.status()["units"]}

    def plan(self):
        return json.loads(self.run("plan", "--json").stdout)

    # -- clients --------------------------------------------------------------------------------------------------

    def ask(self, model, machine="ing", **headers):
        """Status, replica and body of one completion, asked for on `machine`."""
        argv = [
            sys.executable, "-c", textwrap.dedent(ASK), self.gateway, str(self.client_port), model, KEY,
            json.dumps(headers),
        ]  # fmt: skip
        done = self.bed.machine(machine).run(argv, check=False)
        status, _, rest = done.stdout.partition(" ")
        replica, _, body = rest.partition(" ")
        return status, replica, body or done.stderr

    def wait(self, what, condition, within_s=60):
        return wait_until(what, condition, within_s=within_s, every_s=0.5)

    # -- ends -----------------------------------------------------------------------------------------------------

    def clean_up(self):
        if (self.folder / "state").exists():
            self.run("destroy", "--yes", code=None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def since(self):
        return time.time()
