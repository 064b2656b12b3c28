"""Which models a processor with matrix units serves in time: forecast and LLM-Mesh's facts (paper 004, section 3)."""

from fabrictool.catalog import accelerators, models
from fabrictool.catalog.huggingface import architecture
from fabrictool.simulator.calibration import NONE
from fabrictool.simulator.capacity import decode_seconds, prefill_seconds
from fabrictool.simulator.memory import weight_octets
from fabrictool.simulator.operators import Parallelism
from fabrictool.simulator.stand import factors_on
from fabrictool.simulator.stepmodel import Machine, StepModel

CODESTRAL = {  # not in the catalogue
    "model_type": "mistral",
    "num_hidden_layers": 56,
    "hidden_size": 6144,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "intermediate_size": 16384,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
MODELS = {
    "3B": models()["meta-llama/Llama-3.2-3B"],
    "7B": models()["meta-llama/Llama-2-7b-hf"],
    "13B": models()["meta-llama/Llama-2-13b-hf"],
    "22B": architecture(CODESTRAL, "mistralai/Codestral-22B-v0.1"),
}
FACTORS = factors_on(accelerators()["xeon-6462c"], NONE, "bf16")
TPOT_TARGET = 0.25
LENGTHS = (512, 1024, 2048, 4096)
PROMPT, ANSWER = 1187, 202  # means of the Azure conversation trace, from which the paper draws its requests
MET, MISSED = "met", "missed"
TTFT_TARGET = (("7B", MET), ("13B", MET), ("22B", MISSED))


def step(name):
    """Step times on the paper's processor, with the factors that plans take for processors."""
    machine = Machine.of(accelerators()["xeon-6462c"])
    return StepModel.of(MODELS[name], machine, Parallelism(), FACTORS, weights="bf16", kv="bf16")


def ttft(name, tokens):
    """Seconds from one prompt alone to its first token."""
    return prefill_seconds(step(name), float(tokens)) + FACTORS.request


def tpot(name, batch, context):
    """Seconds of one decode step."""
    return decode_seconds(step(name), batch, context)


def first_token_in_time(name):
    """Whether prompts of all lengths meet the paper's target of 2 s or, of long ones, 1 s for each 512 tokens."""
    return MET if all(ttft(name, tokens) <= max(2.0, tokens / 512) for tokens in LENGTHS) else MISSED


def concurrency(name):
    """Requests in flight at most, if each one's decoding also waits for the prompts of those that replace others."""

    def mean(batch):
        return tpot(name, batch, PROMPT + ANSWER / 2) + batch / ANSWER * ttft(name, PROMPT)

    return max(batch for batch in range(1, 513) if mean(batch) <= TPOT_TARGET)


def in_time(seconds):
    """Whether a decode step is in time."""
    return MET if seconds <= TPOT_TARGET else MISSED


def main():
    """The facts, and the forecasts of TTFT beside their target."""
    rows = [(f"TTFT target, {name}, prompts to 4096", was, first_token_in_time(name)) for name, was in TTFT_TARGET]
    rows += [(f"TPOT target, {name}, one of 1024 tokens", MET, in_time(tpot(name, 1, 1024))) for name in ("7B", "13B")]
    rows += [
        ("TPOT target, 7B, 16 of 1024 tokens", MET, in_time(tpot("7B", 16, 1024))),
        ("TPOT target, 13B, 32 of 512 tokens", MET, in_time(tpot("13B", 32, 512))),
        ("TPOT target, 13B, 32 of 2048 tokens", MISSED, in_time(tpot("13B", 32, 2048))),
        ("TPOT of 7B, 16 : 1 of 1024 tokens", 1.69, tpot("7B", 16, 1024) / tpot("7B", 1, 1024)),
        ("TPOT of 13B, 32 of 2048 : of 512", 2.0, tpot("13B", 32, 2048) / tpot("13B", 32, 512)),
    ]
    for name, least in (("7B", 14), ("13B", 26)):
        rows.append((f"GB of weights, {name}", least, weight_octets(MODELS[name], Parallelism(), "bf16") / 1e9))
    rows += [(f"concurrency, {name}", was, concurrency(name)) for name, was in (("3B", 59), ("7B", 15), ("13B", 6))]
    print(f"{'what':38} {'paper':>7} {'ours':>7} {'error':>6}")
    for what, paper, ours in rows:
        if isinstance(paper, str):
            print(f"{what:38} {paper:>7} {ours:>7} {'' if paper == ours else 'wrong':>6}")
        else:
            print(f"{what:38} {paper:7.3g} {ours:7.3g} {ours / paper - 1:+6.0%}")
    print(f"\n{'TTFT, s':10}" + "".join(f"{tokens:>8}" for tokens in LENGTHS))
    for name in MODELS:
        print(f"{name:10}" + "".join(f"{ttft(name, tokens):8.2f}" for tokens in LENGTHS))
    print(f"{'target':10}" + "".join(f"{max(2.0, tokens / 512):8.2f}" for tokens in LENGTHS))


if __name__ == "__main__":
    main()
