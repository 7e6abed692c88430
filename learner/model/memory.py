"""Owns the estimate of a learner rank's memory: on its device and on its host, in training and while it loads.

Must not measure, except what a host has and what is free. `python -m benchmarks.learner.memory.loading` compares the
estimate with measurements.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from learner.model.shape import ModelShape
from services.settings import LearnerSettings, Recipe
from services.settings.faults import invalid

log = logging.getLogger(__name__)

GIB = 2**30
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LOGIT_COPIES = 1.5
"""Float32 arrays of [chunk, vocabulary] alive at once: the logits, which become probabilities and then their gradient
in place, and half as much for them in 16 bits."""
BUCKET, LIVE, PREFETCH = 500_000_000, 1_000_000_000, 50_000_000
"""DeepSpeed's defaults, in elements: gradients reduced at once; at stage 3, parameters gathered at once, and ahead."""

CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Where a container reads its limit and its usage: cgroup v2, v1."""

PROCESS = 350_000_000
"""Bytes on the host of a rank without a model: its imports."""


class ModelDoesNotFitError(RuntimeError):
    """A learner rank has too little memory for its share of the model."""


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes of one rank at one ZeRO stage.

    `buffers`: what DeepSpeed holds beside the paper's terms in the backward pass. `host` is in the host's memory, the
    rest on the device; `loading` and `host_loading` are the peaks of both while the weights are loaded.
    """

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    reference: float
    buffers: float
    activations: float
    host: float
    loading: float
    host_loading: float

    @property
    def held(self) -> float:
        """What is on the device all the time, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.reference

    @property
    def total(self) -> float:
        """The peak in training on the device, in bytes."""
        return self.held + self.buffers + self.activations

    @property
    def peak(self) -> float:
        """The peak on the device."""
        return max(self.total, self.loading)

    @property
    def host_peak(self) -> float:
        """The peak on the host, without the process itself and without checkpoints and snapshots."""
        return max(self.host, self.host_loading)

    def __str__(self) -> str:
        parts = ("parameters", "gradients", "optimizer", "reference", "buffers", "activations", "host")
        return ", ".join(f"{part} {getattr(self, part) / GIB:.2f}" for part in parts)


class HeldBytes(NamedTuple):
    """Bytes that one rank holds all the time: `host` in the host's memory, the rest on the device."""

    parameters: float
    gradients: float
    optimizer: float
    reference: float
    host: float


def held_bytes(recipe: Recipe, parameters: int, stage: int) -> HeldBytes:
    """What one rank holds of a model of so many parameters at ZeRO `stage`.

    Parameters, gradients and Adam's states are shared out as in arXiv 1910.02054, figure 1. Adam keeps two float32
    moments. Float32 master weights are added where the weights are 16 bits wide, and always at stages 1 to 3, where
    DeepSpeed copies its partition. Gradients of 16-bit weights add up in float32 at stages 1 to 3; at stage 1 those of
    the current micro-batch are beside the sum. The reference model is counted only with a KL term.
    """
    size, ranks, P = BYTES[recipe.learner.dtype], recipe.learner.ranks, parameters
    state = max(4, size)
    master = state if size < 4 or stage >= 1 else 0
    share = {0: (1, 1, 1), 1: (1, 1, ranks), 2: (1, ranks, ranks), 3: (ranks, ranks, ranks)}[stage]
    gradient = state + (size if stage == 1 else 0) if size < 4 and stage else size
    weights, gradients, optimizer = size * P / share[0], gradient * P / share[1], (2 * state + master) * P / share[2]
    reference = weights if recipe.algorithm.kl_coefficient > 0 else 0.0
    host = 0.0
    if recipe.learner.offload_optimizer and stage:
        # The gradients of this rank's part are accumulated beside the optimizer.
        host, optimizer = optimizer + state * P / ranks, 0.0
        gradients = _gradients_beside_offloading(size, stage) * P / ranks + (size * P if stage == 1 else 0.0)
    if recipe.learner.offload_parameters and stage == 3:
        host, weights, reference = host + weights + reference, 0.0, 0.0
    return HeldBytes(weights, gradients, optimizer, reference, host)


def learner_memory(recipe: Recipe, shape: ModelShape, stage: int) -> LearnerMemory:
    """One rank's memory at ZeRO `stage`: what `held_bytes` says, and what training and loading need beside it."""
    held = held_bytes(recipe, shape.parameters, stage)
    loading, host_loading = _loading(recipe.learner, shape, stage, held.parameters + held.reference)
    return LearnerMemory(
        **held._asdict(),
        stage=stage,
        buffers=_buffers(recipe.learner, shape.parameters, BYTES[recipe.learner.dtype], stage),
        activations=activation_bytes(recipe, shape),
        loading=loading,
        host_loading=held.host + host_loading,
    )


def _gradients_beside_offloading(size: int, stage: int) -> int:
    """Bytes per parameter of a rank's part that stay on the device: 16-bit stages 1 and 2 add up in float32 there."""
    return 4 if size < 4 and stage < 3 else 0


def free_on_host() -> int:
    """Bytes that are still free on this machine, or in its container if that is less."""
    import psutil

    left = [limit - int(Path(usage).read_text()) for limit, usage in _container_limits()]
    return max(0, min([int(psutil.virtual_memory().available), *left]))


def host_size() -> int:
    """Bytes of this machine's memory, or of its container's limit if that is less."""
    import psutil

    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _container_limits())])


def _container_limits() -> Iterator[tuple[int, str]]:
    """The limits in bytes under which this process runs, each with the file of what is used of it."""
    for limit, usage in CGROUP_LIMITS:
        try:
            bound = Path(limit).read_text().strip()
        except OSError:
            continue
        if bound.isdigit() and Path(usage).is_file():
            yield int(bound), usage


def _buffers(learner: LearnerSettings, parameters: int, size: int, stage: int) -> float:
    """Bytes that DeepSpeed 0.19 holds for a while: gathered parameters, and copies of the gradients being reduced."""
    given: dict[str, float] = learner.deepspeed.get("zero_optimization", {})
    bucket = size * min(parameters, given.get("reduce_bucket_size", BUCKET))
    if stage == 0:
        # In 16 bits, the gradients are copied to float32 whole; else a bucket is flattened to be reduced.
        return 4 * parameters if size < 4 else bucket
    if stage == 1:
        # The gradients themselves are counted whole.
        return bucket
    if stage == 2:
        return 2 * bucket
    live = given.get("stage3_max_live_parameters", LIVE) + given.get("stage3_prefetch_bucket_size", PREFETCH)
    return size * min(parameters, live) + 2 * bucket


def _loading(learner: LearnerSettings, shape: ModelShape, stage: int, held: float) -> tuple[float, float]:
    """The peaks on the device and on the host while weights are loaded, beside what the host keeps in training."""
    size = BYTES[learner.dtype]
    whole = size * shape.parameters
    if stage == 3:
        # A parameter is allocated whole before it is cut. On a host that takes no memory: nothing writes to it.
        return held + (size * shape.largest if learner.gpus else 0), 0.0
    # DeepSpeed flattens the parameters on the host, and creates the float32 masters of this rank's part.
    return held, float(whole) if stage else 0.0


def activation_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Bytes of activations for one micro-batch, which holds at least one whole sample, and one chunk of logits.

    34 bytes per token, layer and hidden unit at 16 bits (arXiv 2205.05198, Eq. 1 without the attention scores, which
    are not kept). With checkpointing: every layer's input, and the activations inside one layer. With a float32 head on
    16-bit weights: its copy.
    """
    from learner.algorithm.logprobs import CHUNK_TOKENS

    size = BYTES[recipe.learner.dtype]
    tokens = max(recipe.learner.micro_batch_tokens, recipe.max_prompt_tokens + recipe.rollout.max_new_tokens)
    per_layer = 17 * size * tokens * shape.hidden
    kept = size * tokens * shape.hidden
    checkpointed = recipe.learner.activation_checkpointing
    layers = kept * shape.layers + per_layer if checkpointed else per_layer * shape.layers
    # A float32 head on 16-bit weights is a copy, and has a gradient of its own until it is rounded.
    copied = recipe.model.head_dtype is not None and size < 4
    head = 2 * 4 * shape.hidden * shape.vocabulary if copied else 0
    return layers + LOGIT_COPIES * 4 * CHUNK_TOKENS * shape.vocabulary + head


def check_memory(recipe: Recipe, shape: ModelShape, device: Any) -> None:
    """Compare the estimate with what is free on `device`, a torch device, and on the host, before anything is loaded.

    Raises ModelDoesNotFitError if not even the state that is always held fits. The rest of the estimate depends on the
    rows of a micro-batch, so it is only logged. Ranks that share a host do not count each other.
    """
    import torch

    need = learner_memory(recipe, shape, recipe.learner.zero_stage)
    host = free_on_host()
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        places = [("device", need.held, need.peak, free), ("host", need.host, need.host_peak, host)]
    else:
        places = [("host", need.held + need.host, max(need.total + need.host, need.loading + need.host_loading), host)]
    for place, held, peak, free in places:
        text = (
            f"at most {free / GIB:.2f} GiB, which are free on the {place} of a rank; {shape.name} with "
            f"{shape.parameters / 1e9:.3f} billion parameters on {recipe.learner.ranks} ranks "
            f"needs {held / GIB:.2f} GiB there, up to {peak / GIB:.2f} GiB in training ({need}); see `penstock plan`"
        )
        if held > free:
            raise ModelDoesNotFitError(invalid("learner.zero_stage", need.stage, text))
        if peak > free:
            log.warning("a learner rank may run out of memory: it should need %s", text)
