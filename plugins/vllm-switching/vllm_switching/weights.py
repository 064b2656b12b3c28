"""The weights of a worker, once, for both modes.

vLLM loads a model twice in a worker, whole and as the worker's part of it, and would pack the matrices of each for the
processor. Here nothing is packed while they load. Then each matrix is cut into what the workers compute with: rows of
one whose outputs are split, columns of one whose inputs are. A piece is packed once. The part multiplies with this
worker's piece, the whole with the pieces of all.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager


class NotAPieceError(ValueError):
    """A part that vLLM has loaded is not a piece of the whole."""


class Shared(NamedTuple):
    """What `share` has done, in octets."""

    whole: int
    """Of the whole model's parameters."""
    packed: int
    """Of the pieces that were packed."""
    pieces: int
    """Of the part's matrices that are pieces of the whole now, packed."""
    views: int
    """Of its other parameters that are views of the whole."""
    copied: int
    """Of those that are not: biases of layers that join several matrices."""


class _Piece(torch.nn.Module):
    """A matrix for `linear`, packed as vLLM packs a layer's."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        super().__init__()
        matrix = torch.cat(list(views)) if len(views) > 1 else views[0].clone()
        self.octets = _octets(matrix)
        self.weight = torch.nn.Parameter(matrix, requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(self, remove_weight=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cpu_linear(x, self.weight, None)


class _Beside:
    """The product with a matrix whose outputs are split: the pieces' products, each matrix of the layer in order."""

    def __init__(self, pieces: Sequence[_Piece], sizes: Sequence[int]) -> None:
        self.pieces, self._sizes = list(pieces), list(sizes)

    def __call__(self, x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        products = [piece(x) for piece in self.pieces]
        if len(products) == 1:
            return _plus(products[0], bias)
        parts = [product.split(self._sizes, dim=-1) for product in products]
        return _plus(torch.cat([part for row in zip(*parts, strict=True) for part in row], dim=-1), bias)


class _Added:
    """The product with a matrix whose inputs are split: the sum, in the order in which workers add theirs."""

    def __init__(self, pieces: Sequence[_Piece]) -> None:
        self.pieces = list(pieces)

    def __call__(self, x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        parts = x.chunk(len(self.pieces), dim=-1)
        first, *others = [piece(part.contiguous()) for piece, part in zip(self.pieces, parts, strict=True)]
        for product in others:
            first += product
        return _plus(first, bias)


def unpacked() -> AbstractContextManager[object]:
    """While a model is loaded in it, matrices stay what they were read as."""

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:  # noqa: ARG001 - vLLM passes it by name
        layer.cpu_linear = linear

    return mock.patch.object(utils, "dispatch_cpu_unquantized_gemm", keep)


def share(whole: torch.nn.Module, part: torch.nn.Module, rank: int, degree: int) -> Shared:
    """Give both models the same memory; `part` is that of the worker with this rank."""
    size = sum(map(_octets, whole.parameters()))
    packed = pieces = views = copied = 0
    for name, module in part.named_modules():
        original = whole.get_submodule(name)
        own = dict(module.named_parameters(recurse=False))
        if own:
            _refuse_quantised(name, module)
        for kind, loaded in own.items():
            shown = _views(original, module, kind, rank)
            _same(f"{name}.{kind}", shown, loaded)
            if kind == "weight" and isinstance(module, LinearBase):
                continue  # packed below, and gone then
            if len(shown) == 1:
                setattr(module, kind, torch.nn.Parameter(shown[0], requires_grad=False))
                views += _octets(shown[0])
            else:
                copied += _octets(loaded)
        if isinstance(module, LinearBase | ParallelLMHead):
            _pack(original, module, rank, degree)
            packed += sum(piece.octets for piece in original.cpu_linear.pieces)
            pieces += sum(piece.octets for piece in module.cpu_linear.pieces if piece in original.cpu_linear.pieces)
        if isinstance(module, LinearBase):  # the matrix of an output layer may be that of the embedding, too
            for layer in (original, module):
                layer.weight = torch.nn.Parameter(torch.empty(0, dtype=layer.weight.dtype), requires_grad=False)
    return Shared(size, packed, pieces, views, copied)


def _pack(original: torch.nn.Module, module: torch.nn.Module, rank: int, degree: int) -> None:
    whole_shape, shape = original.weight.shape, module.weight.shape
    if whole_shape == shape:
        original.cpu_linear = module.cpu_linear = _Beside([_Piece([original.weight.data])], shape[:1])
        return
    pieces = [_Piece(_views(original, module, "weight", other)) for other in range(degree)]
    sizes = getattr(module, "output_partition_sizes", shape[:1])
    original.cpu_linear = _Added(pieces) if whole_shape[1] != shape[1] else _Beside(pieces, sizes)
    module.cpu_linear = _Beside([pieces[rank]], sizes)


def _refuse_quantised(name: str, module: torch.nn.Module) -> None:
    method = getattr(module, "quant_method", None)
    if method is not None and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        message = f"{name} is quantised ({type(method).__name__}): its parts are not pieces of the whole"
        raise NotAPieceError(message)


def _views(original: torch.nn.Module, module: torch.nn.Module, kind: str, rank: int) -> list[torch.Tensor]:
    """Of the whole's parameter, what the worker with this rank computes with."""
    tensor, shape = getattr(original, kind).data, getattr(module, kind).shape
    if tensor.shape == shape:
        return [tensor]
    if tensor.dim() > 1 and tensor.shape[1] != shape[1]:
        return [tensor[:, rank * shape[1] : (rank + 1) * shape[1]]]
    sizes = getattr(module, "output_partition_sizes", [shape[0]])
    starts = accumulate(getattr(original, "output_partition_sizes", [tensor.shape[0]]), initial=0)
    return [tensor[start + rank * size : start + (rank + 1) * size] for start, size in zip(starts, sizes, strict=False)]


def _same(name: str, views: Sequence[torch.Tensor], loaded: torch.Tensor) -> None:
    """Whatever the architecture: what was loaded says whether the views are right."""
    shown = views[0] if len(views) == 1 else torch.cat(list(views))
    if not torch.equal(shown, loaded):
        message = f"{name} of shape {tuple(loaded.shape)} is no piece of the whole model's"
        raise NotAPieceError(message)


def _plus(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product + bias


def _octets(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
