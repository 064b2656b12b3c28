"""A worker's part of each matrix as a view of the whole one.

vLLM loads a model twice in a worker, whole and as the worker's part of it, and each with its own packing for the
processor. Here both keep the matrices as they are, and once both are loaded the parts give way to views: rows of a
matrix whose outputs are split, columns of one whose inputs are.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager


class NotAViewError(ValueError):
    """A part that vLLM has loaded is not what a view of the whole shows."""


class Shared(NamedTuple):
    """What `share` has done, in octets."""

    whole: int
    """Of the whole model's parameters."""
    views: int
    """Of the part's parameters that are views now."""
    copied: int
    """Of those that are not: biases of layers that join several matrices."""


def unpacked() -> AbstractContextManager[object]:
    """While a model is loaded in it, matrices stay what they were read as."""

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:  # noqa: ARG001 - vLLM passes it by name
        layer.cpu_linear = linear

    return mock.patch.object(utils, "dispatch_cpu_unquantized_gemm", keep)


def share(whole: torch.nn.Module, part: torch.nn.Module, rank: int) -> Shared:
    """Put views of `whole` where `part`, of the worker with this rank, has parameters of its own."""
    views = copied = 0
    for name, module in part.named_modules():
        original = whole.get_submodule(name)
        own = dict(module.named_parameters(recurse=False))
        if own:
            _refuse_quantised(name, module)
        for kind, loaded in own.items():
            pieces = _views(original, module, kind, rank)
            _same(f"{name}.{kind}", pieces, loaded)
            if len(pieces) == 1:
                setattr(module, kind, torch.nn.Parameter(pieces[0], requires_grad=False))
                views += _octets(pieces[0])
            elif kind == "weight":
                # The layer's output is that of its matrices beside each other, which are no neighbours in the whole.
                module.weight = torch.nn.Parameter(pieces[0][:0], requires_grad=False)
                module.cpu_linear = partial(_joined, pieces)
                views += sum(map(_octets, pieces))
            else:
                copied += _octets(loaded)
    return Shared(sum(map(_octets, whole.parameters())), views, copied)


def _refuse_quantised(name: str, module: torch.nn.Module) -> None:
    method = getattr(module, "quant_method", None)
    if method is not None and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        message = f"{name} is quantised ({type(method).__name__}): its parts are not views of the whole"
        raise NotAViewError(message)


def _views(original: torch.nn.Module, module: torch.nn.Module, kind: str, rank: int) -> list[torch.Tensor]:
    """Of the whole's parameter, what this worker computes with."""
    tensor, shape = getattr(original, kind).data, getattr(module, kind).shape
    if tensor.shape == shape:
        return [tensor]
    if tensor.dim() > 1 and tensor.shape[1] != shape[1]:
        return [tensor[:, rank * shape[1] : (rank + 1) * shape[1]]]
    sizes = getattr(module, "output_partition_sizes", [shape[0]])
    whole_sizes = getattr(original, "output_partition_sizes", [tensor.shape[0]])
    starts = accumulate(whole_sizes, initial=0)
    return [tensor[start + rank * size : start + (rank + 1) * size] for start, size in zip(starts, sizes, strict=False)]


def _same(name: str, pieces: Sequence[torch.Tensor], loaded: torch.Tensor) -> None:
    """Whatever the architecture: what was loaded says whether the views are right."""
    shown = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
    if not torch.equal(shown, loaded):
        message = f"{name} of shape {tuple(loaded.shape)} is no view of the whole model's"
        raise NotAViewError(message)


def _joined(
    pieces: Sequence[torch.Tensor], x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The products with several matrices, beside each other; the layer's own is empty."""
    product = torch.cat([linear(x, piece) for piece in pieces], dim=-1)
    return product if bias is None else product + bias


def _octets(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
