"""The gateway beside others, on one core, in one run: requests and tokens per CPU second, added latency, memory.

    make bench ARGS=gateway

A mock engine in C (`gateway_rig/mock_engine.c`) answers on the other core, where wrk asks, too. Ours has everything on
that it always has: keys, allowlists, ejection, records, figures of usage. nginx and HAProxy check one key and pass on;
the routers are asked for round robin over one worker and check nothing. Figures are CPU seconds of the gateway's own
processes, for the machine is shared; who is not installed is left out and named.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PEERS = ROOT / "build" / "gateway-peers" / "bin"
KEY = "key-of-the-benchmark-0123456789"
TOKENS, PACE_MS = 64, 10
SECONDS = 3
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
frontend clients
  bind 127.0.0.1:{port}
  http-request deny deny_status 401 unless {{ req.hdr(authorization) -m str "Bearer {key}" }}
  default_backend engines
backend engines
  http-reuse always
  server engine 127.0.0.1:{engine}
"""


def free_port():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


def ours(folder, engine, port):
    (folder / "nodes.yaml").write_text(
        f"nodes: [{{url: 'http://127.0.0.1:{engine}', models: [m], provider: alpha}}]\ngroups: {{all: [alpha]}}\n"
    )
    keys = folder / "keys.json"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    keys.touch(0o600)
    keys.write_text(json.dumps({"keys": [{"tenant": "t", "sha256": digest, "group": "all"}]}))
    main = [sys.executable, "-m", "fabrictool.cli.main", "gateway", "run"]
    return [*main, "--registry", folder / "nodes.yaml", "--keys", keys, "--listen", f"127.0.0.1:{port}"]


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


GATEWAYS = {
    "ours": ours,
    "nginx": configured("nginx", NGINX, "-c"),
    "HAProxy": configured("haproxy", HAPROXY, "-f"),
    "vllm-router": router("vllm-router"),
    "sglang-router": router("sglang-router", "launch"),
    "smg": router("smg", "launch"),
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
    number, unit = re.match(r"([\d.]+)(us|ms|s|m)", text).groups()
    return float(number) * {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}[unit]


def measured(folder, pid, port, **how):
    before = cpu_s(pid) if pid else 0.0
    row = load(folder, port, **how)
    return row | {"cpu_s": cpu_s(pid) - before if pid else 0.0}


def one_gateway(folder, name, engines):
    """The row of one; `engines`: ports of the mock without and with a pace."""
    burst, paced = engines
    row = {"name": name}
    port = free_port()
    with running(GATEWAY_CORE, GATEWAYS[name](folder, burst, port), port) as pid:
        load(folder, port, streams=False, clients=16)
        single = measured(folder, pid, port, streams=False, clients=1)
        many = measured(folder, pid, port, streams=False, clients=64)
        row["idle_mb"] = memory_mb(pid)
        streams = measured(folder, pid, port, streams=True, clients=64)
    port = free_port()
    with running(GATEWAY_CORE, GATEWAYS[name](folder, paced, port), port) as pid:
        slow = measured(folder, pid, port, streams=True, clients=256)
    row["wrong"] = single["wrong"] + many["wrong"] + streams["wrong"] + slow["wrong"]
    row["p50_1_ms"], row["p50_ms"], row["p99_ms"] = single["p50_ms"], many["p50_ms"], many["p99_ms"]
    row["requests_cpu_s"] = many["answers"] / many["cpu_s"]
    row["burst_ktok_cpu_s"] = streams["answers"] * TOKENS / streams["cpu_s"] / 1000
    row["paced_us_token"] = slow["cpu_s"] / (slow["answers"] * TOKENS) * 1e6 if slow["answers"] else None
    return row


def told(rows, direct):
    heads = (
        "gateway",
        "req/CPU s",
        "added p50 ms",
        "p50 64",
        "p99 64",
        "burst ktok/CPU s",
        "paced us/tok",
        "MB",
        "no 200",
    )
    print(" ".join(f"{head:>16}" for head in heads))
    for row in rows:
        row["added_ms"] = row["p50_1_ms"] - direct
        values = [row["name"], f"{row['requests_cpu_s']:,.0f}"]
        values += [f"{row[field]:.2f}" for field in ("added_ms", "p50_ms", "p99_ms")]
        values += [f"{row[field]:.1f}" for field in ("burst_ktok_cpu_s", "paced_us_token", "idle_mb")]
        values.append(row["wrong"])
        print(" ".join(f"{value:>16}" for value in values), flush=True)


def verdicts(rows):
    by_name = {row["name"]: row for row in rows}
    mine = by_name["ours"]
    for name, must, aim in (("vllm-router", 2, 4), ("sglang-router", 2, 4), ("smg", 2, 4), ("nginx", 0.4, 0.6)):
        if name in by_name:
            ratio = mine["requests_cpu_s"] / by_name[name]["requests_cpu_s"]
            print(
                f"  requests per CPU second: {ratio:.2f} times {name}'s (must {must}, aim {aim}): {said(ratio >= must)}"
            )
    for name, field, what in (
        ("sglang-router", "added_ms", "added p50 in ms"), ("sglang-router", "paced_us_token", "CPU us per paced token"),
    ):  # fmt: skip
        if name in by_name:
            met = mine[field] <= by_name[name][field]
            print(f"  {what}: {mine[field]:.3g} against {name}'s {by_name[name][field]:.3g}: {said(met)}")


def said(met):
    return "met" if met else "LOST"


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
        burst, paced = free_port(), free_port()
        with (
            running(LOAD_CORE, [mock, burst, TOKENS, 0], burst),
            running(LOAD_CORE, [mock, paced, TOKENS, PACE_MS], paced),
        ):
            direct = load(folder, burst, streams=False, clients=1)
            rows = []
            for gateway in GATEWAYS:
                try:
                    rows.append(one_gateway(folder, gateway, (burst, paced)))
                except (FileNotFoundError, RuntimeError) as error:
                    print(f"not measured: {gateway}: {error}")
            print(f"direct: p50 {direct['p50_ms']:.3f} ms; one core for each gateway, {TOKENS} tokens an answer")
            told(rows, direct["p50_ms"])
            verdicts(rows)


if __name__ == "__main__":
    main()
