"""The cache's memory, seen by a worker alone and by one of several that share the heads.

A block has the same tokens in both views. Alone, a worker keeps all heads of them: its blocks are as many times larger
as there are workers, and as many times fewer, over the same octets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, create_kv_cache_views
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.utils import bind_kv_cache, map_kv_caches_to_kernel_blocks

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.v1.kv_cache_interface import KVCacheConfig


def alone(config: KVCacheConfig, degree: int) -> KVCacheConfig:
    """What one worker has to itself of the cache that `degree` workers share."""
    (group,) = config.kv_cache_groups
    spec = group.kv_cache_spec
    if not isinstance(spec, FullAttentionSpec) or spec.page_size_padded is not None:
        message = f"only caches of full attention can be seen both ways, not {spec}"
        raise TypeError(message)
    return replace(
        config,
        num_blocks=config.num_blocks // degree,
        kv_cache_groups=[replace(group, kv_cache_spec=replace(spec, num_kv_heads=spec.num_kv_heads * degree))],
        kv_cache_tensors=[
            replace(tensor, block_stride=tensor.block_stride * degree) for tensor in config.kv_cache_tensors
        ],
    )


class ReplicaRunner(CPUModelRunner):
    """Runs the whole model by itself, over memory that another runner has allocated."""

    memory: torch.Tensor
    """All octets of the cache, as the other runner allocated them."""

    def initialize_kv_cache_tensors(
        self,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: list[int],
        kv_cache_allocation_context: AbstractContextManager[None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Bind the layers to views of `memory`, and allocate nothing."""
        (group,) = kv_cache_config.kv_cache_groups
        caches: dict[str, torch.Tensor] = {}
        for tensor in kv_cache_config.kv_cache_tensors:
            views = create_kv_cache_views(
                self.memory,
                group.kv_cache_spec,
                kv_cache_config.num_blocks,
                self.cache_config.get_resolved_kv_cache_layout(),
                tensor,
                kernel_block_size=kernel_block_sizes[0],
            )
            caches.update(zip(tensor.layers, views, strict=True))
        groups = [group for members in self.attn_groups for group in members]
        bind_kv_cache(
            caches,
            self.compilation_config.static_forward_context,
            self.kv_caches,
            kv_cache_groups=kv_cache_config.kv_cache_groups,
            layer_kv_caches=map_kv_caches_to_kernel_blocks(caches, groups),
        )
        return caches


def octets_of(view: torch.Tensor) -> torch.Tensor:
    """The whole allocation that a layer's cache is a view of."""
    return torch.empty(0, dtype=torch.int8).set_(view.untyped_storage())  # type: ignore[call-overload]
