"""The gateway beside others, on one core, in one run: requests and tokens per CPU second, added latency, memory.

    make bench ARGS=gateway

A mock engine in C (`gateway_rig/mock_engine.c`) answers on the other core, where wrk asks, too. Ours has everything on:
keys with limits and a budget, allowlists, ejection, admission, figures of usage, and its records kept in SQLite; it is
measured compiled (`make compiled`) and as it is. nginx, HAProxy, aiohttp and LiteLLM check one key and pass on; the
routers are asked for round robin over one worker and check nothing. Figures are CPU seconds of the gateway's own
processes, for the machine is shared, and medians of rounds in which each has its turn; who is not installed is left out
and named.
"""

import contextlib
import hashlib
import json
import math
import os
import platform
import queue
import re
import shutil
import signal
import socket
import socketserver
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PEERS = ROOT / "build" / "gateway-peers" / "bin"
COMPILED = ROOT / "build" / "compiled"
KEY = "key-of-the-benchmark-0123456789"
TOKENS, PACE_MS = 64, 10
SECONDS = 2
ROUNDS = 3
OPEN_STREAMS = 2000
CANCELS = 100
SLOW_MS = 3000
"""Between two tokens of the streams that are only held open."""
REST_S = 150
"""A purse that nobody used is given back after a minute, and the process that did so ends a minute later."""
GATEWAY_CORE, LOAD_CORE = "0", "1"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello, how are you today?"}], "max_tokens": TOKENS}
WRK = """wrk.method = "POST"
wrk.headers["content-type"] = "application/json"
wrk.headers["authorization"] = "Bearer {key}"
wrk.body = '{body}'
"""
NGINX = """worker_processes 1; daemon off; error_log /dev/null; pid {folder}/nginx.pid;
events {{ worker_connections 8192; }}
http {{ access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  map $http_authorization $known {{ default 0; "Bearer {key}" 1; }}
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 512; keepalive_requests 100000000; }}
  server {{ listen 127.0.0.1:{port}; keepalive_requests 100000000; if ($known = 0) {{ return 401; }}
    location / {{ proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; }} }} }}
"""
HAPROXY = """global
  nbthread 1
  maxconn 8192
defaults
  mode http
  timeout client 60s
  timeout server 60s
  timeout connect 5s
  option abortonclose
frontend clients
  bind 127.0.0.1:{port}
  http-request deny deny_status 401 unless {{ req.hdr(authorization) -m str "Bearer {key}" }}
  default_backend engines
backend engines
  http-reuse always
  server engine 127.0.0.1:{engine}
"""


LITELLM = """model_list:
  - {{model_name: m, litellm_params: {{model: openai/m, api_base: "http://127.0.0.1:{engine}/v1", api_key: none}}}}
general_settings: {{master_key: {key}}}
litellm_settings: {{telemetry: false}}
"""


def ours(folder, engine, port):
    (folder / "nodes.yaml").write_text(
        f"nodes: [{{url: 'http://127.0.0.1:{engine}', models: [m], provider: alpha}}]\ngroups: {{all: [alpha]}}\n"
    )
    keys = folder / "keys.json"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys.touch(0o600)
    limits = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "concurrency": 10**6}
    terms = {"models": ["m"], "limits": limits, "budget": {"tokens": 10**15, "per": "total"}}
    keys.write_text(json.dumps({"keys": [{"tenant": "t", "sha256": digest, "group": "all", "terms": terms}]}))
    main = [sys.executable, "-P", "-m", "fabrictool.cli.main", "gateway", "run"]
    records = ["--records", tempfile.mkdtemp(dir=folder)]
    return [*main, "--registry", folder / "nodes.yaml", "--keys", keys, "--listen", f"127.0.0.1:{port}", *records]


def configured(program, text, *flags):
    def command(folder, engine, port):
        path = folder / f"{program}.conf"
        path.write_text(text.format(folder=folder, key=KEY, engine=engine, port=port))
        return [program, *flags, path]

    return command


def router(program, *words):
    def command(_folder, engine, port):
        common = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{engine}"]
        return [PEERS / program, *words, *common, "--policy", "round_robin", "--prometheus-port", str(free_port())]

    return command


def litellm(folder, engine, port):
    path = folder / "litellm.yaml"
    path.write_text(LITELLM.format(engine=engine, key=KEY))
    return [PEERS / "litellm", "--config", path, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


def aiohttp_proxy(_folder, engine, port):
    return [sys.executable, HERE / "gateway_rig" / "aiohttp_proxy.py", str(engine), str(port), KEY]


def ours_compiled(folder, engine, port):
    if not COMPILED.is_dir():
        raise RuntimeError("not compiled; run `make compiled` first")
    return ["env", f"PYTHONPATH={COMPILED}", *ours(folder, engine, port)]


GATEWAYS = {
    "ours, compiled": ours_compiled,
    "ours": ours,
    "nginx": configured("nginx", NGINX, "-c"),
    "HAProxy": configured("haproxy", HAPROXY, "-f"),
    "vllm-router": router("vllm-router"),
    "sglang-router": router("sglang-router", "launch"),
    "smg": router("smg", "launch"),
    "aiohttp": aiohttp_proxy,
    "LiteLLM": litellm,
}


def pinned(core, command, **options):
    return subprocess.Popen(["taskset", "-c", core, *map(str, command)], **options)


def family(pid):
    """It and all that it started."""
    rest, every = [pid], []
    while rest:
        every.append(rest.pop())
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{every[-1]}/task").iterdir():
                rest += map(int, (task / "children").read_text().split())
    return every


def cpu_s(pid):
    ticks = 0
    for member in family(pid):
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mb(pid):
    total = 0
    for member in family(pid):
        with contextlib.suppress(OSError):
            total += int(re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{member}/smaps_rollup").read_text(), re.MULTILINE)[1])
    return total / 1024


@contextlib.contextmanager
def running(core, command, port):
    process = pinned(core, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=offline())
    try:
        deadline = time.monotonic() + 30
        while not answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{Path(str(command[0])).name} does not answer")
            time.sleep(0.1)
        yield process.pid
    finally:
        members = family(process.pid)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        process.wait()


def offline():
    return os.environ | {"TOKIO_WORKER_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def answers(port):
    """Whether a request comes through: a router listens before it knows its worker."""
    body = json.dumps(BODY)
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as made:
            made.sendall(request.encode())
            return made.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def load(folder, port, *, streams, clients):
    """What wrk saw: answers, p50 and p99 in ms, and how many were no 200."""
    script = folder / f"{'stream' if streams else 'json'}.lua"
    script.write_text(WRK.format(key=KEY, body=json.dumps(BODY | ({"stream": True} if streams else {}))))
    command = ["wrk", "-t1", f"-c{clients}", f"-d{SECONDS}", "--latency", "--timeout", "10", "-s", script]
    text = pinned(LOAD_CORE, [*command, f"http://127.0.0.1:{port}/v1/chat/completions"], stdout=subprocess.PIPE)
    told = text.communicate()[0].decode()
    wrong = re.search(r"Non-2xx or 3xx responses: (\d+)", told)
    return {
        "answers": int(re.search(r"(\d+) requests in", told)[1]),
        "p50_ms": in_ms(re.search(r"50%\s+(\S+)", told)[1]),
        "p99_ms": in_ms(re.search(r"99%\s+(\S+)", told)[1]),
        "wrong": int(wrong[1]) if wrong else 0,
    }


def in_ms(text):
    time_of = re.match(r"([\d.]+)(us|ms|s|m)", text)
    if time_of is None:
        return math.nan  # nothing was answered
    number, unit = time_of.groups()
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}[unit]


def measured(folder, pid, port, **how):
    before = cpu_s(pid) if pid else 0.0
    row = load(folder, port, **how)
    return row | {"cpu_s": cpu_s(pid) - before if pid else 0.0}


def one_gateway(folder, name, engines):
    """The row of one in one round; `engines`: ports of the mocks without a pace, with one, and hardly moving."""
    burst, paced, slow_engine = engines
    row = {"name": name}
    port = free_port()
    with running(GATEWAY_CORE, GATEWAYS[name](folder, burst, port), port) as pid:
        row["idle_mb"] = memory_mb(pid)
        load(folder, port, streams=False, clients=16)
        single = measured(folder, pid, port, streams=False, clients=1)
        many = measured(folder, pid, port, streams=False, clients=64)
        streams = measured(folder, pid, port, streams=True, clients=64)
    port = free_port()
    with running(GATEWAY_CORE, GATEWAYS[name](folder, paced, port), port) as pid:
        slow = measured(folder, pid, port, streams=True, clients=256)
    port = free_port()
    with running(GATEWAY_CORE, GATEWAYS[name](folder, slow_engine, port), port) as pid:
        row["stream_kb"] = octets_of_a_stream(pid, port) / 1000 if name != "LiteLLM" else math.nan
    row["cancel_ms"] = cancelled(folder, name)
    row["wrong"] = single["wrong"] + many["wrong"] + streams["wrong"] + slow["wrong"]
    row["p50_1_ms"], row["p50_ms"], row["p99_ms"] = single["p50_ms"], many["p50_ms"], many["p99_ms"]
    row["requests_cpu_s"] = many["answers"] / many["cpu_s"]
    row["burst_ktok_cpu_s"] = streams["answers"] * TOKENS / streams["cpu_s"] / 1000
    row["paced_us_token"] = slow["cpu_s"] / (slow["answers"] * TOKENS) * 1e6 if slow["answers"] else math.nan
    return row


def resting_mb(folder, engine):
    """Of each of ours the memory after minutes without requests, when the process that writes records has ended."""
    with contextlib.ExitStack() as stack:
        pids = {}
        for name in ("ours, compiled", "ours"):
            port = free_port()
            with contextlib.suppress(RuntimeError):
                command = GATEWAYS[name](folder, engine, port)
                pids[name] = stack.enter_context(running(GATEWAY_CORE, command, port))
        time.sleep(REST_S)
        return {name: memory_mb(pid) for name, pid in pids.items()}


def asked_for_a_stream(port):
    """A client's socket, its request sent."""
    body = json.dumps(BODY | {"stream": True})
    client = socket.create_connection(("127.0.0.1", port), timeout=10)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    client.sendall(f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
    return client


def octets_of_a_stream(pid, port):
    """Of the gateway's memory, while streams are open that hardly move."""
    before = memory_mb(pid)
    clients = []
    try:
        for _ in range(OPEN_STREAMS):
            clients.append(asked_for_a_stream(port))
            if len(clients) % 100 == 0:
                time.sleep(0.05)  # as many as a listener's queue holds
        time.sleep(SLOW_MS / 1000 + 1)
        return (memory_mb(pid) - before) * 1024 * 1024 / OPEN_STREAMS
    finally:
        for client in clients:
            client.close()


class Engine(socketserver.ThreadingTCPServer):
    """Begins streams that never end, and notes when their connections do."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        self.ended = queue.SimpleQueue()
        super().__init__(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Answer(socketserver.StreamRequestHandler):
    def handle(self):
        with contextlib.suppress(OSError):
            while line := self.rfile.readline():
                length, chunked = 0, False
                while (header := self.rfile.readline().strip().lower()) not in (b"", b"\r\n"):
                    length = int(header.partition(b":")[2]) if header.startswith(b"content-length:") else length
                    chunked |= header.startswith(b"transfer-encoding:")
                body = self.rfile.read(length)
                while chunked and (size := int(self.rfile.readline() or b"0", 16)):
                    body += self.rfile.read(size + 2)
                self.answer(line, body)

    def answer(self, line, body):
        if line.startswith(b"GET"):
            self.whole({"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "x"}]})
        elif not re.search(rb'"stream":\s*true', body):
            choice = {"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}
            self.whole({"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})
        else:
            choice = {"index": 0, "delta": {"role": "assistant", "content": "word"}, "finish_reason": None}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            event = f"data: {json.dumps(chunk)}\n\n"
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            self.wfile.write(f"{len(event):x}\r\n{event}\r\n".encode())
            with contextlib.suppress(OSError):
                self.connection.recv(1)
            self.server.ended.put(time.monotonic())
            raise ConnectionResetError

    def whole(self, value):
        text = json.dumps(value)
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        self.wfile.write((head + text).encode())


def cancelled(folder, name):
    """The 99th percentile of the ms from a client's close in mid-stream to the engine's hearing of it."""
    port, waits = free_port(), []
    with Engine() as engine, running(GATEWAY_CORE, GATEWAYS[name](folder, engine.server_address[1], port), port):
        for _ in range(CANCELS):
            with asked_for_a_stream(port) as client:
                while b"word" not in client.recv(65536):
                    pass
            closed = time.monotonic()
            try:
                waits.append((engine.ended.get(timeout=5) - closed) * 1e3)
            except queue.Empty:
                return math.inf  # it reaches the engine with the next token, or never
        engine.shutdown()
    return sorted(waits)[int(0.99 * len(waits))]


def table(rows):
    columns = (
        ("gateway", "name", ""), ("req/CPU s", "requests_cpu_s", ",.0f"), ("added p50 ms", "added_ms", ".3f"),
        ("p50 of 64", "p50_ms", ".2f"), ("p99 of 64", "p99_ms", ".2f"), ("ktok/CPU s", "burst_ktok_cpu_s", ".1f"),
        ("us/paced tok", "paced_us_token", ".1f"), ("kB/stream", "stream_kb", ".1f"), ("idle MB", "idle_mb", ".1f"),
        ("cancel p99 ms", "cancel_ms", ".1f"), ("no 200", "wrong", ""),
    )  # fmt: skip
    print(" ".join(f"{head:>14}" for head, _, _ in columns))
    for row in rows:
        print(" ".join(f"{format(row[field], how):>14}" for _, field, how in columns), flush=True)


def median_row(rounds):
    """Of each figure the median of what was measured; of wrong answers the sum."""
    row = {"name": rounds[0]["name"]}
    for field in rounds[0].keys() - {"name"}:
        values = [one[field] for one in rounds if not math.isnan(one[field])]
        row[field] = statistics.median(values) if values else math.nan
    return row | {"wrong": sum(one["wrong"] for one in rounds)}


def verdicts(rows):
    by_name = {row["name"]: row for row in rows}
    for name in OURS:
        if name in by_name:
            print(f"{name}:")
            verdict(by_name[name], by_name)


def verdict(mine, by_name):
    for name, field, must, aim in (
        ("vllm-router", "requests_cpu_s", 2, 4), ("sglang-router", "requests_cpu_s", 2, 4),
        ("smg", "requests_cpu_s", 2, 4), ("nginx", "requests_cpu_s", 0.4, 0.6), ("LiteLLM", "requests_cpu_s", 100, 200),
    ):  # fmt: skip
        if name in by_name:
            ratio = mine[field] / by_name[name][field]
            print(f"  requests per CPU second: {ratio:.2f} × {name}'s (must {must}, aim {aim}): {met(ratio >= must)}")
    for name, field, what, most in (
        ("sglang-router", "added_ms", "added p50", 1.0), ("LiteLLM", "added_ms", "added p50", 1 / 15),
        ("nginx", "added_ms", "added p50, the aim", 1.15),
        ("sglang-router", "paced_us_token", "CPU of a paced token", 1.0),
        ("nginx", "paced_us_token", "CPU of a paced token, the aim", 1.15),
    ):  # fmt: skip
        if name in by_name:
            ratio = mine[field] / by_name[name][field]
            print(f"  {what}: {ratio:.3f} × {name}'s (at most {most:.3f}): {met(ratio <= most)}")
    for field, what, most, aim in (
        ("stream_kb", "kB an open stream", 16, 8), ("idle_mb", "MB when idle", 60, 40),
        ("cancel_ms", "ms until a cancel reaches the engine, p99", 200, 50),
    ):  # fmt: skip
        print(f"  {what}: {mine[field]:.1f} (must {most}, aim {aim}): {met(mine[field] <= most)}")


OURS = ("ours, compiled", "ours")


def met(holds):
    return "met" if holds else "LOST"


def main(_argv=None):
    """Print the table."""
    missing = [program for program in ("gcc", "wrk", "taskset") if shutil.which(program) is None]
    if missing:
        print(f"not measured: {', '.join(missing)} is not installed (apt-get install gcc wrk util-linux)")
        return
    subprocess.run(["bash", HERE / "gateway_rig" / "install"], check=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mock = folder / "mock_engine"
        subprocess.run(["gcc", "-O2", "-o", mock, HERE / "gateway_rig" / "mock_engine.c"], check=True)
        ports = [free_port() for _ in range(3)]
        with contextlib.ExitStack() as mocks:
            for port, pace in zip(ports, (0, PACE_MS, SLOW_MS), strict=True):
                mocks.enter_context(running(LOAD_CORE, [mock, port, TOKENS, pace], port))
            measure(folder, ports)


def measure(folder, ports):
    direct, rounds = [], {name: [] for name in GATEWAYS}
    for number in range(ROUNDS):
        direct.append(load(folder, ports[0], streams=False, clients=1)["p50_ms"])
        for name in list(rounds):
            print(f"round {number + 1} of {ROUNDS}: {name}", file=sys.stderr, flush=True)
            try:
                rounds[name].append(one_gateway(folder, name, ports))
            except (FileNotFoundError, RuntimeError) as error:
                print(f"not measured: {name}: {error}")
                del rounds[name]
    rows = [median_row(measured_in) for measured_in in rounds.values()]
    for row in rows:
        row["added_ms"] = row["p50_1_ms"] - statistics.median(direct)
    print(f"direct: p50 {statistics.median(direct):.3f} ms; a core for each gateway, {TOKENS} tokens an answer;")
    print(f"ours and aiohttp on Python {platform.python_version()} ({Path(sys.executable).resolve()})")
    table(rows)
    verdicts(rows)
    for name, megabytes in resting_mb(folder, ports[0]).items():
        print(f"  {name}, after 150 s without requests: {megabytes:.1f} MB")


if __name__ == "__main__":
    main()
