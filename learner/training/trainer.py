"""Owns the optimizer steps: it drives a DeepSpeed engine so that its gradient is exactly that of the mini-batch.

Must not know Redis or the fleet, or how an engine is created.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from learner.algorithm.loss import HISTOGRAMS, SUMS, LossSettings, TokenLoss, token_loss
from learner.algorithm.parity import EngineComparison
from learner.algorithm.ratios import BINS
from learner.training.deepspeed_engine import frozen, place, prepare_environment, training_engine
from learner.training.learning_rate import LearningRate
from learner.training.minibatches import (
    MicroBatch,
    MiniBatch,
    Sampled,
    filler,
    longest_shared_row,
    micro_batches,
    plan_step,
)
from learner.training.network.policy import PolicyOutput, can_share_prompts, inputs, load_policy
from learner.training.process_group import Ranks
from learner.training.results import OptimizerStep, Trained, summary
from learner.training.state import Counters, put, take
from learner.training.step_start import Anchor, StepStart, Work
from learner.training.tensor_files import HostBlock, tensor_files
from services.contracts import Batch
from services.settings import Recipe
from services.streams.delivery.payloads import SamplePayload

MISMATCH = ("mismatch_kl", "importance", "importance_squared")
"""The sums that measure the distance between the policy and the one that sampled."""


FINISHED_IN = 0.5
"""The part of its time to stop in which a rollout step may still end, if an optimizer step was taken already. The rest
is for the checkpoint."""


class InterruptedTrainingError(RuntimeError):
    """Training stopped because interrupt() was called on a rank.

    The policy is between two versions and must not be published.
    """


class Trainer:
    """The policy in training. Every method is collective: all ranks call it, each from a single thread.

    `between_steps`: whether the state is that of the last rollout step, unchanged by any optimizer step of a later one.
    """

    between_steps = True
    _finish_by = 0.0
    _before_update: Callable[[], None] | None = None
    _held_s = 0.0

    def __init__(self, folder: Path, recipe: Recipe, ranks: Ranks, *, short_cut: bool = True) -> None:
        """Load the policy and create its engine, and with a KL coefficient also a frozen copy as the reference.

        `short_cut` = False: the proximal log-probs of the first optimizer step are computed in a separate pass too.
        """
        self._settings = recipe.learner
        self._reduction = recipe.algorithm.reduction
        self._longest = recipe.algorithm.constant_length or recipe.rollout.max_new_tokens
        self._behaviour_is_proximal = recipe.algorithm.proximal == "behaviour"
        self._loss = loss_settings(recipe)
        self._per_token = recipe.algorithm.advantage == "gae"
        self._ranks = ranks
        self._rollout_steps = 0
        self.non_finite_in_a_row = 0
        """Consecutive optimizer steps with a non-finite gradient, across rollout steps. Counted up to the limit."""
        self._interrupted = threading.Event()
        self._comparison = EngineComparison(())
        prepare_environment()
        torch.set_num_threads(recipe.learner.threads)
        torch.manual_seed(recipe.seed)
        dtype, head_dtype = recipe.learner.dtype, recipe.model.head_dtype
        load = partial(
            load_policy, folder, dtype, recipe.rollout.temperature, head_dtype=head_dtype, device=ranks.device
        )
        policy = load(
            place=place(recipe.learner, ranks.device),
            entropy_gradient=self._loss.entropy_coefficient > 0,
            activation_checkpointing=recipe.learner.activation_checkpointing,
        )
        self._token_dtype = policy.token_dtype
        if self._per_token:
            policy.add_value_head(ranks.device)
        self._engine = training_engine(policy, recipe.learner, recipe.algorithm.value.learning_rate)
        self._learning_rate = LearningRate(self._engine.optimizer, recipe.learner.warmup_rollout_steps)
        # At stage 3 only the engine can run the policy, because it gathers the parameters.
        shares_prompts = torch.tensor(int(can_share_prompts(policy)))
        # The shares of the ranks depend on it, so all of them have to use the same answer.
        self._share_prompts = bool(ranks.all_reduce(shares_prompts, dist.ReduceOp.MIN))
        self._reference: Any = None
        if self._loss.kl_coefficient > 0:
            initial = load(place=place(recipe.learner, ranks.device))
            self._reference = frozen(initial, recipe.learner, ranks.device)
        self._start = StepStart(
            self._engine,
            self._reference,
            recipe.algorithm,
            self._check_interrupted,
            ranks.all_reduce,
            short_cut=short_cut,
        )

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

    def train(
        self,
        plans: list[MiniBatch],
        payloads: dict[str, SamplePayload],
        version: int | None = None,
        learning_rate: float | None = None,
        before_update: Callable[[], None] | None = None,
    ) -> Trained:
        """Train one rollout step: one optimizer step per trainable mini-batch.

        `payloads`: those of this rank's shares, by key. `version`: that of the policy as it is now, whose tokens are
        compared with the engines' log-probs (None: none). `learning_rate`: the policy's from now on, before any
        warm-up; None: as it is. `before_update`: called once, before the first optimizer step changes the policy; it
        may wait, which is not counted as training. Raises InterruptedTrainingError after `interrupt`.
        """
        started = time.monotonic()
        self._before_update, self._held_s = before_update, 0.0
        rate = self._learning_rate.set(learning_rate, self._rollout_steps)
        names = tuple(sorted({sample.replica for plan in plans for share in plan.shares for sample in share}))
        self._comparison = EngineComparison(names)
        sampled = None if version is None else Sampled(version, names)
        work = self._micro_batches([plan for plan in plans if plan.trainable], payloads, sampled)
        # Before the first optimizer step, because the proximal policy is the one at the start of the rollout step.
        work, anchors = self._start.anchors(work)
        steps = [self._optimizer_step(*parts) for parts in zip(work, anchors, strict=True)]
        self.between_steps = True
        self._rollout_steps += 1
        self._count_non_finite(steps)
        self._comparison.reduce(self._ranks.all_reduce)
        seconds = time.monotonic() - started - self._held_s
        return summary(plans, steps, self._comparison, rate, seconds, per_token=self._per_token)

    def _count_non_finite(self, steps: list[OptimizerStep]) -> None:
        for step in steps:
            self.non_finite_in_a_row = 0 if step.applied else self.non_finite_in_a_row + 1
            if self.non_finite_in_a_row == self._settings.max_non_finite_steps:
                break

    def interrupt(self, grace_s: float) -> None:
        """Make a running train() raise InterruptedTrainingError before its next micro-batch, on all ranks.

        Once an optimizer step was taken, only after FINISHED_IN of the `grace_s` seconds in which this rank has to end:
        a rollout step that ends by then can be saved.
        """
        self._finish_by = time.monotonic() + FINISHED_IN * grace_s
        self._interrupted.set()

    def _check_interrupted(self) -> None:
        now = self.between_steps or time.monotonic() >= self._finish_by
        if any(self._most([int(self._interrupted.is_set() and now)])):
            raise InterruptedTrainingError("training was interrupted")

    def _micro_batches(
        self, plans: list[MiniBatch], payloads: dict[str, SamplePayload], sampled: Sampled | None = None
    ) -> Work:
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

    def _optimizer_step(self, part: list[MicroBatch], anchors: list[Anchor]) -> OptimizerStep:
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        histograms = torch.zeros(len(HISTOGRAMS), BINS, dtype=torch.int64)
        for index, batch in enumerate(part):
            self._check_interrupted()
            self._engine.set_gradient_accumulation_boundary(index == len(part) - 1)
            found = self._token_loss(batch, anchors[index])
            sums += found.sums
            histograms += found.histograms
            # DeepSpeed averages gradients over ranks, but the loss is already a part of the global sum.
            self._engine.backward(found.loss * self._ranks.world, scale_wrt_gas=False)
        if self.between_steps:
            self._hold()
        self.between_steps = False
        norm, applied = self._apply()
        return OptimizerStep(self._ranks.all_reduce(sums), self._ranks.all_reduce(histograms), norm, applied)

    def _hold(self) -> None:
        """Wait for what has to happen before the policy changes. Collective."""
        if self._before_update:
            started = time.monotonic()
            self._before_update()
            self._held_s = time.monotonic() - started
        self._check_interrupted()

    def _token_loss(self, batch: MicroBatch, anchor: Anchor) -> TokenLoss:
        output: PolicyOutput = self._engine(**inputs(batch))
        logprobs, entropy = output.logprobs, output.entropies
        current = logprobs.detach()
        before = current if anchor.proximal is None else anchor.proximal
        value = anchor.value_term(output)
        found = token_loss(logprobs, entropy, before, batch.data, self._loss, anchor.reference, value)
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
        named = dict(self.causal_lm.named_parameters())
        head = self._engine.module.value_head
        return named if head is None else named | {"value_head.weight": head.weight}


def leave(ranks: Ranks) -> None:
    """Destroy the process group and DeepSpeed's references to it. Collective: all ranks leave."""
    import deepspeed.comm.comm as deepspeed_comm

    if deepspeed_comm.cdb is not None and dist.is_initialized():
        deepspeed_comm.destroy_process_group()
    ranks.leave()


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
        ratio=algorithm.ratio,
        value_clip=algorithm.value.clip,
        value_coefficient=algorithm.value.coefficient if algorithm.advantage == "gae" else 0.0,
    )


def _take_mismatch(found: TokenLoss, measured: TokenLoss) -> None:
    """Overwrite the importance statistics of `found`, in place, with those of `measured`."""
    columns = [SUMS.index(name) for name in MISMATCH]
    found.sums[columns] = measured.sums[columns]
    row = HISTOGRAMS.index("importance")
    found.histograms[row] = measured.histograms[row]
