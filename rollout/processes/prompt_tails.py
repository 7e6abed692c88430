"""Owns the reuse of a prompt's last KV blocks, which are not full, by the other responses to the same prompt.

Must not hold blocks, keep a response waiting longer than its prompt is computed, or touch another device than the CPU.

vLLM shares full blocks only, and its attention on CPUs needs blocks of 32 tokens: of a prompt of 46 tokens, each
response of a group would compute 14 again. A connector (vLLM 0.32, `KVConnectorBase_V1`) is how vLLM takes in KV that
was computed elsewhere; here that is another request's block in the same cache. A response whose prompt is being
computed by another one waits for that, copies the blocks, and computes only its last prompt token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.request import Request, RequestStatus


@dataclass(frozen=True)
class BlockCopies(KVConnectorMetadata):  # type: ignore[misc]
    """The blocks to copy before a step, and where to, in the same order."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


class PromptTails(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Half of it is the scheduler's, half the worker's; vLLM creates one object for each.

    Requests are told apart by their prompt only: no LoRA, no salt, no images. Models with several groups of caches, or
    with other than full attention, reuse nothing.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._block_size = specs[0].block_size if [type(spec) for spec in specs] == [FullAttentionSpec] else None
        self._running: defaultdict[tuple[int, ...], dict[str, Request]] = defaultdict(dict)
        self._copies: list[tuple[int, int]] = []
        self._caches: list[torch.Tensor] = []

    @property
    def requires_kv_delivery(self) -> bool:
        """Nothing leaves this engine."""
        return False

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the first `num_computed_tokens` a running request has; None while it computes them."""
        reusable = _end(request) - num_computed_tokens
        if self._block_size is None or reusable <= 0:
            return 0, False
        states = [_has_prompt(other) for other in self._others(request)]
        if any(states):
            return reusable, False
        return (None if states else 0), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Note what to copy into the request's `blocks`, if anything is, and that it runs."""
        if self._block_size is None:
            return
        if num_external_tokens:
            source = next(filter(_has_prompt, self._others(request)))
            end = _end(request)
            copied = slice((end - num_external_tokens) // self._block_size, -(-end // self._block_size))
            [sources] = self._kv_cache_manager.get_block_ids(source.request_id)
            [targets] = blocks.get_block_ids()
            self._copies += zip(sources[copied], targets[copied], strict=True)
        self._running[_prompt(request)][request.request_id] = request

    def build_connector_meta(self, scheduler_output: Any) -> BlockCopies:
        """The copies for the step that was scheduled."""
        copies, self._copies = self._copies, []
        return BlockCopies(tuple(source for source, _ in copies), tuple(target for _, target in copies))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; its blocks may be freed."""
        same = self._running[_prompt(request)]
        same.pop(request.request_id, None)
        if not same:
            del self._running[_prompt(request)]
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        return self.request_finished(request, [])

    def reset_cache(self) -> bool:
        """Forget all requests: what they have computed belongs to other weights."""
        self._running.clear()
        return True

    def _others(self, request: Request) -> Iterator[Request]:
        """The requests with the same prompt that vLLM runs; not those that it preempted, which lost their blocks."""
        running = self._running.get(_prompt(request), {}).values()
        return (other for other in running if other is not request and other.status == RequestStatus.RUNNING)

    # The worker's half.

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches by layer, each [blocks, ...]. Raises RuntimeError for another form."""
        self._caches = list({cache.data_ptr(): cache for cache in kv_caches.values()}.values())
        if any(cache.shape[0] != self._kv_cache_config.num_blocks for cache in self._caches):
            raise RuntimeError("the KV cache's first dimension is not that of its blocks: its blocks cannot be copied")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy the step's blocks. vLLM calls it before the step's tokens are computed if there are copies."""
        copies = self._connector_metadata
        if not copies.sources:
            return
        sources, targets = torch.tensor(copies.sources), torch.tensor(copies.targets)
        for cache in self._caches:
            cache[targets] = cache[sources]

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No effect: `start_load_kv` has copied."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """No effect: the blocks stay where they are."""

    def wait_for_save(self) -> None:
        """No effect, as `save_kv_layer`."""


def _prompt(request: Request) -> tuple[int, ...]:
    return tuple(request.prompt_token_ids)


def _end(request: Request) -> int:
    """How many tokens may be another request's: those of the prompt, but the last token has to be computed."""
    return int(min(request.num_prompt_tokens, request.num_tokens - 1))


def _has_prompt(request: Request) -> bool:
    """Whether the steps so far have computed the request's whole prompt."""
    return bool(request.num_computed_tokens >= request.num_prompt_tokens)
