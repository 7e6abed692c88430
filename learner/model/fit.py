"""Owns whether a model fits a run's workers, GPUs of a stated memory, or a machine; the memory of a rollout replica.

Must not ask a device or a host what is free: this is checked before any process of the run exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from learner.model.memory import BYTES, GIB, ModelDoesNotFitError, held_bytes, learner_memory
from learner.model.shape import ModelShape
from services.settings import Recipe
from services.settings.faults import invalid

STAGES = range(4)


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
    cache = recipe.rollout.kv_cache_mib * 2**20 * parallel
    # A recurrent model keeps nothing per token.
    tokens = cache / per_token if per_token else math.inf
    bucket = recipe.weights.bucket_mib * 2**20
    return ReplicaMemory(
        weights=shape.parameters * size / parallel,
        staged=sync_bytes(recipe, shape) if recipe.weights.staging == "device" else bucket,
        kv_per_token=per_token,
        kv_tokens=tokens,
        longest_sequences=tokens / recipe.model.max_model_len,
    )


@dataclass(frozen=True)
class HostMemory:
    """Bytes that a run's processes always hold in host memory, all of them together, beside their programs.

    `learner`: the ranks' state; `snapshot`: the weights that rank 0 broadcasts; `weights`, `staged` and `cache`: those
    of the replicas on CPUs. What a GPU holds is 0.
    """

    learner: float
    snapshot: float
    weights: float
    staged: float
    cache: float

    @property
    def total(self) -> float:
        return self.learner + self.snapshot + self.weights + self.staged + self.cache

    def __str__(self) -> str:
        parts = {"learner ranks": self.learner, "their snapshot": self.snapshot, "rollout weights": self.weights}
        parts |= {"staged weights": self.staged, "KV caches": self.cache}
        return ", ".join(f"{part} {size / GIB:.2f}" for part, size in parts.items())


def host_memory(recipe: Recipe, parameters: int, replicas: int) -> HostMemory:
    """The host memory that a run of a model of so many parameters takes, with so many rollout replicas."""
    learner, rollout = recipe.learner, recipe.rollout
    held, version = held_bytes(recipe, parameters, learner.zero_stage), BYTES[learner.dtype] * parameters
    training, on_cpu = bool(recipe.limits.rollout_steps), 0 if rollout.gpus else replicas
    workers = on_cpu * rollout.tensor_parallel
    return HostMemory(
        learner=training * learner.ranks * (held.host if learner.gpus else sum(held)),
        snapshot=training * version,
        weights=on_cpu * BYTES[rollout.dtype] * parameters,
        staged=training * workers * version,
        cache=workers * rollout.kv_cache_mib * 2**20,
    )


def check_machine(recipe: Recipe, shape: ModelShape, replicas: int, memory: int) -> None:
    """Compare what a run holds with the bytes of `memory` of the only machine that can place it.

    Raises ModelDoesNotFitError with the parts. What is free is not known yet, so each rank checks that as it starts.
    """
    need = host_memory(recipe, shape.parameters, replicas)
    if need.total > memory:
        model = recipe.model
        field, name = ("package", model.package) if model.path is None else ("path", model.path)
        expected = (
            f"a model with which the run fits the {memory / GIB:.2f} GiB of the only machine; {_named(shape)} needs at "
            f"least {need.total / GIB:.2f} GiB on {recipe.learner.ranks} ranks and {replicas} replicas ({need}); "
            "see `penstock plan`"
        )
        raise ModelDoesNotFitError(invalid(f"model.{field}", name, expected))


def sync_bytes(recipe: Recipe, shape: ModelShape) -> float:
    """Bytes that one weight sync sends to each worker: the whole policy in the learner's dtype."""
    return float(shape.parameters * BYTES[recipe.learner.dtype])


def check_fit(recipe: Recipe, shape: ModelShape, learner_gib: float | None, rollout_gib: float | None) -> None:
    """Compare the estimates with the memory of one GPU of each role, in GiB; None: unknown, so it is not checked.

    The memory of what is on a CPU is not checked either. Raises ModelDoesNotFitError, with the numbers of `penstock
    plan`, and for tensor-parallel workers among which the model cannot be shared.
    """
    faults = [
        *_learner_faults(recipe, shape, learner_gib),
        *_replica_faults(recipe, shape, rollout_gib),
        *_worker_faults(recipe, shape),
    ]
    if faults:
        raise ModelDoesNotFitError("; ".join(faults))


def _learner_faults(recipe: Recipe, shape: ModelShape, gib: float | None) -> Iterator[str]:
    """The error if what a rank always holds is larger than its share of a GPU: it cannot even start to train."""
    learner = recipe.learner
    if gib is None or not learner.gpus or not recipe.limits.rollout_steps:
        return
    room, need = gib * learner.gpus * GIB, learner_memory(recipe, shape, learner.zero_stage)
    if need.held <= room:
        return
    fitting = [str(stage) for stage in STAGES if learner_memory(recipe, shape, stage).held <= room]
    yield invalid(
        "learner.zero_stage",
        need.stage,
        f"a stage at which a rank holds at most {_share(learner.gpus, gib, 'learner')}: "
        f"{' or '.join(fitting) or f'none fits with learner.ranks = {learner.ranks}'}; "
        f"{_named(shape)} on {learner.ranks} ranks needs {need.held / GIB:.2f} GiB there, "
        f"up to {need.peak / GIB:.2f} GiB in training ({need}); see `penstock plan`",
    )


def _replica_faults(recipe: Recipe, shape: ModelShape, gib: float | None) -> Iterator[str]:
    """The error if weights, staged weights and KV cache of a worker are larger than its share of a GPU."""
    rollout = recipe.rollout
    if gib is None or not rollout.gpus:
        return
    share, need = rollout.gpus / rollout.tensor_parallel, replica_memory(recipe, shape)
    room, cache = gib * share * GIB, rollout.kv_cache_mib * 2**20
    if need.weights + need.staged + cache <= room:
        return
    left = int((room - need.weights - need.staged) // 2**20)
    if left > 0:
        field, value, expected = "rollout.kv_cache_mib", rollout.kv_cache_mib, f"at most {left}"
    else:
        field, value = "rollout.tensor_parallel", rollout.tensor_parallel
        expected = "enough workers that their weights leave room for a KV cache"
        if recipe.weights.staging == "device":
            expected += ", or weights.staging: host"
    yield invalid(
        field,
        value,
        f"{expected}; each worker has {_share(share, gib, 'rollout')}, and {_named(shape)} needs there: "
        f"weights {need.weights / GIB:.2f} GiB, staged weights {need.staged / GIB:.2f} GiB, "
        f"KV cache {cache / GIB:.2f} GiB; see `penstock plan`",
    )


def _worker_faults(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """vLLM 0.32 gives each worker the same number of attention heads."""
    workers = recipe.rollout.tensor_parallel
    if shape.heads % workers:
        expected = f"a divisor of {shape.heads}, the attention heads of {_named(shape)}"
        yield invalid("rollout.tensor_parallel", workers, expected)


def _share(share: float, gib: float, role: str) -> str:
    part = "" if share == 1 else f"{share:g} of "
    return f"{share * gib:.2f} GiB ({part}a GPU of {role}.gpuMemoryGiB = {gib:g} in the chart)"


def _named(shape: ModelShape) -> str:
    return f"{shape.name} with {shape.parameters / 1e9:.3f} billion parameters"
