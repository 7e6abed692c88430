"""Owns what a recipe will need: GPU memory, KV cache, bytes per weight sync, time per rollout step. Pure arithmetic.

Must not measure; throughputs are stated by whoever asks, and every formula names its source.
"""

from __future__ import annotations

from dataclasses import dataclass

from learner.model.shape import ModelShape
from services.settings import Recipe, resource_requests

GIB = 2**30
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LOGIT_COPIES = 3
"""Float32 arrays of [chunk, vocabulary] alive at once in the backward pass: logits, softmax, their gradient."""


@dataclass(frozen=True)
class Throughput:
    """What the asker states. Tokens per second: of one replica, of one rank; link in bytes per second.

    `survival`: the share of groups that dynamic sampling keeps; `response_tokens`: the mean length.
    """

    generation: float
    learning: float
    link: float
    survival: float
    response_tokens: float


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes of one rank's device at one ZeRO stage; at stage 3 `parameters` holds one layer gathered whole."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    reference: float
    activations: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.reference + self.activations


def learner_memory(recipe: Recipe, shape: ModelShape, stage: int) -> LearnerMemory:
    """One rank's memory at ZeRO `stage` (arXiv 1910.02054, figure 1: parameters, gradients, Adam's states).

    Adam keeps two float32 moments; master weights in float32 come on top where the weights are 16 bits wide, and at
    stages 1 to 3 always, for DeepSpeed then copies its partition.
    """
    size, ranks, P = BYTES[recipe.learner.dtype], recipe.learner.ranks, shape.parameters
    state = max(4, size)
    master = state if size < 4 or stage >= 1 else 0
    share = {0: (1, 1, 1), 1: (1, 1, ranks), 2: (1, ranks, ranks), 3: (ranks, ranks, ranks)}[stage]
    frozen = size * P / share[0] if recipe.algorithm.kl_coefficient > 0 else 0.0
    # At stage 3 one layer at a time is whole on every rank.
    gathered = size * P / shape.layers if stage == 3 else 0.0
    return LearnerMemory(
        stage, size * P / share[0] + gathered, size * P / share[1], (2 * state + master) * P / share[2], frozen,
        activation_bytes(recipe, shape),
    )  # fmt: skip


def activation_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Of one micro-batch, which holds at least one whole sample, and of one chunk of logits.

    34 bytes per token, layer and hidden unit at 16 bits (arXiv 2205.05198, Eq. 1 without attention scores, which
    are not kept); with checkpointing, each layer's input and one layer's inside.
    """
    from learner.algorithm.logprobs import CHUNK_TOKENS

    size = BYTES[recipe.learner.dtype]
    tokens = max(recipe.learner.micro_batch_tokens, recipe.max_prompt_tokens + recipe.rollout.max_new_tokens)
    per_layer = 17 * size * tokens * shape.hidden
    kept = size * tokens * shape.hidden
    checkpointed = recipe.learner.activation_checkpointing
    layers = kept * shape.layers + per_layer if checkpointed else per_layer * shape.layers
    return layers + LOGIT_COPIES * 4 * CHUNK_TOKENS * shape.vocabulary


@dataclass(frozen=True)
class Fleet:
    """One rollout replica: bytes per device of weights and staged weights, KV bytes per token, tokens that fit.

    `staged` is one bucket where weights.staging = host keeps the rest in the host's memory.
    """

    weights: float
    staged: float
    kv_per_token: float
    kv_tokens: float
    longest_sequences: float


def fleet(recipe: Recipe, shape: ModelShape) -> Fleet:
    """Per replica; weights are split over its tensor-parallel workers, a staged version is whole on each."""
    size, parallel = BYTES[recipe.rollout.dtype], recipe.rollout.tensor_parallel
    per_token = shape.kv_values * size
    # vLLM sizes the cache per worker, and each worker holds its share of the heads.
    tokens = recipe.rollout.kv_cache_mib * 2**20 * parallel / per_token
    bucket = recipe.weights.bucket_mib * 2**20
    return Fleet(
        weights=shape.parameters * size / parallel,
        staged=sync_bytes(recipe, shape) if recipe.weights.staging == "device" else bucket, kv_per_token=per_token,
        kv_tokens=tokens, longest_sequences=tokens / recipe.model.max_model_len,
    )  # fmt: skip


def checkpoint_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """What one checkpoint holds over all ranks: master weights and Adam's two moments, at least 4 bytes wide each.

    The ranks hold as much of their hosts' memory between them while it is written.
    """
    return float(3 * max(4, BYTES[recipe.learner.dtype]) * shape.parameters)


def sync_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """What one weight sync sends to each worker: the whole policy in the learner's dtype."""
    return float(shape.parameters * BYTES[recipe.learner.dtype])


def booked_gpus(recipe: Recipe) -> float:
    """The GPUs that a run holds from its start to its end, in fleet and learner."""
    booked = resource_requests(recipe, recipe.rollout.replicas)
    return sum(one.gpus for processes in booked.values() for one in processes)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one rollout step. With staleness generation and learning overlap, without they take turns."""

    sampled_tokens: float
    trained_tokens: float
    generating: float
    learning: float
    syncing: float
    total: float


def step_time(recipe: Recipe, shape: ModelShape, stated: Throughput) -> StepTime:
    """From stated throughputs; every group that is filtered out was generated too."""
    groups, size = recipe.limits.groups_per_step, recipe.algorithm.group_size
    trained = groups * size * stated.response_tokens
    kept = stated.survival if recipe.algorithm.dynamic_sampling.enabled else 1.0
    sampled = trained / kept
    generating = sampled / (stated.generation * recipe.rollout.replicas)
    learning = trained / (stated.learning * recipe.learner.ranks)
    syncing = sync_bytes(recipe, shape) / stated.link
    overlap = recipe.limits.max_staleness > 0
    # The broadcast is staged while generation goes on, but the learner waits for it.
    total = max(generating, learning + syncing) if overlap else generating + learning + syncing
    return StepTime(sampled, trained, generating, learning, syncing, total)
