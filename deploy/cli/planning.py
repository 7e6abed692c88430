"""Owns the estimate of what a recipe needs: GPU memory, KV cache, bytes per weight sync, time per rollout step.

Must not measure: throughputs are given by the caller, and every formula names its source.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from learner.model.shape import ModelShape
from services.settings import Recipe, resource_requests

GIB = 2**30
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
LOGIT_COPIES = 3
"""Float32 arrays of [chunk, vocabulary] alive at once in the backward pass: logits, softmax, their gradient."""


@dataclass(frozen=True)
class Throughput:
    """Throughputs that the caller gives: tokens per second of one replica and of one rank, link in bytes per second.

    `survival`: share of groups that dynamic sampling keeps; `response_tokens`: mean response length.
    """

    generation: float
    learning: float
    link: float
    survival: float
    response_tokens: float


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes on one rank's device at one ZeRO stage; at stage 3 `parameters` includes one whole gathered layer."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    reference: float
    activations: float

    @property
    def total(self) -> float:
        """The sum, in bytes."""
        return self.parameters + self.gradients + self.optimizer + self.reference + self.activations


def learner_memory(recipe: Recipe, shape: ModelShape, stage: int) -> LearnerMemory:
    """One rank's memory at ZeRO `stage` (arXiv 1910.02054, figure 1: parameters, gradients, Adam's states).

    Adam keeps two float32 moments. Float32 master weights are added where the weights are 16 bits wide, and always at
    stages 1 to 3, where DeepSpeed copies its partition. Gradients of 16-bit weights add up in
    float32 at stages 1 to 3; at stage 1 those of the current micro-batch are beside the sum. The reference model is
    counted only with a KL term.
    """
    size, ranks, P = BYTES[recipe.learner.dtype], recipe.learner.ranks, shape.parameters
    state = max(4, size)
    master = state if size < 4 or stage >= 1 else 0
    share = {0: (1, 1, 1), 1: (1, 1, ranks), 2: (1, ranks, ranks), 3: (ranks, ranks, ranks)}[stage]
    frozen = size * P / share[0] if recipe.algorithm.kl_coefficient > 0 else 0.0
    gradient = state + (size if stage == 1 else 0) if size < 4 and stage else size
    # At stage 3 every rank gathers one whole layer at a time.
    gathered = size * P / shape.layers if stage == 3 else 0.0
    return LearnerMemory(
        stage=stage,
        parameters=size * P / share[0] + gathered,
        gradients=gradient * P / share[1],
        optimizer=(2 * state + master) * P / share[2],
        reference=frozen,
        activations=activation_bytes(recipe, shape),
    )


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


@dataclass(frozen=True)
class ReplicaMemory:
    """One rollout replica: bytes of weights and staged weights per device, KV cache bytes per token, tokens that fit.

    `staged` is one bucket with weights.staging = host, which keeps the rest in host memory.
    """

    weights: float
    staged: float
    kv_per_token: float
    kv_tokens: float
    longest_sequences: float


def replica_memory(recipe: Recipe, shape: ModelShape) -> ReplicaMemory:
    """One replica's memory: its tensor-parallel workers split the weights, and each stages a whole version."""
    size, parallel = BYTES[recipe.rollout.dtype], recipe.rollout.tensor_parallel
    per_token = shape.kv_values * size
    # vLLM sizes the cache per worker, and each worker holds a share of the heads.
    tokens = recipe.rollout.kv_cache_mib * 2**20 * parallel / per_token
    bucket = recipe.weights.bucket_mib * 2**20
    return ReplicaMemory(
        weights=shape.parameters * size / parallel,
        staged=sync_bytes(recipe, shape) if recipe.weights.staging == "device" else bucket,
        kv_per_token=per_token,
        kv_tokens=tokens,
        longest_sequences=tokens / recipe.model.max_model_len,
    )


def checkpoint_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Bytes of one checkpoint over all ranks: master weights and Adam's two moments, at least 4 bytes per value.

    While it is written, the ranks together use the same amount of host memory.
    """
    return float(3 * max(4, BYTES[recipe.learner.dtype]) * shape.parameters)


def sync_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Bytes that one weight sync sends to each worker: the whole policy in the learner's dtype."""
    return float(shape.parameters * BYTES[recipe.learner.dtype])


def booked_gpus(recipe: Recipe) -> float:
    """The GPUs that a run reserves from its start to its end, for fleet and learner."""
    booked = resource_requests(recipe, recipe.rollout.replicas)
    return sum(process.gpus for processes in booked.values() for process in processes)


def rank_balance(recipe: Recipe, response_tokens: float) -> float:
    """The mean work of a learner rank divided by the largest, over one mini-batch; in (0, 1].

    Only an example is known: response lengths are drawn from exponential distributions, one per group, whose own means
    are exponential too, with mean `response_tokens`; no response is longer than rollout.max_new_tokens.
    """
    from learner.training.minibatches import longest_shared_row
    from learner.training.shares import PlannedSample, distribute

    draw, longest = Random(0), recipe.rollout.max_new_tokens

    def responses(group: str) -> list[PlannedSample]:
        mean = draw.expovariate(1 / response_tokens)
        lengths = (min(longest, 1 + int(draw.expovariate(1 / mean))) for _ in range(recipe.algorithm.group_size))
        return [PlannedSample("", group, tokens, 0.0, 1.0) for tokens in lengths]

    groups = {f"g{number}": responses(f"g{number}") for number in range(recipe.learner.mini_batch_groups)}
    row_tokens = longest_shared_row(recipe.learner.micro_batch_tokens, share_prompts=True)
    prompt_tokens = dict.fromkeys(groups, recipe.max_prompt_tokens // 4)
    return distribute(groups, prompt_tokens, recipe.learner.ranks, row_tokens).balance


@dataclass(frozen=True)
class StepTime:
    """Seconds of one rollout step, and its tokens. Generation and learning overlap if staleness is allowed."""

    sampled_tokens: float
    trained_tokens: float
    generating: float
    learning: float
    syncing: float
    total: float


def step_time(recipe: Recipe, shape: ModelShape, stated: Throughput) -> StepTime:
    """Time of one rollout step at the given throughputs; filtered groups are generated as well."""
    groups, size = recipe.limits.groups_per_step, recipe.algorithm.group_size
    trained = groups * size * stated.response_tokens
    kept = stated.survival if recipe.algorithm.dynamic_sampling.enabled else 1.0
    sampled = trained / kept
    generating = sampled / (stated.generation * recipe.rollout.replicas)
    learning = trained / (stated.learning * recipe.learner.ranks)
    syncing = sync_bytes(recipe, shape) / stated.link
    overlap = recipe.limits.max_staleness > 0
    # Generation continues while the broadcast is staged, but the learner waits for it.
    total = max(generating, learning + syncing) if overlap else generating + learning + syncing
    return StepTime(sampled, trained, generating, learning, syncing, total)
