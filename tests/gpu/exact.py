"""Owns what the tests on GPUs compare a learner with: its log-probs by response, and those of float64 on the CPU.

Must not choose bounds; tests/conformance/rounding.py derives them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from learner.algorithm.parity import OFF
from learner.training.minibatches import micro_batches
from learner.training.network.policy import inputs
from learner.training.process_group import Ranks
from learner.training.shares import PlannedSample
from learner.training.trainer import Trainer
from services.contracts import Batch
from services.streams.delivery.payloads import SamplePayload
from tests.conformance import dense
from tests.conformance.rounding import Exact, Problem
from tests.gpu.needs import device
from tests.gpu.noise import Bounds, bounds
from tests.learner.cases import Case, open_trainer, proximal_of, recipe, scaled, step_data

ROW_TOKENS = 1024
CASES = {
    "dapo": Case("dapo", dtype="bfloat16", data="uneven"),
    "kl": Case("kl", dtype="bfloat16", data="uneven", algorithm={"kl_coefficient": 0.3, "entropy_coefficient": 0.05}),
    "nuclei": Case("nuclei", dtype="bfloat16", data="nuclei", mini_batch_groups=4),
}
"""Mini-batches of three or four groups, up to 190 tokens. None has tokens near a clip: rounding would decide there, and
the gradient jumps, so that no bound would mean anything."""


class Known(NamedTuple):
    """The function that an optimizer step minimises in float64 on the CPU, its value, and bfloat16's bounds.

    `logprobs`: those of the policy by payload, float64 [n].
    """

    problem: Problem
    exact: Exact
    bounds: Bounds
    logprobs: dict[str, Tensor]


@cache
def known(folder: Path, name: str, *, float32_head: bool = False) -> Known:
    """The dense computation of a case of CASES; stage and layout have no effect on it."""
    case = CASES[name]
    settings, (batch, payloads), model = recipe(folder, case), step_data(folder, case.data), dense.load(folder)
    reference = scaled(model) if settings.algorithm.kl_coefficient else None
    problem = Problem(model, batch.groups, payloads, settings, proximal_of(case), reference)
    exact = problem.exact()
    logprobs = {key: found.detach() for key, (found, _) in problem.policy.items()}
    return Known(problem, exact, bounds(problem, exact, head=not float32_head), logprobs)


@torch.no_grad()
def learned(
    trainer: Trainer, data: tuple[Batch, dict[str, SamplePayload]], *, share_prompts: bool
) -> dict[str, Tensor]:
    """The log-probs of each response that counts, float64 [n] on the CPU, by payload; see `rows`."""
    found = {}
    for keys, row in rows(data, share_prompts=share_prompts):
        [part] = micro_batches(row, data[1], ROW_TOKENS, share_prompts=share_prompts)
        assert (part.rows is not None) == share_prompts
        output = trainer._engine(**inputs(part.to(device(), torch.float32)))
        found |= dict(zip(keys, output.logprobs.double().cpu().split([sample.tokens for sample in row]), strict=True))
    return found


def rows(
    data: tuple[Batch, dict[str, SamplePayload]], *, share_prompts: bool
) -> Iterator[tuple[list[str], Sequence[PlannedSample]]]:
    """The responses of one row each, with their payloads: those of a group together if they share their prompt."""
    for group in data[0].groups:
        members = [
            PlannedSample(sample.payload, group.group, sample.tokens, sample.advantage, 1.0)
            for sample in group.samples
            if not sample.masked
        ]
        for row in [members] if share_prompts else [[member] for member in members]:
            yield [member.payload for member in row], row


class Errors(NamedTuple):
    """Of log-probs, in nats: the largest, the root of the mean square, and the share of tokens off by more than 1 %."""

    largest: float
    typical: float
    off: float


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Errors:
    """Those of `found`, [n] by payload."""
    gap = torch.cat([found[key] - expected[key] for key in expected])
    off = float(((torch.exp(gap) - 1).abs() > OFF).double().mean())
    return Errors(float(gap.abs().max()), float(gap.square().mean().sqrt()), off)


@contextmanager
def trainer_of(folder: Path, case: Case, ranks: Ranks, head_dtype: str | None = None) -> Iterator[Trainer]:
    """The case's trainer, with logits in `head_dtype`, closed after the body."""
    trainer = open_trainer(folder, replace(case, head_dtype=head_dtype), ranks)
    try:
        yield trainer
    finally:
        trainer.close()


@contextmanager
def deterministic() -> Iterator[None]:
    """Kernels whose sums have a fixed order, or an error where torch has none (torch.use_deterministic_algorithms).

    Otherwise atomic additions (index_select, gather and attention backwards) give other bits from run to run. cuBLAS
    needs CUBLAS_WORKSPACE_CONFIG besides, set before its first call; conftest.py does.
    """
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
