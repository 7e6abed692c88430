"""Owns the optimizer steps: it drives a DeepSpeed engine so that its gradient is exactly that of the mini-batch.

Must not know Redis or the fleet, or how an engine is created.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithm.loss import HISTOGRAMS, SUMS, LossSettings, TokenLoss, means, token_loss
from learner.algorithm.parity import EngineComparison, ReplicaDifference
from learner.algorithm.ratios import BINS
from learner.training.deepspeed_engine import frozen, prepare_environment, training_engine
from learner.training.minibatches import (
    MicroBatch,
    MiniBatch,
    Sampled,
    filler,
    longest_shared_row,
    micro_batches,
    plan_step,
)
from learner.training.policy import can_share_prompts, inputs, load_policy
from learner.training.process_group import Ranks
from learner.training.state import Counters, put, take
from learner.training.tensor_files import HostBlock, tensor_files
from services.contracts import Batch, OptimizerStepRecord
from services.settings import Recipe
from services.streams.delivery.payloads import SamplePayload

MISMATCH = ("mismatch_kl", "importance", "importance_squared")
"""The sums that measure the distance between the policy and the one that sampled."""


class InterruptedTrainingError(RuntimeError):
    """Training stopped because interrupt() was called on a rank.

    The policy is between two versions and must not be published.
    """


@dataclass(frozen=True)
class Trained:
    """The result of one rollout step: its metrics, and its optimizer steps in order."""

    metrics: dict[str, float]
    optimizer: tuple[OptimizerStepRecord, ...]
    damaged: tuple[str, ...] = ()
    """The payloads that could not be trained, with the reason. Their loss was masked."""
    batch_digest: str = ""
    """That of the batch as it was archived, with these masks."""
    differences: dict[str, ReplicaDifference] = field(default_factory=dict)
    """Between the log-probs of the learner and those of each rollout replica, on tokens of the same weights."""

    @property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps that were applied."""
        return sum(step.applied for step in self.optimizer)

    @property
    def skipped(self) -> int:
        """The number of optimizer steps that were skipped because of a non-finite gradient."""
        return len(self.optimizer) - self.optimizer_steps


@dataclass(frozen=True)
class OptimizerStep:
    """The result of one optimizer step.

    sums, histograms: those of TokenLoss, over all ranks. gradient_norm: before clipping. applied: false if skipped.
    """

    sums: Tensor
    histograms: Tensor
    gradient_norm: float
    applied: bool

    @property
    def record(self) -> OptimizerStepRecord:
        """The stored form, in which values that are not finite are None, because JSON has no number for them."""
        loss, norm = float(self.sums[SUMS.index("loss")]), self.gradient_norm
        return OptimizerStepRecord(
            loss=loss if math.isfinite(loss) else None,
            gradient_norm=norm if math.isfinite(norm) else None,
            applied=self.applied,
        )


class Trainer:
    """The policy in training. Every method is collective: all ranks call it, each from a single thread."""

    def __init__(self, folder: Path, recipe: Recipe, ranks: Ranks, *, short_cut: bool = True) -> None:
        """Load the policy and create its engine, and with a KL coefficient also a frozen copy as the reference.

        `short_cut` = False: the proximal log-probs of the first optimizer step are computed in a separate pass too.
        """
        self._settings = recipe.learner
        self._reduction = recipe.algorithm.reduction
        self._longest = recipe.algorithm.constant_length or recipe.rollout.max_new_tokens
        self._behaviour_is_proximal = recipe.algorithm.proximal == "behaviour"
        self._loss = loss_settings(recipe)
        self._ranks = ranks
        self._short_cut = short_cut
        self._rollout_steps = 0
        self.non_finite_in_a_row = 0
        """Consecutive optimizer steps with a non-finite gradient, across rollout steps. Counted up to the limit."""
        self._interrupted = threading.Event()
        self._comparison = EngineComparison(())
        prepare_environment()
        torch.set_num_threads(recipe.learner.threads)
        torch.manual_seed(recipe.seed)
        policy = load_policy(
            folder,
            recipe.learner.dtype,
            recipe.rollout.temperature,
            entropy_gradient=self._loss.entropy_coefficient > 0,
            activation_checkpointing=recipe.learner.activation_checkpointing,
        )
        self._share_prompts = can_share_prompts(policy)
        self._token_dtype = policy.token_dtype
        self._engine = training_engine(policy, recipe.learner)
        self._reference: Any = None
        if self._loss.kl_coefficient > 0:
            initial = load_policy(folder, recipe.learner.dtype, recipe.rollout.temperature)
            self._reference = frozen(initial, recipe.learner, ranks.device)

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model in training. At ZeRO stage 3 its parameters are partitioned."""
        return self._engine.module.causal_lm

    @property
    def partitioned(self) -> bool:
        """Whether all ranks must gather parameters before they can be read."""
        return self._settings.zero_stage == 3

    @contextmanager
    def gathered(self, parameters: list[Any]) -> Iterator[None]:
        """Make `parameters` whole on every rank for the body."""
        if not self.partitioned:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            yield

    def plan(self, batch: Batch) -> list[MiniBatch]:
        """Cut the batch into mini-batches, the same on every rank. `shares[rank]` names the payloads of this rank."""
        settings = self._settings
        row_tokens = longest_shared_row(settings.micro_batch_tokens, share_prompts=self._share_prompts)
        world, longest = self._ranks.world, self._longest
        return plan_step(
            batch, settings.mini_batch_groups, self._reduction, world, longest=longest, row_tokens=row_tokens
        )

    def train(self, plans: list[MiniBatch], payloads: dict[str, SamplePayload], version: int | None = None) -> Trained:
        """Train one rollout step: one optimizer step per trainable mini-batch.

        `payloads`: those of this rank's shares, by key. `version`: that of the policy as it is now, whose tokens are
        compared with the engines' log-probs (None: none). Raises InterruptedTrainingError after `interrupt`.
        """
        started = time.monotonic()
        rate = self._set_learning_rate()
        names = tuple(sorted({sample.replica for plan in plans for share in plan.shares for sample in share}))
        self._comparison = EngineComparison(names)
        sampled = None if version is None else Sampled(version, names)
        work = self._micro_batches([plan for plan in plans if plan.trainable], payloads, sampled)
        # Before the first optimizer step, because the proximal policy is the one at the start of the rollout step.
        proximal, reference = self._proximal(work), self._reference_logprobs(work)
        steps = [self._optimizer_step(*parts) for parts in zip(work, proximal, reference, strict=True)]
        self._rollout_steps += 1
        self._count_non_finite(steps)
        self._comparison.reduce(self._ranks.all_reduce)
        return self._summary(plans, steps, rate, time.monotonic() - started)

    def _count_non_finite(self, steps: list[OptimizerStep]) -> None:
        for step in steps:
            self.non_finite_in_a_row = 0 if step.applied else self.non_finite_in_a_row + 1
            if self.non_finite_in_a_row == self._settings.max_non_finite_steps:
                break

    def interrupt(self) -> None:
        """Make a running train() raise InterruptedTrainingError before its next micro-batch, on all ranks."""
        self._interrupted.set()

    def _check_interrupted(self) -> None:
        if any(self._most([int(self._interrupted.is_set())])):
            raise InterruptedTrainingError("training was interrupted")

    def _set_learning_rate(self) -> float:
        """Set and return the learning rate: constant after a linear warm-up, in rollout steps; never 0."""
        warm = self._settings.warmup_rollout_steps
        rate = self._settings.learning_rate * (min(1.0, (self._rollout_steps + 1) / warm) if warm else 1.0)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _micro_batches(
        self, plans: list[MiniBatch], payloads: dict[str, SamplePayload], sampled: Sampled | None = None
    ) -> list[list[MicroBatch]]:
        """This rank's micro-batches per optimizer step. Their number is equal on all ranks."""
        budget, shared = self._settings.micro_batch_tokens, self._share_prompts
        # With the behaviour log-probs as proximal ones, only the first optimizer step computes those of the start.
        compared = [sampled if not index or not self._behaviour_is_proximal else None for index in range(len(plans))]
        own = [
            micro_batches(plan.shares[self._ranks.rank], payloads, budget, share_prompts=shared, sampled=part)
            for plan, part in zip(plans, compared, strict=True)
        ]
        counts = self._most([len(part) for part in own])
        own = [part + [filler()] * (count - len(part)) for part, count in zip(own, counts, strict=True)]
        device = self._ranks.device
        return [[batch.to(device, self._token_dtype) for batch in part] for part in own]

    def _most(self, counts: list[int]) -> list[int]:
        """The maximum of each count over all ranks."""
        found: list[int] = self._ranks.all_reduce(torch.tensor(counts, dtype=torch.int64), dist.ReduceOp.MAX).tolist()
        return found

    def _proximal(self, work: list[list[MicroBatch]]) -> list[list[Tensor | None]]:
        """The proximal log-probs [N] per optimizer step and micro-batch. None: those of the policy at that time."""
        if self._behaviour_is_proximal:
            return [[batch.data.behaviour for batch in part] for part in work]
        # In the first optimizer step, the current policy is the proximal one, so its log-probs serve as both.
        fresh = 1 if self._short_cut else 0
        return [*_nothing(work[:fresh]), *(self._logprobs(self._engine, part) for part in work[fresh:])]

    def _reference_logprobs(self, work: list[list[MicroBatch]]) -> list[list[Tensor | None]]:
        if self._reference is None:
            return _nothing(work)
        return [self._logprobs(self._reference, part) for part in work]

    @torch.no_grad()
    def _logprobs(self, model: Any, part: list[MicroBatch]) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for batch in part:
            self._check_interrupted()
            found.append(model(**inputs(batch))[0])
        return found

    def _optimizer_step(
        self, part: list[MicroBatch], proximal: list[Tensor | None], reference: list[Tensor | None]
    ) -> OptimizerStep:
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        histograms = torch.zeros(len(HISTOGRAMS), BINS, dtype=torch.int64)
        for index, batch in enumerate(part):
            self._check_interrupted()
            self._engine.set_gradient_accumulation_boundary(index == len(part) - 1)
            found = self._token_loss(batch, proximal[index], reference[index])
            sums += found.sums
            histograms += found.histograms
            # DeepSpeed averages gradients over ranks, but the loss is already a part of the global sum.
            self._engine.backward(found.loss * self._ranks.world, scale_wrt_gas=False)
        norm, applied = self._apply()
        return OptimizerStep(self._ranks.all_reduce(sums), self._ranks.all_reduce(histograms), norm, applied)

    def _token_loss(self, batch: MicroBatch, proximal: Tensor | None, reference: Tensor | None) -> TokenLoss:
        logprobs, entropy = self._engine(**inputs(batch))
        current = logprobs.detach()
        before = current if proximal is None else proximal
        found = token_loss(logprobs, entropy, before, batch.data, self._loss, reference)
        at_start = current if self._behaviour_is_proximal else before
        self._comparison.add(at_start, batch.data.behaviour, batch.replica)
        if self._behaviour_is_proximal:
            # The behaviour policy matches itself, so the mismatch of the current policy is measured instead.
            settings = replace(self._loss, kl_coefficient=0.0)
            measured = token_loss(current, entropy.detach(), current, batch.data, settings)
            _take_mismatch(found, measured)
        return found

    def _apply(self) -> tuple[float, bool]:
        """Clip and apply the gradient, if it is finite. Returns (norm before clipping, whether it was applied)."""
        if self._settings.zero_stage == 0:
            # Without ZeRO the engine neither reports the norm nor skips steps. This does both, on reduced gradients.
            norm = float(torch.nn.utils.clip_grad_norm_(self._engine.module.parameters(), self._settings.gradient_clip))
            if not math.isfinite(norm):
                self._engine.optimizer.zero_grad()
                self._engine.zero_grad()
                return norm, False
            self._engine.step()
            return norm, True
        self._engine.step()
        if self._engine.optimizer.overflow:
            return math.inf, False
        return float(self._engine.get_global_grad_norm()), True

    def _summary(self, plans: list[MiniBatch], steps: list[OptimizerStep], rate: float, seconds: float) -> Trained:
        trained = [sample for plan in plans for share in plan.shares for sample in share]
        metrics = {
            **_means([step for step in steps if step.applied]),
            **self._comparison.metrics(),
            "learning_rate": rate,
            "zero_advantage_share": sum(sample.advantage == 0 for sample in trained) / max(len(trained), 1),
            "skipped_optimizer_steps": float(sum(not step.applied for step in steps)),
            "learning_seconds": seconds,
        }
        return Trained(metrics, tuple(step.record for step in steps), differences=self._comparison.by_replica())

    def close(self) -> None:
        """Release the engine. The ranks may be used again."""
        self._engine.destroy()
        if self._reference is not None and self.partitioned:
            self._reference.destroy()

    def capture(self) -> HostBlock:
        """Copy the part of the state that this rank saves to host memory, without the reference policy. Collective."""
        counters = Counters(self._rollout_steps, self.non_finite_in_a_row)
        return take(self._engine, self._named(), self._settings.zero_stage, self._ranks, counters)

    def restore(self, files: Sequence[Path]) -> None:
        """Load the state from the files of `capture`, written by any number of ranks at any ZeRO stage.

        Collective. Raises ArchiveError.
        """
        with tensor_files(files) as opened:
            counters = put(self._engine, self._named(), self._settings.zero_stage, self._ranks, opened)
        self._rollout_steps, self.non_finite_in_a_row = counters

    def _named(self) -> dict[str, Any]:
        # A tied tensor is listed once.
        return dict(self.causal_lm.named_parameters())


def leave(ranks: Ranks) -> None:
    """Destroy the process group and DeepSpeed's references to it. Collective: all ranks leave."""
    import deepspeed.comm.comm as deepspeed_comm

    if deepspeed_comm.cdb is not None and dist.is_initialized():
        deepspeed_comm.destroy_process_group()
    ranks.leave()


def _means(applied: list[OptimizerStep]) -> dict[str, float]:
    """The metrics of the tokens in the applied optimizer steps; none, rather than zeros, if no step was applied.

    The sums of a skipped step may not be finite, and a step record is JSON.
    """
    if not applied:
        return {}
    sums = torch.stack([step.sums for step in applied]).sum(0)
    histograms = torch.stack([step.histograms for step in applied]).sum(0)
    return means(sums, histograms) | {
        "loss": float(sums[SUMS.index("loss")]) / len(applied),
        "gradient_norm": sum(step.gradient_norm for step in applied) / len(applied),
    }


def _nothing(work: list[list[MicroBatch]]) -> list[list[Tensor | None]]:
    return [[None] * len(part) for part in work]


def loss_settings(recipe: Recipe) -> LossSettings:
    """The settings of a recipe on which the loss of a token depends."""
    algorithm = recipe.algorithm
    return LossSettings(
        clipping=algorithm.clipping,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        correction=recipe.correction,
        correction_cap=algorithm.correction_cap,
        icepop_low=algorithm.icepop_low,
        icepop_high=algorithm.icepop_high,
        kl_coefficient=algorithm.kl_coefficient,
        entropy_coefficient=algorithm.entropy_coefficient,
    )


def _take_mismatch(found: TokenLoss, measured: TokenLoss) -> None:
    """Overwrite the importance statistics of `found`, in place, with those of `measured`."""
    columns = [SUMS.index(name) for name in MISMATCH]
    found.sums[columns] = measured.sums[columns]
    row = HISTOGRAMS.index("importance")
    found.histograms[row] = measured.histograms[row]
