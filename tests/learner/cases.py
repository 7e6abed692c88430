"""Owns one rollout step's data for the gradient tests, and what DeepSpeed makes of it, on any number of ranks.

Must not be used outside tests. Run as a program it is one rank.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from safetensors.torch import save_file

from learner.batches import micro_batches
from learner.ranks import Ranks
from learner.trainer import Trained, Trainer, leave
from services.contracts import Batch, BatchGroup, BatchSample, SamplerState
from services.settings import Recipe, parse_recipe
from services.streams.payloads import SamplePayload

VOCABULARY = 107


@dataclass(frozen=True)
class Case:
    """A way to run the same rollout step. The result must not depend on stage, budget, ranks or `share_prompts`."""

    name: str
    stage: int = 1
    budget: int = 2048
    reduction: str = "token"
    share_prompts: bool = True
    mini_batch_groups: int = 3
    gradient_clip: float = 1e9
    short_cut: bool = True


CASES = {
    one.name: one
    for one in (
        Case("whole"),
        Case("split", budget=40),
        Case("plain-rows", budget=64, share_prompts=False),
        Case("stage-0", stage=0, budget=100),
        Case("stage-2", stage=2, budget=40),
        Case("stage-3", stage=3, budget=100),
        Case("group-token", budget=100, reduction="group_token"),
        Case("clipped", stage=2, budget=100, gradient_clip=0.5),
        Case("two-steps", budget=100, mini_batch_groups=2, gradient_clip=0.5),
        Case("two-steps-recomputed", budget=100, mini_batch_groups=2, gradient_clip=0.5, short_cut=False),
    )
}


def recipe(folder: Path, case: Case) -> Recipe:
    return parse_recipe({
        "name": "case", "model": {"path": str(folder)}, "rollout": {"temperature": 0.7},
        "algorithm": {"group_size": 3, "reduction": case.reduction},
        "learner": {
            "zero_stage": case.stage, "micro_batch_tokens": case.budget, "learning_rate": 1e-2,
            "weight_decay": 0.1, "warmup_rollout_steps": 0, "gradient_clip": case.gradient_clip, "mini_batch_groups": case.mini_batch_groups,
            "ranks": 1,
        },
        "limits": {"rollout_steps": 1, "groups_per_step": 6},
    })  # fmt: skip


def step_data(groups: int) -> tuple[Batch, dict[str, SamplePayload]]:
    """`groups` groups of three responses of 1 to 9 tokens; one of them is masked, one behaves off-policy."""
    draw = np.random.default_rng(7)
    payloads = {}
    members = []
    for group in range(groups):
        prompt = draw.integers(0, VOCABULARY, 6 + group, dtype=np.int32)
        samples = []
        for index in range(3):
            tokens = int(draw.integers(1, 10))
            key = f"{group}:{index}"
            payloads[key] = SamplePayload(
                prompt, draw.integers(0, VOCABULARY, tokens, dtype=np.int32),
                draw.normal(-6.0, 2.0, tokens).astype(np.float32), "", "stop", (),
            )  # fmt: skip
            samples.append(BatchSample(
                payload=key, tokens=tokens, advantage=float(draw.normal()), reward=1.0, correct=True,
                masked=(group, index) == (1, 1), staleness=0,
            ))  # fmt: skip
        members.append(BatchGroup(group=f"g{group}", samples=tuple(samples)))
    batch = Batch(
        step=0, version=0, groups=tuple(members), sampler_state=SamplerState(cursor=0, next_group=0),
        sampling_metrics={}, generation_started_at=0.0, generation_finished_at=0.0,
    )  # fmt: skip
    return batch, payloads


def groups_of(case: Case) -> int:
    return 4 if case.name.startswith("two-steps") else 3


def run_case(folder: Path, case: Case, ranks: Ranks) -> tuple[dict[str, torch.Tensor], Trained]:
    """One rollout step: Adam's first moment (0.1 x the last clipped gradient at one step) and the weights after it."""
    trainer = Trainer(folder, recipe(folder, case), ranks, short_cut=case.short_cut)
    trainer._share_prompts = trainer._share_prompts and case.share_prompts
    batch, payloads = step_data(groups_of(case))
    plans = trainer.plan(batch)
    own = {one.payload for plan in plans for one in plan.shares[ranks.rank]}
    trained = trainer.train(plans, {key: payloads[key] for key in own})
    found = {}
    for name, parameter in trainer.causal_lm.named_parameters():
        with trainer.gathered([parameter]):
            found[f"weight.{name}"] = parameter.detach().clone()
        found[f"moment.{name}"] = _moment(trainer, case, parameter).clone()
    trainer.close()
    return found, trained


def _moment(trainer: Trainer, case: Case, parameter: Any) -> torch.Tensor:
    if case.stage == 0:
        return trainer._engine.optimizer.state[parameter]["exp_avg"]
    return safe_get_full_optimizer_state(parameter, "exp_avg")


def micro_batch_count(case: Case) -> int:
    """How many micro-batches one rank makes of the first mini-batch: a case that should split must."""
    from learner.batches import plan_step

    batch, payloads = step_data(groups_of(case))
    plan = plan_step(batch, case.mini_batch_groups, case.reduction, 1)[0]
    return len(micro_batches(plan.shares[0], payloads, case.budget, share_prompts=case.share_prompts))


def main(folder: str, rank: str, world: str, port: str, out: str, *names: str) -> None:
    """Run cases as one rank among `world`; rank 0 writes what it found, per case."""
    torch.set_num_threads(1)
    ranks = Ranks(int(rank), int(world), "127.0.0.1", int(port), timeout_s=100)
    for name in names:
        found, trained = run_case(Path(folder), CASES[name], ranks)
        if ranks.rank == 0:
            values = {key: torch.tensor([value], dtype=torch.float64) for key, value in trained.metrics.items()}
            metrics = {f"metric.{key}": value for key, value in values.items()}
            save_file(found | metrics, f"{out}/{name}.safetensors")
    leave(ranks)


if __name__ == "__main__":
    main(*sys.argv[1:])
