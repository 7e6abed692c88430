"""Owns the measurements of the benchmark: rollout steps, the head alone, the copy to the host, and the broadcast.

Must not print.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.learner.gpu.workload import Load, Shape, rollout_step
from learner.algorithm import logprobs
from learner.model.memory import learner_memory
from learner.model.shape import ModelShape
from learner.training.trainer import Trainer
from learner.weight_sync.broadcast import Rendezvous
from learner.weight_sync.snapshot import make_manifest, take_snapshot
from rollout.channel import Channel
from services.contracts.weight_group import nccl_environment
from services.settings import Recipe

CHUNKS = (128, 256, 512, 1024, 2048)
BROADCAST_S, PART_S = 120.0, 600.0
"""Deadlines: of each blocking call of the broadcast, and of a measurement in a process of its own."""
HOST = "127.0.0.1"


class Steps(NamedTuple):
    """Seconds of a rollout step (the median of several), and its peak of device memory in bytes; 0 on the CPU."""

    seconds: float
    peak_bytes: int


def planned_bytes(recipe: Recipe, shape: Shape, parameters: int) -> float:
    """What `penstock plan` expects of one rank's device."""
    per_token = 2 * shape.layers * shape.key_value_heads * (shape.hidden // shape.heads)
    model = ModelShape("qwen2", parameters, shape.layers, shape.hidden, shape.vocabulary, per_token)
    return learner_memory(recipe, model, recipe.learner.zero_stage).total


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The median time of `work`, after one call that warms up."""
    taken = []
    for _ in range(repeats + 1):
        _finish(device)
        started = time.monotonic()
        work()
        _finish(device)
        taken.append(time.monotonic() - started)
    return statistics.median(taken[1:])


def held_bytes(device: torch.device) -> int:
    """Bytes of device memory that objects of this process hold, without those that only wait to be collected."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def rollout_steps(
    trainer: Trainer, load: Load, vocabulary: int, device: torch.device, repeats: int, held: int = 0
) -> Steps:
    """Train the same rollout step again and again. Adam's state exists from the first, uncounted one on.

    `held`: bytes on the device before the trainer was created, which are not counted.
    """
    batch, payloads = rollout_step(load, vocabulary)
    plans = trainer.plan(batch)
    trainer.train(plans, payloads)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = seconds_of(lambda: trainer.train(plans, payloads), device, repeats)
    return Steps(seconds, torch.cuda.max_memory_allocated(device) - held if device.type == "cuda" else 0)


def head_seconds(shape: Shape, tokens: int, device: torch.device, repeats: int) -> dict[int, float]:
    """Seconds of the head's forward and backward pass over `tokens` tokens, by the size of its chunks."""
    torch.manual_seed(0)
    weight = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    hidden = torch.randn(tokens, shape.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, shape.vocabulary, (tokens,), device=device)

    def both_passes() -> None:
        found, _ = logprobs.token_logprobs(hidden, targets, lambda part: torch.nn.functional.linear(part, weight))
        torch.autograd.grad(found.sum(), [hidden, weight])

    used, found = logprobs.CHUNK_TOKENS, {}
    try:
        for chunk in CHUNKS:
            logprobs.CHUNK_TOKENS = chunk
            found[chunk] = seconds_of(both_passes, device, repeats)
    finally:
        logprobs.CHUNK_TOKENS = used
    return found


def snapshot_rate(trainer: Trainer, bucket_mib: int, device: torch.device, repeats: int) -> float:
    """Bytes per second of the copy of the policy to the host, checksums included."""
    manifest = make_manifest(trainer, bucket_mib)
    sizes: list[int] = []

    def copy() -> None:
        found = take_snapshot(trainer, manifest, 0, keep=True)
        assert found is not None
        sizes.append(sum(bucket.numel() for bucket in found.buckets))

    seconds = seconds_of(copy, device, repeats)
    return sizes[0] / seconds


class PartFailedError(RuntimeError):
    """A measurement in a process of its own failed; the text has its error."""


def _report(pipe: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        pipe.send((work(*arguments), ""))
    except Exception as error:  # noqa: BLE001 - the parent raises it
        pipe.send((None, f"{type(error).__name__}: {error}"))
    pipe.close()
    os._exit(0)  # Gloo's threads outlive the interpreter's shutdown, and would abort it


def apart(work: Callable[..., Any], *arguments: Any, deadline_s: float = PART_S) -> Any:
    """The result of `work` in a process of its own: a closed DeepSpeed engine keeps its memory while its process lives.

    Raises PartFailedError, also after `deadline_s` seconds.
    """
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(end, work, arguments), daemon=True)
    process.start()
    end.close()
    try:
        if not pipe.poll(deadline_s):
            raise PartFailedError(f"it took longer than {deadline_s:g} s")
        found, error = pipe.recv()
    except EOFError:
        raise PartFailedError("its process died") from None
    finally:
        process.kill()
        process.join()
    if error:
        raise PartFailedError(error)
    return found


def _receive(backend: str, port: int, size: int, transfers: int) -> None:
    os.environ.update(nccl_environment(BROADCAST_S))
    device = torch.device("cuda", 1) if backend == "nccl" else torch.device("cpu")
    channel = Channel(backend, 1, 1, 2, BROADCAST_S, device)
    channel.join(HOST, port)
    tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    for _ in range(transfers):
        channel.receive(tensor)
    os._exit(0)  # Gloo's threads outlive the interpreter's shutdown, and would abort it


def broadcast_rate(backend: str, size: int, transfers: int) -> float:
    """Bytes per second from the host's memory to one receiver, as in a weight sync. Raises RuntimeError.

    NCCL sends from device 0 to device 1, Gloo from the host to the host.
    """
    os.environ.update(nccl_environment(BROADCAST_S))
    rendezvous = Rendezvous(HOST, backend, BROADCAST_S, torch.device("cuda", 0) if backend == "nccl" else None)
    arguments = (backend, rendezvous.port, size, transfers + 1)
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=arguments, daemon=True)
    receiver.start()
    group = rendezvous.group(1, 2)
    try:
        group.form()
        bucket = torch.zeros(size, dtype=torch.uint8)
        group.send(bucket)
        started = time.monotonic()
        for _ in range(transfers):
            group.send(bucket)
        return transfers * size / (time.monotonic() - started)
    finally:
        group.abort()
        receiver.join(10)
        receiver.kill()
