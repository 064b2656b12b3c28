"""The engine as the agent starts it: a process from the adapter's command line, with the real model."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import httpx2 as httpx
import numpy as np
import openai
import pytest

from fabrictool.engines.adapter import EngineLaunch, adapter
from fabrictool.engines.reference.kv import KvPool
from fabrictool.engines.reference.model import SequenceRows, Transformer
from fabrictool.engines.reference.tokenizer import Tokenizer
from fabrictool.engines.reference.weights import load_weights
from tests.engines.llama_server import built
from tests.ports import free_port

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


FRANCE = "The capital of France is"


@contextlib.contextmanager
def started(launch, log, program=None):
    command = adapter(launch.engine).command(launch)
    argv = [program or command.argv[0], *command.argv[1:]]
    with log.open("wb") as file:
        process = subprocess.Popen(argv, env=os.environ | command.env, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def launch_of(engine, model, cache="", **more):
    return EngineLaunch(
        engine=engine,
        model=str(model),
        served_name="smollm2",
        host="127.0.0.1",
        port=free_port(),
        python=sys.executable,
        cache_dir=str(cache),
        **more,
    )


def get(port, path):
    """Status and body, (0, "") while nobody listens."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


def post(port, path, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own http address
        return json.load(answer)


def wait_ready(process, launch, log):
    readiness = adapter(launch.engine).readiness
    deadline = time.monotonic() + readiness.timeout_s
    while get(launch.port, readiness.path)[0] != 200:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(readiness.interval_s)


@pytest.mark.e2e
def test_smollm2_knows_the_capital_of_france(smollm2_path, smollm2_cache, tmp_path):
    log = tmp_path / "log"
    launch = launch_of("reference", smollm2_path, smollm2_cache, context=1024, max_num_seqs=4)
    with started(launch, log) as process:
        wait_ready(process, launch, log)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{launch.port}/v1", api_key="none") as client:
            assert [model.id for model in client.models.list()] == ["smollm2"]
            ask = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
            answer = client.chat.completions.create(**ask)
            assert "Paris" in answer.choices[0].message.content
            chunks = list(client.chat.completions.create(**ask, stream=True))
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == answer.choices[0].message.content
        names = adapter("reference").metrics
        metrics = get(launch.port, "/metrics")[1]
        assert all(f"\n{name}{{" in metrics for name in (names.running, names.waiting, names.kv_use))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert "loading weights 100 %" in log.read_text()
    assert "Traceback" not in log.read_text()


def check_socket(launch, log, program=None):
    """It answers at its socket, and at no port."""
    with started(launch, log, program) as process:
        with httpx.Client(transport=httpx.HTTPTransport(uds=launch.socket), base_url="http://localhost") as client:
            deadline = time.monotonic() + 60
            while not Path(launch.socket).is_socket() or client.get("/health").status_code != 200:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            body = {"model": "smollm2", "prompt": "a", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"]
        assert get(launch.port, "/health")[0] == 0
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.mark.e2e
def test_the_api_is_at_a_socket_where_one_is_given(tiny_path, tmp_path):
    check_socket(launch_of("reference", tiny_path, tmp_path, socket=str(tmp_path / "api.sock")), tmp_path / "log")
    taken = launch_of("reference", tiny_path, tmp_path, socket=str(tmp_path / "absent" / "api.sock"))
    with started(taken, tmp_path / "log") as process:
        assert process.wait(60) == 1
    assert "FT7024" in (tmp_path / "log").read_text()


@pytest.mark.e2e
def test_clear_ends(tiny_path, tmp_path):
    log = tmp_path / "log"
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_path.read_bytes()[:9999])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        launch = launch_of("reference", tiny_path, tmp_path)
        for changed, code, exit_code in (
            ({"model": str(broken)}, "FT7020", 65),
            ({"model": str(tmp_path / "none.gguf")}, "FT4302", 1),
            ({"context": 100_000}, "FT7022", 65),
            ({"options": {"kv-blocks": "2"}}, "FT7022", 65),
            ({"port": taken.getsockname()[1]}, "FT7024", 1),
        ):
            one = EngineLaunch(**{field: getattr(launch, field) for field in launch.__struct_fields__} | changed)
            with started(one, log) as process:
                assert process.wait(60) == exit_code
            assert code in log.read_text()
            assert "Traceback" not in log.read_text()


@pytest.mark.e2e
def test_term_while_loading_ends_at_once(tiny_path, tmp_path):
    import fcntl

    from fabrictool.engines.reference.weights import cache_key

    log = tmp_path / "log"
    launch = launch_of("reference", tiny_path, tmp_path)
    (tmp_path / "weights").mkdir()
    with (tmp_path / "weights" / f"{cache_key(tiny_path)}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # another replica converts: this one waits
        with started(launch, log) as process:
            while get(launch.port, "/health")[0] != 503:
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


def compare_log_probabilities(port, path, cache):
    """Another implementation of the same model: near, not equal, for it rounds activations to 8 bits."""
    weights = load_weights(path, cache, lambda _: None)
    model, tokenizer = Transformer(weights), Tokenizer(weights.metadata)
    for prompt in (tokenizer.encode_chat(QUESTION), tokenizer.encode(FRANCE), tokenizer.encode("Once upon a time")):
        logits = model.step([SequenceRows(prompt, 0, list(range(8)), True)], KvPool(model.config, 8, 16))[0].astype(
            np.float64
        )
        ours = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        body = {"prompt": prompt, "n_predict": 1, "n_probs": 6, "temperature": 0, "cache_prompt": False}
        answer = post(port, "/completion", body)
        for theirs in answer["completion_probabilities"][0]["top_logprobs"]:
            assert abs(ours[theirs["id"]] - theirs["logprob"]) < 0.5


@pytest.mark.extended
def test_llama_server_through_the_adapter(smollm2_path, smollm2_cache, tmp_path):
    program = built()
    assert shutil.which(program)
    log = tmp_path / "log"
    launch = launch_of("llama.cpp", smollm2_path, context=1024, max_num_seqs=2, options={"threads": "2"})
    with started(launch, log, program) as process:
        wait_ready(process, launch, log)
        with openai.OpenAI(base_url=f"http://127.0.0.1:{launch.port}/v1", api_key="none") as client:
            assert [model.id for model in client.models.list()] == ["smollm2"]
            chat = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=24)
            assert chat.choices[0].message.content
            # In the chat "The" and "L" are a near tie for the first token (0.08 in log probability), and llama.cpp
            # rounds activations to 8 bits: it may begin in French. As a completion the answer is clear.
            text = client.completions.create(model="smollm2", prompt=FRANCE, temperature=0, max_tokens=4)
            assert "Paris" in text.choices[0].text
            with pytest.raises(openai.BadRequestError):  # each of the two slots has the whole context, and no more
                client.completions.create(model="smollm2", prompt="a b " * 600, max_tokens=1)
            client.completions.create(model="smollm2", prompt="a b " * 400, max_tokens=1)
        compare_log_probabilities(launch.port, smollm2_path, smollm2_cache)
        names = adapter("llama.cpp").metrics
        metrics = get(launch.port, "/metrics")[1]
        assert f"\n{names.running} " in metrics
        assert f"\n{names.waiting} " in metrics
        assert get(launch.port, "/slots")[0] != 200
        assert get(launch.port, "/")[0] != 200
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    check_socket(launch_of("llama.cpp", smollm2_path, context=1024, socket=str(tmp_path / "api.sock")), log, program)
