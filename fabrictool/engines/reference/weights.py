"""The weights in memory: converted once into one flat fp32 file that all replicas on a node map.

A mapping that is shared and read-only costs its pages once per node, whoever maps them. The file's name is a digest of
the model file's size, modification time, first and last 64 KiB: the header names and places every tensor, so another
model never matches, and reading gigabytes to hash them would cost more than what the cache saves. What it cannot see
is a file that was changed in its middle with size and time put back.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from fabrictool.base.errors import FabrictoolError, InvalidInputError
from fabrictool.base.files import file_error, sync_folder, write_atomic
from fabrictool.engines.reference.gguf_file import GgufModel, LlamaConfig, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Progress = Callable[[int], None]
    """Told the percentage that is done, 0 to 100."""

_FORMAT = b"fabrictool-flat-fp32/1"
"""Part of the digest: another layout is another file."""
BY_INPUT = ("attn_output", "ffn_down")
"""Matrices whose inputs are split in a shard, where those of others have their outputs split."""
_SAMPLE = 1 << 16
_TOUCH = 1 << 24


class _Cached(msgspec.Struct, frozen=True):
    """Beside the flat file: what the model file's header said, so that a warm start need not parse it again."""

    config: LlamaConfig
    metadata: dict[str, Any]


class Weights(NamedTuple):
    """A model's configuration, metadata and tensors."""

    config: LlamaConfig
    metadata: dict[str, Any]
    """Of the GGUF file: tokenizer and chat template."""
    flat: NDArray[np.float32]
    """Everything, in the order of `tensor_shapes`; not writable."""
    shared: bool
    """Whether `flat` is a mapping that other processes share."""
    warning: FabrictoolError | None
    """Why it is not shared."""
    by_input: bool = False
    """`BY_INPUT` are [inputs, outputs], so that a shard's part of them is one piece of memory."""

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Views into `flat` by name, no copies; ``qkv`` and ``gate_up`` are the joined matrices."""
        views: dict[str, NDArray[np.float32]] = {}
        place: dict[str, int] = {}
        at = 0
        for name, shape in tensor_shapes(self.config).items():
            size = int(np.prod(shape))
            turned = self.by_input and name.endswith(BY_INPUT)
            views[name] = self.flat[at : at + size].reshape(shape[::-1] if turned else shape)
            place[name] = at
            at += size
        c = self.config
        for i in range(c.layers):
            for joined, first, rows in (
                ("qkv", "attn_q", (c.heads + 2 * c.kv_heads) * c.head_dim),
                ("gate_up", "ffn_gate", 2 * c.hidden),
            ):
                start = place[f"blk.{i}.{first}"]
                views[f"blk.{i}.{joined}"] = self.flat[start : start + rows * c.width].reshape(rows, c.width)
        return views


def load_weights(path: Path, cache: Path | None, progress: Progress, degree: int = 1) -> Weights:
    """Map the converted weights of the GGUF file `path`, converting them first when `cache` lacks them.

    Without a cache folder, or when it cannot be written, the weights are converted into private memory. `degree`: into
    so many equal shards they can be cut (`divisible`).

    Raises
    ------
    InvalidInputError
        FT7020, FT7021 the file is no model that this engine computes, or none that can be cut so.
    FabrictoolError
        FT4302 the file cannot be read.
    """
    try:
        key = cache_key(path, degree)
    except OSError as error:
        raise file_error(error, path) from error
    if cache is None:
        return _private(path, progress, None, degree)
    folder = cache / "weights"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(folder / f"{key}.lock"):
            ready = _cached(folder, key)
            if ready is None:
                _convert(path, folder, key, progress, degree)
        return _mapped(folder, key, progress)._replace(by_input=degree > 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    except FabrictoolError as error:
        if isinstance(error, InvalidInputError):
            raise
        reason = error.problems[0].message
    warning = FabrictoolError.of(
        "FT7023",
        f"the weights cache cannot be used, so weights are in this process's own memory: {reason}",
        file=str(folder),
        hint="free some space, or choose another folder with FABRICTOOL_CACHE_DIR",
    )
    return _private(path, progress, warning, degree)


def divisible(config: LlamaConfig, degree: int) -> LlamaConfig:
    """With as many heads of nothing as it takes to give each of `degree` shards the same number.

    A head whose queries, keys and values are zero adds zero: answers are the same.

    Raises
    ------
    InvalidInputError
        FT7021 the feed-forward network cannot be cut so.
    """
    if config.hidden % degree:
        raise InvalidInputError.of(
            "FT7021",
            f"{config.hidden} rows of the feed-forward network cannot be cut into {degree} equal parts",
            hint="let fewer replicas merge",
        )
    kv_heads = -(-config.kv_heads // degree) * degree
    return msgspec.structs.replace(config, kv_heads=kv_heads, heads=config.heads // config.kv_heads * kv_heads)


def cache_key(path: Path, degree: int = 1) -> str:
    """Name of the flat file; see the module's docstring for what it covers."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        head = file.read(_SAMPLE)
        file.seek(max(0, status.st_size - _SAMPLE))
        tail = file.read(_SAMPLE)
    facts = f"{status.st_size}/{status.st_mtime_ns}/{f'{degree} by input/' if degree > 1 else ''}".encode()
    return hashlib.sha256(_FORMAT + facts + head + tail).hexdigest()[:32]


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of query and key rows within a head.

    GGUF files pair rows 2i and 2i+1 of a head for RoPE; ours pairs i and i + head_dim/2, so that a rotation is two
    contiguous halves. Shape [heads * head_dim, width] in and out.
    """
    out, width = rows.shape
    half = out // heads // 2
    return rows.reshape(heads, half, 2, width).swapaxes(1, 2).reshape(out, width)


def _pieces(
    model: GgufModel, config: LlamaConfig, progress: Progress, *, by_input: bool
) -> Iterator[NDArray[np.float32]]:
    """The flat file's tensors in order, as fp32 in our layout, with the heads of `config`."""
    shapes, wanted = tensor_shapes(model.config), tensor_shapes(config)
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    done = 0
    for name, shape in shapes.items():
        values = model.tensor(f"{name}.weight")
        if values.shape != shape:
            raise InvalidInputError.of("FT7020", f"tensor {name} has shape {values.shape}, not {shape}")
        if name.endswith("attn_q"):
            values = unpermute(values, model.config.heads)
        elif name.endswith("attn_k"):
            values = unpermute(values, model.config.kv_heads)
        if shape != wanted[name]:
            values = np.pad(values, [(0, more - present) for present, more in zip(shape, wanted[name], strict=True)])
        yield np.ascontiguousarray(values.T) if by_input and name.endswith(BY_INPUT) else values
        done += int(np.prod(shape))
        progress(100 * done // total)


def _convert(path: Path, folder: Path, key: str, progress: Progress, degree: int) -> None:
    """Write the flat file and what goes beside it; on any error nothing of it stays. The caller holds the lock."""
    for stale in folder.glob(f".{key}.*.tmp"):  # of a conversion that was killed: nobody else may write now
        stale.unlink(missing_ok=True)
    model = GgufModel(path)
    config = divisible(model.config, degree)
    temporary = folder / f".{key}.{os.getpid()}.tmp"
    try:
        with temporary.open("wb") as file:
            for piece in _pieces(model, config, progress, by_input=degree > 1):
                file.write(np.ascontiguousarray(piece).data)
            file.flush()
            os.fsync(file.fileno())
        write_atomic(folder / f"{key}.json", msgspec.json.encode(_Cached(config, model.metadata)))
        temporary.replace(folder / f"{key}.f32")
        sync_folder(folder)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _cached(folder: Path, key: str) -> _Cached | None:
    """What is beside the flat file, when both are whole."""
    try:
        cached = msgspec.json.decode((folder / f"{key}.json").read_bytes(), type=_Cached)
        size = (folder / f"{key}.f32").stat().st_size
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return cached if size == 4 * sum(int(np.prod(shape)) for shape in tensor_shapes(cached.config).values()) else None


def _mapped(folder: Path, key: str, progress: Progress) -> Weights:
    cached = _cached(folder, key)
    if cached is None:
        raise FabrictoolError.of("FT7023", "the converted weights vanished from the cache")
    with (folder / f"{key}.f32").open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    with contextlib.suppress(OSError):  # advice only
        mapping.madvise(mmap.MADV_WILLNEED)
    flat = np.frombuffer(mapping, dtype=np.float32)
    for at in range(0, flat.size, _TOUCH):  # page in now, with progress, and not during the first request
        flat[at : at + _TOUCH : 1024].sum()
        progress(100 * min(flat.size, at + _TOUCH) // flat.size)
    return Weights(cached.config, cached.metadata, flat, True, None)


def _private(path: Path, progress: Progress, warning: FabrictoolError | None, degree: int) -> Weights:
    model = GgufModel(path)
    config = divisible(model.config, degree)
    flat = np.empty(sum(int(np.prod(shape)) for shape in tensor_shapes(config).values()), dtype=np.float32)
    at = 0
    for piece in _pieces(model, config, progress, by_input=degree > 1):
        flat[at : at + piece.size] = piece.reshape(-1)
        at += piece.size
    flat.flags.writeable = False
    return Weights(config, model.metadata, flat, False, warning, degree > 1)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold an advisory lock: of several replicas that start together one converts, the others wait and map."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        # A file system without locks: each converts for itself, the rename still makes the result whole.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
