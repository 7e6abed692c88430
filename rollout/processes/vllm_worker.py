"""Owns the code inside vLLM's worker processes: the weight-transfer engine, its remote calls, the watch on the owner.

Must not import Redis or the service; vLLM imports this module in each worker (`worker_extension_cls`).
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import threading
from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops
from vllm._custom_ops import create_onednn_mm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.sample import sampler
from vllm.v1.sample.ops import topk_topp_sampler

from rollout.processes.environment import OWNER_VARIABLE, TRANSFER_BACKEND
from rollout.processes.spare_cores import CoreUsage, SpareCores
from rollout.processes.top_p import mask_outside
from rollout.staging import Staging, StagingOptions, StagingProgress
from services.contracts import WeightManifest, WeightPlan, parse_manifest

log = logging.getLogger(__name__)


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Empty: groups are formed per plan."""


@dataclass
class StagedVersion(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The staged version to load."""

    version: int


class StagedTransfer(WeightTransferEngine[NoInit, StagedVersion]):  # type: ignore[misc]
    """Loads a version that is already received and verified, so applying it does not wait for the network."""

    init_info_cls = NoInit
    update_info_cls = StagedVersion
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.staging: Staging | None = None
        # Shared (tied) parameters count once, under their name in the checkpoint.
        self._parameters = frozenset(name for name, _ in model.named_parameters())

    def stage(self, options: StagingOptions, plan: WeightPlan, manifest: WeightManifest) -> None:
        """Start to receive `plan`."""
        previous, self.staging = self.staging, None
        self.staging = Staging.after(previous, options, plan, manifest)

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """No effect: groups are formed per plan."""

    def start_weight_update(self) -> None:
        """Prepare the model for loading layer by layer (vLLM `reload`)."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged version. Overrides the base class, which waits for an accelerator even on CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StagedVersion) -> None:
        """Copy the staging buffers into the model. Raises RuntimeError unless they hold a complete policy."""
        staging = self.staging
        if staging is None or staging.progress.phase != "staged" or staging.plan.version != update_info.version:
            raise RuntimeError(f"version {update_info.version} is not staged")
        loaded = self.model.load_weights(staging.tensors())
        # vLLM loads an incomplete policy without an error and keeps the old layers.
        if self.model_config.quantization is None and (missing := self._parameters - set(loaded)):
            raise RuntimeError(f"the broadcast lacks {len(missing)} weights, among them {sorted(missing)[:5]}")

    def finish_weight_update(self) -> None:
        """Finish the reload and free the staging buffers."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_heads()
        if self.staging is not None:
            self.staging.abandon()

    def _repack_tied_heads(self) -> None:
        """Refresh the packed copy of the embedding that a tied head multiplies with on CPU.

        `reload` leaves it stale, because the head has no weights of its own: log-probs are then off by whole nats.
        """
        if not getattr(self.model_config.hf_text_config, "tie_word_embeddings", False):
            return
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Abandon the staging and leave the group."""
        if self.staging is not None:
            self.staging.abandon()
            if self.staging.channel is not None:
                self.staging.channel.abort()
            self.staging = None


class WorkerExtension:
    """Methods that the service calls in every worker (AsyncLLM.collective_rpc)."""

    rank: int
    weight_transfer_engine: Any
    _spare_cores: SpareCores | None = None

    def stage_weights(
        self, plan: str, manifest: str, base_rank: int, backend: str, on_host: bool, listener: str = ""
    ) -> None:
        """Start to receive a plan (`plan` and `manifest` are JSON), as rank `base_rank` + this worker's."""
        engine = self.weight_transfer_engine
        device = torch.device(engine.device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # of this thread; others start at device 0
        options = StagingOptions(base_rank + self.rank, backend, device, on_host, listener)
        engine.stage(options, WeightPlan.model_validate_json(plan), parse_manifest(manifest))

    def staging_progress(self) -> dict[str, Any]:
        """The last staging's StagingProgress as plain data."""
        staging: Staging | None = self.weight_transfer_engine.staging
        return (staging.progress if staging is not None else StagingProgress("failed", "nothing was staged")).as_dict()

    def use_spare_cores(self, least: int, most: int) -> int:
        """Look at the cores, and compute with `least` threads, up to `most` while cores are idle. Returns their number.

        Called about once a second. Where the kernel does not tell what it takes, it stays at `least`.
        """
        usage = CoreUsage.now()
        if usage is None:
            return least
        self._spare_cores = self._spare_cores or SpareCores(least, most, usage)
        return self.set_threads(self._spare_cores.next(usage))

    def set_threads(self, threads: int) -> int:
        """Compute with so many threads from now on; returns their number."""
        if threads != torch.get_num_threads():
            torch._C.set_num_threads(threads)  # vLLM replaces torch.set_num_threads by a warning
        return torch.get_num_threads()

    def abandon_staging(self) -> None:
        """Stop receiving; the weights in use stay as they are."""
        staging: Staging | None = self.weight_transfer_engine.staging
        if staging is not None:
            staging.abandon()


def _exit_with_owner(owner: int) -> None:
    """Exit this worker, and kill the EngineCore between it and the owner if there is one, when the owner has died.

    EngineCore does not notice that its client was killed; vLLM's workers notice only EngineCore's death.
    """
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        handle = None
    if handle is not None:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll()  # readable when the owner has exited; this thread lives exactly as long as the worker
    parent = multiprocessing.parent_process()
    # Only EngineCore itself: an orphan's parent is a reaper such as init.
    if parent is not None and parent.pid == os.getppid() != owner:
        os.kill(parent.pid, signal.SIGKILL)
    os._exit(1)


def _watch_owner() -> None:
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner not in (0, os.getpid()):
        threading.Thread(target=_exit_with_owner, args=(owner,), name="owner-watch", daemon=True).start()


def _no_ranks(logprobs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """In place of the sampled tokens' ranks [N] among logprobs [N, V], which nothing reads: a pass over them saved."""
    return torch.zeros(logprobs.shape[0], dtype=torch.int64)


def _create_matrix_product(weight: torch.Tensor, _: int) -> Any:
    """oneDNN's product with a weight, which keeps what it compiled for one number of rows, not for 32.

    It computes with the threads of that moment for ever, `use_spare_cores` or not. oneDNN itself keeps what it compiled
    by rows and threads, so nothing is compiled twice.
    """
    return create_onednn_mm(weight, 1)


def _register() -> None:
    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, StagedTransfer)
        _watch_owner()
        if current_platform.is_cpu():
            sampler.batched_count_greater_than = _no_ranks
            _custom_ops.create_onednn_mm = _create_matrix_product
            topk_topp_sampler.apply_top_k_top_p = mask_outside


_register()
