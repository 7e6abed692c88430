"""Owns what is measured of either side, each in a process of its own: seconds of steps, peak memory, the GEMM peak.

Must not be part of `command`: a process that is started for it imports this module.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.learner.gpu.flops import drawn_flops
from benchmarks.learner.gpu.trained import quiet
from benchmarks.learner.gpu.workload import Shape
from benchmarks.learner.step.padded import PaddedLoop
from benchmarks.learner.step.workload import Work, recipe_of, shape_of
from learner.training.process_group import Ranks, keep_freed_memory
from learner.training.trainer import Trainer

ROWS = (128, 256, 512, 1024)
"""Tokens for which the GEMM peak is measured."""
TRIES = 5


@dataclass(frozen=True)
class Side:
    """What one side did. By repeat: `seconds` of a step, its trained response `tokens`, the `flops` that it needs.

    peak_flops: operations per second of the fastest matrix product, before and after the steps. peak_bytes: the
    process's highest resident set.
    """

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    flops: tuple[float, ...]
    peak_flops: tuple[float, float]
    peak_bytes: int


def measured(train: Callable[[Any, Any], object], folder: Path, work: Work, repeats: int) -> Side:
    """Time `train(batch, payloads)`: repeat i trains the step of seed i.

    One mini-batch of seed 0 warms up and creates Adam's state.
    """
    shape = shape_of(folder)
    parameters = _parameters(folder)
    train(*work.first.step(shape.vocabulary, 0))
    before, seconds, lengths = gemm_peak(shape), [], [work.lengths(seed) for seed in range(repeats)]
    for seed in range(repeats):
        batch, payloads = work.step(shape.vocabulary, seed)
        started = time.monotonic()
        train(batch, payloads)
        seconds.append(time.monotonic() - started)
    tokens = tuple(sum(map(sum, drawn)) for drawn in lengths)
    flops = tuple(drawn_flops(shape, parameters, work.prompt, drawn) for drawn in lengths)
    return Side(tuple(seconds), tokens, flops, (before, gemm_peak(shape)), peak_bytes())


def learner_side(folder: Path, work: Work, threads: int, repeats: int) -> Side:
    """The learner's own trainer, one rank at ZeRO stage 0."""
    keep_freed_memory()  # as a rank does
    quiet()
    trainer = Trainer(folder, recipe_of(folder, work, threads), Ranks(0, 1, "127.0.0.1", 0, timeout_s=600))

    def train(batch: Any, payloads: Any) -> None:
        trainer.train(trainer.plan(batch), payloads)

    return measured(train, folder, work, repeats)


def padded_side(folder: Path, work: Work, threads: int, repeats: int) -> Side:
    """The padded loop, with the same settings of the allocator."""
    keep_freed_memory()
    quiet()
    return measured(PaddedLoop(folder, recipe_of(folder, work, threads), work).train, folder, work, repeats)


def gemm_peak(shape: Shape, rows: Iterable[int] = ROWS) -> float:
    """The most operations per second of `torch.mm` in float32, over the model's own layers and several row counts."""
    hidden, inner, words, best = shape.hidden, shape.intermediate, shape.vocabulary, 0.0
    for tokens in rows:
        for width, out in ((hidden, hidden), (hidden, inner), (inner, hidden), (hidden, words)):
            given, weight = torch.randn(tokens, width), torch.randn(out, width).t()
            result = torch.empty(tokens, out)
            for _ in range(TRIES):
                started = time.perf_counter()
                torch.mm(given, weight, out=result)
                best = max(best, 2 * tokens * width * out / (time.perf_counter() - started))
    return best


def peak_bytes() -> int:
    """The highest resident set of this process. getrusage would include that of the process that started it."""
    [found] = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) << 10


def _parameters(folder: Path) -> int:
    """Of the model, counted in its files; a tied output layer is there once."""
    from safetensors import safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                total += math.prod(opened.get_slice(name).get_shape())
    return total
