"""Owns the optimizer steps: a DeepSpeed engine, driven so that its gradient is the exact one of the mini-batch.

Must not know Redis or the fleet; it is the only importer of deepspeed. Nothing is ever compiled here.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.algorithm.logprobs import chunks_for
from learner.algorithm.loss import SUMS, LossSettings, means, token_loss
from learner.batches import MicroBatch, MiniBatch, filler, micro_batches, plan_step
from learner.policy import Policy, can_share_prompts, inputs, load_policy
from learner.ranks import Ranks
from services.contracts import Batch
from services.settings import Recipe
from services.streams.payloads import SamplePayload

log = logging.getLogger(__name__)


class InterruptedTrainingError(RuntimeError):
    """interrupt() was called on a rank; the policy is between two versions and must not be published."""


@dataclass(frozen=True)
class Trained:
    """What one rollout step did. `skipped`: optimizer steps left out for a non-finite gradient."""

    metrics: dict[str, float]
    optimizer_steps: int
    skipped: int


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step: the loss's sums over all ranks, the gradient's norm before clipping, whether applied."""

    sums: Tensor
    gradient_norm: float
    applied: bool


class Trainer:
    """The policy in training. Every method is collective: all ranks call it, each from one thread."""

    def __init__(self, folder: Path, recipe: Recipe, ranks: Ranks, *, short_cut: bool = True) -> None:
        """Load the policy and build the engine. `short_cut` = False recomputes all proximal log-probs."""
        self._settings = recipe.learner
        self._reduction = recipe.algorithm.reduction
        self._loss = LossSettings(
            preset=recipe.algorithm.preset, clip_low=recipe.algorithm.clip_low, clip_high=recipe.algorithm.clip_high,
            correction=recipe.correction, correction_cap=recipe.algorithm.correction_cap,
        )  # fmt: skip
        self._ranks = ranks
        self._short_cut = short_cut
        self._rollout_steps = 0
        self._interrupted = threading.Event()
        _prepare_environment()
        torch.set_num_threads(recipe.learner.threads)
        torch.manual_seed(recipe.seed)
        policy = load_policy(folder, recipe.learner.dtype, recipe.rollout.temperature)
        self._share_prompts = can_share_prompts(policy)
        self._engine = _engine(policy, recipe)

    @property
    def causal_lm(self) -> Any:
        """The Hugging Face model in training (its parameters are partitioned at ZeRO stage 3)."""
        return self._engine.module.causal_lm

    @property
    def partitioned(self) -> bool:
        """Whether parameters must be gathered, by all ranks, before they can be read."""
        return self._settings.zero_stage == 3

    @contextmanager
    def gathered(self, parameters: list[Any]) -> Iterator[None]:
        """Make `parameters` whole on every rank while the body reads them."""
        if not self.partitioned:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            yield

    def plan(self, batch: Batch) -> list[MiniBatch]:
        """The batch's mini-batches, the same on every rank; this rank's payloads are in `shares[rank]`."""
        return plan_step(batch, self._settings.mini_batch_groups, self._reduction, self._ranks.world)

    def train(self, plans: list[MiniBatch], payloads: dict[str, SamplePayload]) -> Trained:
        """One rollout step: an optimizer step per trainable mini-batch. `payloads`: this rank's share, by key."""
        started = time.monotonic()
        rate = self._set_learning_rate()
        work = self._micro_batches([one for one in plans if one.trainable], payloads)
        # At the first optimizer step the current policy IS the proximal one, so its log-probs serve as both.
        fresh = 1 if self._short_cut else 0
        proximal = [None] * min(fresh, len(work)) + [self._logprobs(part) for part in work[fresh:]]
        steps = [self._optimizer_step(part, before) for part, before in zip(work, proximal, strict=True)]
        self._rollout_steps += 1
        return self._summary(plans, steps, rate, time.monotonic() - started)

    def interrupt(self) -> None:
        """Make a running train() raise InterruptedTrainingError before its next micro-batch, on all ranks alike."""
        self._interrupted.set()

    def _check_interrupted(self) -> None:
        if any(self._most([int(self._interrupted.is_set())])):
            raise InterruptedTrainingError("training was interrupted")

    def _set_learning_rate(self) -> float:
        """Constant after a linear warm-up, counted in rollout steps; the first step already learns."""
        warm = self._settings.warmup_rollout_steps
        rate = self._settings.learning_rate * (min(1.0, (self._rollout_steps + 1) / warm) if warm else 1.0)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _micro_batches(self, plans: list[MiniBatch], payloads: dict[str, SamplePayload]) -> list[list[MicroBatch]]:
        """This rank's micro-batches per optimizer step; as many, with as many head calls, as on any other rank."""
        budget = self._settings.micro_batch_tokens
        own = [
            micro_batches(plan.shares[self._ranks.rank], payloads, budget, share_prompts=self._share_prompts)
            for plan in plans
        ]
        counts = self._most([len(part) for part in own])
        own = [part + [filler()] * (count - len(part)) for part, count in zip(own, counts, strict=True)]
        chunks = iter(self._most([chunks_for(one.targets.numel()) for part in own for one in part]))
        device = self._ranks.device
        return [[replace(one, chunks=next(chunks)).to(device) for one in part] for part in own]

    def _most(self, counts: list[int]) -> list[int]:
        found: list[int] = self._ranks.all_reduce(torch.tensor(counts, dtype=torch.int64), dist.ReduceOp.MAX).tolist()
        return found

    @torch.no_grad()
    def _logprobs(self, part: list[MicroBatch]) -> list[Tensor]:
        found = []
        for one in part:
            self._check_interrupted()
            found.append(self._engine(**inputs(one))[0])
        return found

    def _optimizer_step(self, part: list[MicroBatch], proximal: list[Tensor] | None) -> OptimizerStep:
        sums = torch.zeros(len(SUMS), dtype=torch.float64)
        for index, one in enumerate(part):
            self._check_interrupted()
            self._engine.set_gradient_accumulation_boundary(index == len(part) - 1)
            logprobs, entropy = self._engine(**inputs(one))
            before = logprobs.detach() if proximal is None else proximal[index]
            loss, found = token_loss(logprobs, entropy, before, one.data, self._loss)
            sums += found.cpu()
            # DeepSpeed averages gradients over ranks; the loss is already a share of the global sum.
            self._engine.backward(loss * self._ranks.world, scale_wrt_gas=False)
        norm, applied = self._apply()
        return OptimizerStep(self._ranks.all_reduce(sums), norm, applied)

    def _apply(self) -> tuple[float, bool]:
        """Clip and step, unless the gradient is not finite: (its norm before clipping, whether it was applied)."""
        if self._settings.zero_stage == 0:
            # Without ZeRO the engine neither reports the norm nor skips: both are done here, on reduced gradients.
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
        applied = [step for step in steps if step.applied]
        # A skipped step's sums may not be finite, and a step record is JSON.
        sums = sum((step.sums for step in applied), torch.zeros(len(SUMS), dtype=torch.float64))
        trained = [one for plan in plans for share in plan.shares for one in share]
        metrics = means(sums.tolist())
        metrics |= {
            "loss": float(sums[SUMS.index("loss")]) / max(len(applied), 1),
            "gradient_norm": sum(step.gradient_norm for step in applied) / max(len(applied), 1),
            "learning_rate": rate,
            "zero_advantage_share": sum(one.advantage == 0 for one in trained) / max(len(trained), 1),
            "skipped_optimizer_steps": float(len(steps) - len(applied)),
            "learning_seconds": seconds,
        }
        return Trained(metrics, len(applied), len(steps) - len(applied))

    def close(self) -> None:
        """Let go of the engine; the ranks may be used again."""
        self._engine.destroy()


def leave(ranks: Ranks) -> None:
    """Destroy the ranks' process group together with DeepSpeed's references to it. Collective: all ranks leave."""
    import deepspeed.comm.comm as deepspeed_comm

    if deepspeed_comm.cdb is not None and dist.is_initialized():
        deepspeed_comm.destroy_process_group()
    ranks.leave()


def _prepare_environment() -> None:
    """What DeepSpeed reads when it is first imported, which loading a model may already do."""
    # An interrupted build leaves a lock on which later ones wait for ever: share no folder with anybody.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{tempfile.gettempdir()}/penstock-extensions-{os.getpid()}")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    # The host gives each rank only its own device.
    os.environ.setdefault("LOCAL_RANK", "0")


def _engine(policy: Policy, recipe: Recipe) -> Any:
    import deepspeed
    import deepspeed.comm.comm as deepspeed_comm

    deepspeed.logger.setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        # On CPU the communication backend compiles a shared-memory kernel (60 s) if this probe lists it.
        vars(deepspeed.ops)["__compatible_ops__"] = {}
    # A backend left by a former engine of this process holds its destroyed group.
    deepspeed_comm.cdb = None
    engine, *_ = deepspeed.initialize(model=policy, model_parameters=list(policy.parameters()), config=_config(recipe))
    return engine


def _config(recipe: Recipe) -> dict[str, Any]:
    learner = recipe.learner
    return {
        # Real sizes vary; the caller sets every accumulation boundary itself.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2**31,
        "gradient_clipping": learner.gradient_clip if learner.zero_stage else 0.0,
        "zero_optimization": {"stage": learner.zero_stage, "overlap_comm": False, "contiguous_gradients": True},
        # Unlike DeepSpeed's own Adams, torch's needs no compiler at start.
        "optimizer": {
            "type": "AdamW",
            "params": {
                "torch_adam": True, "fused": True, "lr": learner.learning_rate, "betas": [0.9, 0.999], "eps": 1e-8,
                "weight_decay": learner.weight_decay,
            },
        },
        "bf16": {"enabled": learner.dtype == "bfloat16", "check_grad_overflow": True},
    }  # fmt: skip
