"""Owns the rules that relate a recipe to its devices: GPUs of replicas and ranks, tensor parallelism, NCCL.

Must not look at a machine, nor at anything but the recipe's sections. Each rule returns the faults that it finds, so
that all are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.settings.faults import invalid
from services.settings.sections import Architecture, LearnerSettings, RolloutSettings, WeightsSettings

LEAST_SHARE = 1e-4
"""Ray counts no smaller share of a GPU."""
VOCABULARY_BLOCK = 64
"""vLLM 0.32 pads the vocabulary to a multiple of this before it shares it among the workers."""


def replica_faults(rollout: RolloutSettings) -> Iterator[str]:
    """A worker drives one device. Only a replica of one worker can share it, because NCCL refuses two on a device."""
    gpus, workers = rollout.gpus, rollout.tensor_parallel
    if gpus in (0, workers) or (workers == 1 and LEAST_SHARE <= gpus < 1):
        return
    share = f" or a share below 1, at least {LEAST_SHARE}" if workers == 1 else ""
    yield invalid("rollout.gpus", gpus, f"0 (on CPU), {workers} (rollout.tensor_parallel){share}")


def thread_faults(rollout: RolloutSettings) -> Iterator[str]:
    """More threads than its own are for an engine of one process on CPUs."""
    most, field = rollout.max_threads, "rollout.max_threads"
    if most is None:
        return
    if most < rollout.threads:
        yield invalid(field, most, f"rollout.threads = {rollout.threads} or more, or null")
    if rollout.gpus or rollout.tensor_parallel > 1:
        given = f"rollout.gpus = {rollout.gpus:g}, rollout.tensor_parallel = {rollout.tensor_parallel}"
        yield invalid(field, most, f"null with {given}")


def architecture_faults(rollout: RolloutSettings, architecture: Architecture | None) -> Iterator[str]:
    """vLLM shares heads, the inner size of the MLP and the vocabulary among its workers, in equal parts.

    With fewer key-value heads than workers, each is held by an equal number of workers.
    """
    workers, field = rollout.tensor_parallel, "rollout.tensor_parallel"
    if architecture is None:
        return
    padded = -(-architecture.vocab_size // VOCABULARY_BLOCK) * VOCABULARY_BLOCK
    sizes = {
        "num_attention_heads": (architecture.num_attention_heads, ""),
        "intermediate_size": (architecture.intermediate_size, ""),
        "vocab_size": (padded, f", padded to a multiple of {VOCABULARY_BLOCK}"),
    }
    for name, (size, how) in sizes.items():
        if size % workers:
            yield invalid(field, workers, f"a divisor of model.architecture.{name} = {size}{how}")
    shared = architecture.num_key_value_heads
    if max(shared, workers) % min(shared, workers):
        yield invalid(field, workers, f"a divisor or a multiple of model.architecture.num_key_value_heads = {shared}")


def rank_faults(learner: LearnerSettings) -> Iterator[str]:
    """A rank drives one device. Only a single rank can share it: DeepSpeed's NCCL refuses two ranks on one device."""
    gpus, ranks = learner.gpus, learner.ranks
    if gpus > 1:
        expected = f"0 (on CPU) or 1, because each rank uses one device; learner.ranks = {ranks} sets their number"
        yield invalid("learner.gpus", gpus, expected)
    elif 0 < gpus < LEAST_SHARE:
        yield invalid("learner.gpus", gpus, f"0 (on CPU), 1, or a share of at least {LEAST_SHARE}")
    elif 0 < gpus < 1 < ranks:
        yield invalid("learner.gpus", gpus, f"0 (on CPU) or 1 with learner.ranks = {ranks}, which share no device")


def broadcast_faults(weights: WeightsSettings, rollout: RolloutSettings, learner: LearnerSettings) -> Iterator[str]:
    """An NCCL broadcast has rank 0 of the learner and every worker of every replica, each with a device of its own.

    Replicas may not share devices even if there is only one: others may join it while the run continues. The learner's
    device may be a share, because no replica can then have the rest.
    """
    if weights.backend != "nccl":
        return
    gpus = {"rollout.gpus": rollout.gpus, "learner.gpus": learner.gpus}
    on_cpu = [f"{name} = 0" for name, count in gpus.items() if not count]
    if on_cpu:
        yield invalid("weights.backend", "nccl", f"'gloo' with {' and '.join(on_cpu)}, because NCCL needs GPUs")
    elif rollout.gpus < 1 == rollout.tensor_parallel:
        expected = (
            "1 with weights.backend = 'nccl', so that a replica shares no device with another or with the learner "
            f"(learner.gpus = {learner.gpus:g}); or weights.backend = 'gloo'"
        )
        yield invalid("rollout.gpus", rollout.gpus, expected)
