"""What `agent join` makes of its command line, its environment and its machine, before anything is asked of anybody."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from fabrictool.agent import join
from fabrictool.agent.admission import kind_of, mounted, private_folder, private_text
from fabrictool.agent.supervisor import Supervisor, only_model
from fabrictool.base.errors import FabrictoolError
from fabrictool.domain.specs import AgentTrust, BroughtEngine, HostPort, IdleOffer
from fabrictool.engines.adapter import EngineLaunch, adapter, engine_names
from fabrictool.mesh.identity import create_root, issue_provider
from fabrictool.mesh.jointoken import JoinToken, JoinTokenError, write_token

MOUNTS = """\
21 1 8:1 / / rw - ext4 /dev/sda1 rw
22 21 0:1 / /run rw - tmpfs tmpfs rw
23 21 0:2 / /home rw shared:5 - nfs4 server:/home rw
24 23 0:3 / /home/my\\040scratch rw - lustre mds:/s rw
"""


def code_of(call, *arguments):
    with pytest.raises(FabrictoolError) as refused:
        call(*arguments)
    return refused.value.problems[0].code


@pytest.fixture
def token(tmp_path):
    root = create_root("t", now=time.time())
    beta = issue_provider(root, "beta", now=time.time())
    made = JoinToken(
        id="0" * 32,
        fabric="t",
        root=root.chain[0],
        signer=beta.chain[0],
        issuer=HostPort("127.0.0.1", 1),
        gateways=(HostPort("g", 1),),
        uses=1,
        created=time.time() - 7200,
        expires=time.time() + 3600,
        models=("m",),
    )
    path = tmp_path / "token"
    path.touch(mode=0o600)

    def write(**changes):
        path.write_text(write_token(msgspec.structs.replace(made, **changes), beta))
        return path

    write()
    write.path, write.token = path, made
    return write


def test_the_command_line_is_taken_apart_at_the_dashes():
    options = join.read_options(["t", "--model", "m", "--", "serve", "--port", "{port}", "--", "--model", "x"])
    assert (options.token, options.model, options.url) == ("t", "m", "")
    assert options.command == ["serve", "--port", "{port}", "--", "--model", "x"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["t"], "FT6414"),
        (["t", "--url", "http://127.0.0.1:1", "--", "serve", "{port}"], "FT6414"),
        (["t", "--", "serve"], "FT6414"),
        (["t", "--idle", "--url", "http://127.0.0.1:1"], "FT6414"),
        (["t", "--idle", "--", "serve", "{port}"], "FT6414"),
        (["t", "--idle", "--model", "m"], "FT6414"),
        (["t", "--url", "http://127.0.0.1:1", "--engines", "vllm"], "FT6414"),
        (["t", "--url", "http://127.0.0.1:1", "--allow", "hf://*"], "FT6414"),
        (["t", "--nonsense"], "FT9001"),
        (["t", "--url", "x", "--bind", "4711", "--bind-file", "f"], "FT9001"),
        (["t", "--devices", "many", "--url", "x"], "FT9001"),
        ([], "FT9001"),
    ],
)
def test_a_wrong_command_line_is_said_to_be_one(words, code):
    assert code_of(join.read_options, words) == code


def test_a_server_that_is_offered_listens_on_loopback():
    assert join.port_of("http://127.0.0.1:8000") == join.port_of("http://localhost:8000/v1") == 8000
    for url in (
        "http://10.0.0.1:8000",
        "https://127.0.0.1:8000",
        "http://127.0.0.1",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:1/admin",
        "nonsense",
        "http://127.0.0.1.example.org:80",
    ):
        assert code_of(join.port_of, url) == "FT6414", url


def test_slurm_says_when_the_job_ends_and_what_is_shown():
    assert join.job_end({"SLURM_JOB_END_TIME": "1800000000"}) == 1_800_000_000
    assert [join.job_end({"SLURM_JOB_END_TIME": word}) for word in ("", "0", "never")] == [None] * 3
    array = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "10"}
    assert [join.shown_text(None, array), join.shown_text(None, {"SLURM_JOB_ID": "12"})] == ["10", "12"]
    assert [join.shown_text("words", array), join.shown_text(None, {})] == ["words", ""]


def test_a_node_is_called_as_slurm_calls_it(token):
    options = join.read_options(["t", "--model", "m", "--url", "http://127.0.0.1:8000"])
    slurm = {"SLURM_CLUSTER_NAME": "blue", "SLURMD_NODENAME": "n7"}
    spec = join.join_spec(options, token.token, "ab" * 16, slurm, "host")
    assert (spec.provider, spec.site, spec.cluster, spec.partition) == ("beta", "beta", "blue", "n7")
    assert (spec.replica, spec.brought.port, spec.brought.models) == ("joined/abababab", 8000, ("m",))
    assert spec.site_links is msgspec.UNSET
    bare = join.join_spec(options, token.token, "ab" * 16, {}, "host")
    alone = join.read_options(["t", "--no-site-links", "--url", "http://127.0.0.1:8000"])
    assert join.join_spec(alone, token.token, "ab" * 16, slurm, "host").site_links is False
    assert (bare.cluster, bare.partition) == ("host", "host")
    options.model = "other"
    assert code_of(join.join_spec, options, token.token, "", {}, "host") == "FT6407"


@pytest.mark.parametrize(
    ("changes", "words", "code", "ends_with"),
    [
        ({}, ["--provider", "alpha"], "FT6403", 65),
        ({}, ["--model", "other"], "FT6407", 65),
        ({"expires": time.time() - 3600}, [], "FT6404", 65),
        ({"created": time.time() + 3600}, [], "FT6404", 65),
        ({}, ["--site", "s" * 201], "FT9001", 64),
        ({"models": ()}, ["--model", "m" * 201], "FT9001", 64),
        ({}, ["--device", "d" * 201], "FT9001", 64),
        ({}, ["--devices", "4097"], "FT9001", 64),
        ({}, [word for name in ("cluster", "site", "device") for word in (f"--{name}", "🙂" * 199)], "FT9001", 64),
        ({}, ["--bind-file", "/nowhere/at/all"], "FT4302", 1),
    ],
)
def test_what_is_wrong_before_the_issuer_is_asked_costs_no_use(token, capsys, changes, words, code, ends_with):
    path = token(**changes)
    arguments = [str(path), "--url", "http://127.0.0.1:8000", "--folder", str(path.parent), *words]
    assert join.main(arguments, {}) == ends_with
    assert code in capsys.readouterr().err
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


def test_a_text_that_binds_comes_from_a_file_that_nobody_else_reads(token, monkeypatch, capsys):
    asked = []

    def refuse(*_, shown, **__):
        asked.append(shown)
        raise FabrictoolError.of("FT6406", "not this one")

    monkeypatch.setattr(join, "ask_issuer", refuse)
    path = token()
    secret = path.parent / "secret"
    secret.write_text("four seven eleven\n")
    arguments = [str(path), "--url", "http://127.0.0.1:8000", "--folder", str(path.parent), "--bind-file", str(secret)]
    secret.chmod(0o644)
    join.main(arguments, {})
    assert "FT6410" in capsys.readouterr().err
    secret.chmod(0o600)
    join.main(arguments, {"SLURM_JOB_ID": "7"})
    assert asked == ["four seven eleven"]


def test_a_provider_says_itself_whom_its_job_serves(token):
    def trust(*words):
        options = join.read_options(["t", "--url", "http://127.0.0.1:8000", *words])
        return join.join_spec(options, token.token, "", {}, "host").trust

    assert trust() == AgentTrust(groups=None, gateways=())
    told = trust("--groups", "staff, clinic", "--gateways-of", "alpha")
    assert told == AgentTrust(groups=("staff", "clinic"), gateways=("alpha",))


def test_an_idle_nodes_owner_says_what_may_be_assigned(token):
    def offer(*words):
        return join.join_spec(join.read_options(["t", "--idle", *words]), token.token, "", {}, "host").idle

    assert offer() == IdleOffer()
    told = offer("--engines", "vllm, sglang", "--allow", "hf://Qwen/*,file:///models/*")
    assert told == IdleOffer(engines=("vllm", "sglang"), sources=("hf://Qwen/*", "file:///models/*"))
    assert code_of(offer, "--engines", "external") == "FT6414"
    assert code_of(offer, "--engines", "nonsense") == "FT7001"


def test_an_issuer_that_is_not_there_leaves_no_folder_behind(token, capsys, monkeypatch):
    monkeypatch.setattr("fabrictool.agent.admission.PAUSE_S", 0.0)
    path = token()
    assert join.main([str(path), "--url", "http://127.0.0.1:8000", "--folder", str(path.parent)], {}) == 69
    assert "FT6411" in capsys.readouterr().err
    assert [entry.name for entry in path.parent.iterdir()] == ["token"]


def test_a_token_that_others_can_read_is_not_taken(token):
    path = token()
    path.chmod(0o640)
    assert code_of(private_text, str(path), "token") == "FT6410"
    assert code_of(private_text, str(path.parent / "nowhere"), "token") == "FT4302"
    with pytest.raises(JoinTokenError) as itself:
        private_text("ftjoin1." + "secret" * 300 + ".x", "token")
    assert itself.value.problems[0].code == "FT6418"
    assert "secret" not in str(itself.value), "nobody is told what it was"


def test_the_key_lies_where_no_other_machine_and_no_other_user_sees_it(tmp_path):
    kinds = mounted(MOUNTS)
    assert kinds == {"/": "ext4", "/run": "tmpfs", "/home": "nfs4", "/home/my scratch": "lustre"}
    places = ("/run/x", "/home/anna", "/home/my scratch/x", "/srv")
    assert [kind_of(Path(place), kinds) for place in places] == ["tmpfs", "nfs4", "lustre", "ext4"]
    folder = private_folder(str(tmp_path), {})
    assert folder.stat().st_mode & 0o077 == 0
    assert code_of(private_folder, str(tmp_path / "nowhere"), {}) == "FT6415"


def test_a_shared_place_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setattr("fabrictool.agent.admission.mounted", lambda _: {"/": "lustre"})
    assert code_of(private_folder, "", {"TMPDIR": str(tmp_path)}) == "FT6415"


def test_the_model_that_is_meant_is_the_only_one_that_is_allowed():
    assert only_model(["a"], ()) == "a"
    assert only_model(["a", "b"], ("b", "c")) == "b"
    assert only_model(["a", "b"], ()) == only_model([], ()) == only_model(["a"], ("b",)) == ""


def test_no_blueprint_can_name_an_engine_that_a_job_brings_along():
    engine = adapter(join.ENGINE)
    assert engine.capabilities.brought
    assert join.ENGINE not in engine_names()
    launch = EngineLaunch(
        engine="external", model="", served_name="", host="127.0.0.1", port=7, command=("x", "--port={port}", "{y}")
    )
    assert engine.command(launch).argv == ("x", "--port=7", "{y}")


@pytest.mark.asyncio
async def test_of_several_models_that_a_command_serves_the_one_that_the_token_allows_is_offered():
    program = (
        "import http.server, json, sys\n"
        "class Page(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        body = json.dumps({'data': [{'id': 'a'}, {'id': 'b'}]}).encode()\n"
        "        self.send_response(200)\n"
        "        self.send_header('content-type', 'application/json')\n"
        "        self.send_header('content-length', str(len(body)))\n"
        "        self.end_headers()\n"
        "        self.wfile.write(body)\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), Page).serve_forever()\n"
    )
    engine = adapter(join.ENGINE)

    def command(at, _):
        argv = (sys.executable, "-c", program, "{port}")
        return engine.command(
            EngineLaunch(engine="external", model="", served_name="", host="127.0.0.1", port=at.port, command=argv)
        )

    ready = asyncio.Event()
    supervisor = Supervisor(engine, command, "", ready.set, start_timeout_s=30, brought=BroughtEngine(models=("b",)))
    task = asyncio.create_task(supervisor.run())
    while supervisor.state != "ready":
        ready.clear()
        await ready.wait()
    assert supervisor.model == "b"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await supervisor.stop()


def test_what_runs_on_the_node_loads_nothing_of_the_command_line():
    script = "import sys, fabrictool.agent.join; print(*sys.modules)"
    out = subprocess.run(
        [sys.executable, "-P", "-c", script], env=os.environ, capture_output=True, check=True, text=True
    )
    heavy = {"typer", "click", "ortools", "textual", "paramiko", "asyncssh", "httpx2", "yaml", "numpy", "pydantic"}
    assert heavy & set(out.stdout.split()) == set()
