"""A real vLLM with a tiny random model; `make test-vllm` installs it."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.ports import free_port

VLLM = Path(os.environ.get("FT_TEST_VLLM", Path(__file__).parents[2] / "build" / "vllm"))
READY_S = 400
CONTEXT = 2048
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def write_model(folder, **larger):
    """Four random layers (vLLM draws the weights), or `larger` ones, and a tokenizer whose tokens are octets."""
    end = "<|endoftext|>"
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary[end] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"model_max_length": 2048}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": len(vocabulary), "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "bos_token_id": vocabulary[end], "eos_token_id": vocabulary[end],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | larger))


def _words(pid):
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


class Vllm:
    """One server, a process group of its own."""

    def __init__(self, folder, model, name="m", *, more=("--enforce-eager",), settings=None):
        """`more` arguments, by default those of a start without compiling, and environment."""
        self.folder, self.model, self.name = folder, model, name
        self.more, self.settings = more, settings or {}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [
            VLLM / "bin" / "vllm", "serve", self.model, "--served-model-name", self.name, "--host", "127.0.0.1",
            "--port", self.port, "--load-format", "dummy", "--max-model-len", str(CONTEXT),
            "--dtype", "bfloat16", "--enable-prompt-tokens-details", *self.more,
        ]  # fmt: skip
        with (self.folder / "vllm.log").open("wb") as log:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdout=log,
                stderr=log,
                env=os.environ | settings | self.settings,
                start_new_session=True,
            )

    def wait(self):
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                httpx.get(self.url + "/health", timeout=2)
            except httpx.TransportError:
                time.sleep(0.5)
            else:
                return
        pytest.fail((self.folder / "vllm.log").read_text()[-3000:])

    def again(self):
        """After a test that killed it."""
        if self.process.poll() is not None:
            self.start()
            self.wait()

    def counters(self):
        """Tokens that it says it has taken in, and given out."""
        lines = httpx.get(self.url + "/metrics", timeout=10).text.splitlines()
        return [
            int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)))
            for name in ("vllm:prompt_tokens_total{", "vllm:generation_tokens_total{")
        ]

    @contextlib.contextmanager
    def standing_still(self):
        """No step is made meanwhile, and its server takes requests as ever."""
        core = next(pid for pid in self._processes() if _words(pid).startswith(b"VLLM::EngineCore"))
        os.kill(core, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(core, signal.SIGCONT)

    def _processes(self):
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.getsid(int(folder.name)) == self.process.pid:
                    yield int(folder.name)

    def signal(self, number):
        os.killpg(self.process.pid, number)

    def stop(self):
        if self.process is None:
            return
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    if not (VLLM / "bin" / "vllm").exists():
        pytest.skip("no vLLM here: `make test-vllm` installs it")
    folder = tmp_path_factory.mktemp("model") / "random"
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def vllms(tmp_path_factory, random_model):
    """Two servers of the same model."""
    folder = tmp_path_factory.mktemp("vllm")
    servers = []
    for number in range(2):
        own = folder / str(number)
        own.mkdir()
        servers.append(Vllm(own, random_model))
    try:
        for server in servers:  # one after the other: both cores import for a minute
            server.start()
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.stop()
