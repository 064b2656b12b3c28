"""``python -m fabrictool.engines.reference``: load one model and serve it until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from fabrictool.base.clock import SystemClock
from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.logs import configure_logging
from fabrictool.base.settings import Settings
from fabrictool.engines.reference.answers import EngineLimits
from fabrictool.engines.reference.api import LONGEST_S
from fabrictool.engines.reference.engine import ReferenceEngine
from fabrictool.engines.reference.kv import block_bytes
from fabrictool.engines.reference.server import EngineServer
from fabrictool.engines.reference.shared_sum import ORDERED
from fabrictool.engines.reference.tokenizer import Tokenizer
from fabrictool.engines.reference.weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fabrictool.engines.reference.answering import ComputeThread
    from fabrictool.engines.reference.answers import AnsweredModel
    from fabrictool.engines.reference.gguf_file import LlamaConfig
    from fabrictool.engines.reference.merging_engine import MergingEngine
    from fabrictool.engines.reference.weights import Progress, Weights

    Loaded = tuple[ComputeThread, Mapping[str, AnsweredModel]]

_log = logging.getLogger("fabrictool.engine")

_DRAIN_SECONDS = 5.0
"""For requests in progress after TERM: below the ten seconds after which a supervisor kills."""
_KV_MEMORY = 256 << 20
"""Bytes of the pool when nothing is said: about 5800 tokens of SmolLM2-135M."""
_TOKEN_BUDGET = 256
_SLOW = "what finds it out of memory is refused; give a longer --ttft, or more --memory and a longer --keep-alive"
_CONTEXT = 8192
"""Tokens, the most that is chosen when nothing is said."""
THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_UNITS = {"KiB": 10, "MiB": 20, "GiB": 30}


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="python -m fabrictool.engines.reference",
        description="Serve GGUF models of the Llama family over the OpenAI API: one, or several out of one memory.",
        allow_abbrev=False,
    )
    add = arguments.add_argument
    add("--model", required=True, type=Path, action="append", help="path of the GGUF file; again for each model")
    add("--served-name", required=True, action="append", help="the model's name in the API; in the models' order")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--socket", type=Path, help="listen at this Unix socket and at no port")
    add("--context", type=_positive, help="tokens for each request (default: the model's, at most 8192)")
    add("--max-num-seqs", type=_positive, default=8, help="requests in one batch; of several models as measured")
    add("--token-budget", type=_positive, help="tokens in one step (256); several models read whole prompts")
    add("--block-size", type=_positive, default=16, help="tokens in one block of the key-value pool")
    size = arguments.add_mutually_exclusive_group()
    size.add_argument("--kv-blocks", type=_positive, help="blocks of the key-value pool")
    size.add_argument("--kv-memory", type=_memory, help="memory of the key-value pool, such as 256MiB")
    add(
        "--replicas",
        type=_replicas,
        default=1,
        help="processes side by side that merge: 1, 2, 4 or 8; sizes are each one's",
    )
    add("--memory", type=_memory, help="of several models: all weights and caches (default: room for all)")
    add("--keep-alive", type=_seconds, help="of several models: one without requests stays so long (60s)")
    add(
        "--ttft",
        type=_seconds,
        help="of several models: time to the first token (default: 2s, longer beyond 1024 tokens)",
    )
    add("--tpot", type=_seconds, help="of several models: time to each further token (250ms)")
    add("--max-waiting", type=_positive, default=256, help="requests in the queue before new ones get 429")
    add("--cache-dir", type=Path, help="folder for converted weights (default: FABRICTOOL_CACHE_DIR)")
    return arguments


def limits(config: LlamaConfig, arguments: argparse.Namespace) -> EngineLimits:
    """Sizes of the engine for a model.

    Raises
    ------
    InvalidInputError
        FT7022 longer than the model's context, or a pool that cannot hold one request.
    """
    context = arguments.context or min(config.context, _CONTEXT)
    if context > config.context:
        raise InvalidInputError.of("FT7022", f"--context {context} is longer than the model's {config.context}")
    block_size = arguments.block_size
    least = -(-context // (block_size * arguments.replicas))
    per_block = block_bytes(config, block_size)
    blocks = arguments.kv_blocks
    if arguments.kv_memory is not None:
        blocks = arguments.kv_memory // per_block
    if blocks is None:
        blocks = max(least, _KV_MEMORY // per_block)
    if blocks < least:
        several = arguments.replicas > 1
        where = f" in each of {arguments.replicas} replicas" if several else ""
        raise InvalidInputError.of(
            "FT7022",
            f"{blocks} blocks of {block_size} tokens{where} cannot hold one request of {context}",
            hint=f"lower --context, or give {'each of them' if several else 'the pool'} at least {least} blocks"
            f" ({least * per_block / (1 << 20):.0f}MiB)",
        )
    return EngineLimits(context, arguments.max_num_seqs, blocks, block_size, arguments.token_budget or _TOKEN_BUDGET)


async def serve(arguments: argparse.Namespace, settings: Settings) -> int:
    """Listen, load, answer; returns the exit code after TERM or INT."""
    clock, loop = SystemClock(), asyncio.get_running_loop()
    server = EngineServer(clock, max_waiting=arguments.max_waiting)
    stop: asyncio.Future[int] = loop.create_future()
    engines: list[ComputeThread] = []

    def end(code: int) -> None:
        if not stop.done():
            stop.set_result(code)

    def failed(_: str) -> None:
        loop.call_soon_threadsafe(end, 1)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, 0)
    runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
    await runner.setup()
    try:
        await _listen(runner, arguments)
        loading = asyncio.create_task(_load(server, arguments, settings, failed, engines), name="loading")
        await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
        code = await stop
        await server.drain(_DRAIN_SECONDS)
        return code
    finally:
        for engine in engines:  # loaded or not: its processes and their memory go with it
            await asyncio.to_thread(engine.stop)
        await runner.cleanup()


async def _listen(runner: web.AppRunner, arguments: argparse.Namespace) -> None:
    host, port, at = arguments.host, arguments.port, arguments.socket
    site = web.TCPSite(runner, host, port) if at is None else web.UnixSite(runner, str(at))
    try:
        await site.start()
    except OSError as error:
        reason, where = (error.strerror or str(error)).lower(), f"{host} port {port}" if at is None else at
        raise FabrictoolError.of("FT7024", f"cannot listen on {where}: {reason}") from error


async def _load(
    server: EngineServer,
    arguments: argparse.Namespace,
    settings: Settings,
    on_failure: Callable[[str], None],
    engines: list[ComputeThread],
) -> None:
    """The engine is in `engines` before it starts."""
    cache = arguments.cache_dir or settings.cache_path

    def progress(percent: int) -> None:
        if percent // 10 > server.progress // 10:
            sys.stderr.write(f"loading weights {percent} %\n")
        server.progress = max(percent, server.progress)

    def build() -> tuple[ComputeThread, Mapping[str, AnsweredModel]]:
        several = len(arguments.model) > 1
        engine, models = (_several if several else _single)(arguments, cache, progress, on_failure)
        engines.append(engine)
        engine.start()
        return engine, models

    engine, models = await _in_daemon_thread(build)
    server.serve(engine, models)
    for name, model in models.items():
        sys.stderr.write(f"ready: {name}, context {model.context}\n")


def _single(
    arguments: argparse.Namespace, cache: Path | None, progress: Progress, on_failure: Callable[[str], None]
) -> tuple[ComputeThread, Mapping[str, AnsweredModel]]:
    (path,), (name,) = arguments.model, arguments.served_name
    weights = _weights(path, cache, progress, arguments.replicas)
    sizes = limits(weights.config, arguments)
    tokenizer = Tokenizer(weights.metadata)
    if arguments.replicas > 1:
        merging = _merging(arguments, cache, weights, tokenizer, sizes, on_failure)
        return merging, {name: merging}
    engine = ReferenceEngine(weights, tokenizer, sizes, SystemClock(), on_failure)
    return engine, {name: engine}


def _weights(path: Path, cache: Path | None, progress: Progress, degree: int = 1) -> Weights:
    weights = load_weights(path, cache, progress, degree)
    if weights.warning is not None:
        _log.warning("%s", weights.warning)
    return weights


def _several(
    arguments: argparse.Namespace, cache: Path | None, progress: Progress, on_failure: Callable[[str], None]
) -> tuple[ComputeThread, Mapping[str, AnsweredModel]]:
    """Models that share this node's memory and its time."""
    from fabrictool.engines.reference.quantify import quantified  # noqa: PLC0415 - threads and tables of their own
    from fabrictool.engines.reference.sharing_engine import SharingEngine, SharingModel  # noqa: PLC0415
    from fabrictool.sharing.defaults import KEEP_ALIVE_S, TPOT_S, TTFT_S  # noqa: PLC0415

    clock, files = SystemClock(), list(zip(arguments.model, arguments.served_name, strict=True))

    def spread(done: int) -> Progress:
        """Loading is most of it; what is measured takes the rest."""
        return lambda percent: progress(int(90 * (done + percent / 100) / len(files)))

    loaded = [_weights(path, cache, spread(number)) for number, (path, _) in enumerate(files)]
    sizes = [limits(weights.config, arguments) for weights in loaded]
    memory = _memory_of_all(arguments, loaded, sizes)
    models = []
    for (path, name), weights, size in zip(files, loaded, sizes, strict=True):
        sys.stderr.write(f"measuring iterations of {name}\n")
        table = quantified(path, weights, size, clock, cache)
        models.append(SharingModel(name, weights, Tokenizer(weights.metadata), size, table))
        first, wanted = table.load_s + table.iterations.prefill_s(0), arguments.ttft or TTFT_S
        if first > wanted:
            _log.warning(
                "%s takes %.1f s to load and begin, and a first token may take %.1f s: %s", name, first, wanted, _SLOW
            )
    engine = SharingEngine(
        models,
        memory,
        clock,
        on_failure,
        keep_alive_s=arguments.keep_alive or KEEP_ALIVE_S,
        ttft_s=arguments.ttft,
        tpot_s=arguments.tpot or TPOT_S,
    )
    return engine, engine.services


def _memory_of_all(arguments: argparse.Namespace, loaded: list[Weights], sizes: list[EngineLimits]) -> int:
    """Octets, as it was said, or so many that nobody has to leave.

    Raises
    ------
    InvalidInputError
        FT7026 the memory is too short for one of them.
    """
    caches = [_longest_cache(weights, size) for weights, size in zip(loaded, sizes, strict=True)]
    octets = [weights.flat.nbytes for weights in loaded]
    memory: int = arguments.memory or sum(octets) + sum(max(_KV_MEMORY, 2 * cache) for cache in caches)
    for name, weights, cache, size in zip(arguments.served_name, octets, caches, sizes, strict=True):
        least = weights + cache
        if least > memory:
            raise InvalidInputError.of(
                "FT7026",
                f"{name} needs {least / (1 << 20):.0f}MiB for its weights and one request of {size.context} tokens,"
                f" and there are {memory / (1 << 20):.0f}MiB",
                hint=f"give at least --memory {math.ceil(least / (1 << 20))}MiB, or lower --context",
            )
    return memory


def _longest_cache(weights: Weights, sizes: EngineLimits) -> int:
    """Octets for one request as long as the context."""
    return block_bytes(weights.config, sizes.block_size) * -(-sizes.context // sizes.block_size)


# Wide: all that an engine is made of.
def _merging(
    arguments: argparse.Namespace,
    cache: Path | None,
    weights: Weights,
    tokenizer: Tokenizer,
    sizes: EngineLimits,
    on_failure: Callable[[str], None],
) -> MergingEngine:
    """Its replicas are one group as long as half of one replica's places would do."""
    from fabrictool.engines.reference.merging_engine import MergingEngine  # noqa: PLC0415 - processes and their memory
    from fabrictool.merging.requests import MergingOptions  # noqa: PLC0415
    from fabrictool.merging.triggers import LoadTrigger  # noqa: PLC0415

    for name in THREADS:  # workers read it when they load NumPy; members of a group wait for each other all the time
        os.environ.setdefault(name, str(max(1, (os.cpu_count() or 1) // arguments.replicas)))
    options = MergingOptions(
        places=sizes.max_seqs, budget=sizes.token_budget, priority_degree=arguments.replicas, switch_s=0.0
    )
    return MergingEngine(
        weights,
        tokenizer,
        sizes,
        SystemClock(),
        on_failure,
        model=arguments.model[0],
        cache=cache,
        replicas=arguments.replicas,
        options=options,
        trigger=LoadTrigger(math.inf, 0.5 * sizes.max_seqs),
    )


async def _in_daemon_thread(
    work: Callable[[], Loaded],
) -> Loaded:
    """Like asyncio.to_thread, in a thread that the process does not wait for: TERM ends a load at once."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Loaded] = loop.create_future()

    def settle(loaded: Loaded | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if loaded is not None:
            future.set_result(loaded)
        elif error is not None:
            future.set_exception(error)

    def run() -> None:
        loaded, problem = None, None
        try:
            loaded = work()
        except BaseException as error:  # noqa: BLE001 - handed to whoever awaits
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, loaded, problem)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return await future


def main(argv: list[str] | None = None) -> int:
    """Exit codes as everywhere: 0 stopped, 1 failed, 65 the model or the arguments do not fit."""
    settings = Settings.from_environment()
    configure_logging(settings.log_level)
    options = parser()
    arguments = options.parse_args(argv)
    wrong = _contradiction(arguments)
    if wrong:
        options.error(wrong)
    try:
        return asyncio.run(serve(arguments, settings))
    except FabrictoolError as error:
        for problem in error.problems:
            sys.stderr.write(problem.render() + "\n")
        return error.exit_code


def _contradiction(arguments: argparse.Namespace) -> str:
    """What two options say that cannot be both; empty: nothing."""
    if len(arguments.model) != len(arguments.served_name) or len(set(arguments.served_name)) != len(arguments.model):
        return "each --model wants a --served-name of its own"
    if len(arguments.model) > 1:
        if arguments.replicas > 1:
            return "--replicas are of one --model"
        if arguments.kv_blocks is not None or arguments.kv_memory is not None:
            return "caches of several models change their sizes: give --memory in place of --kv-blocks and --kv-memory"
        if arguments.token_budget is not None:
            return "--token-budget is of one --model: of several, an iteration reads a whole prompt"
        return ""
    for name in ("memory", "keep_alive", "ttft", "tpot"):
        if getattr(arguments, name) is not None:
            return f"--{name.replace('_', '-')} is of several models: give --model again for each"
    return ""


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s)", text)
    seconds = 0.0 if match is None else float(match[1]) / (1000 if match[2] == "ms" else 1)
    if match is None or not 0 < seconds <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no time up to a day: write 250ms or 2s")
    return seconds


def _replicas(text: str) -> int:
    number = int(text)
    if number not in (1, 2, 4, 8):
        raise argparse.ArgumentTypeError("must be 1, 2, 4 or 8")
    if number > 1 and not ORDERED:
        raise argparse.ArgumentTypeError("several replicas need an x86-64 processor")
    return number


def _memory(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)(KiB|MiB|GiB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no unit: write 256MiB or 1GiB")
    return int(match[1]) << _UNITS[match[2]]


if __name__ == "__main__":
    sys.exit(main())
