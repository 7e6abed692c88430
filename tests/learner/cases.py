"""Owns the data of a rollout step for the gradient tests, and the trainer's results for it, on any number of ranks.

Must not be used outside tests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.algorithm import logprobs
from learner.training import deepspeed_engine
from learner.training.minibatches import MicroBatch, longest_shared_row, micro_batches, plan_step
from learner.training.process_group import Ranks
from learner.training.results import Trained
from learner.training.state import STAGES
from learner.training.trainer import Trainer
from services.contracts import Batch, BatchGroup, BatchSample, VersionSpan
from services.settings import LearnerSettings, Recipe, parse_recipe
from services.streams.delivery.nucleus import Nuclei
from services.streams.delivery.payloads import SamplePayload
from tests.conformance import dense
from tests.conformance.widened import in_float64
from tests.harness.batches import batch_with

VOCABULARY = 107
TEMPERATURE = 0.7
CHUNK_TOKENS = 32
REFERENCE_SCALE = 1.0625
"""The factor on the reference policy's weights, so that the KL term has a gradient from the start."""

EVERYTHING = {
    "clip_low": 0.15,
    "clip_high": 0.25,
    "dual_clip": 1.5,
    "correction": "truncated_is_sequence",
    "correction_cap": 1.2,
    "kl_coefficient": 0.3,
    "entropy_coefficient": 0.05,
    "reduction": "group_token",
}
PPO = EVERYTHING | {
    "correction": "truncated_is",
    "advantage": "gae",
    "value": {"discount": 0.99, "gae_lambda": 0.9, "clip": 0.05, "coefficient": 0.3, "learning_rate": 1e-2},
}
ICEPOP = EVERYTHING | {"correction": "icepop", "icepop_low": 0.8, "icepop_high": 1.2, "reduction": "sample"}

DTYPES = {"float32": torch.float32, "float64": torch.float64}
RESPONSES = {
    "mixed": [[4, 9, 1], [6, 3, 8], [2, 7, 5]],
    "four": [[4, 9, 1], [6, 3, 8], [2, 7, 5], [8, 1, 3]],
    "lopsided": [[170, 50, 60], [1, 2, 1], [2, 1, 3]],
    "uneven": [[70, 50, 60], [1, 2, 1], [2, 1, 3]],
    "single": [[3, 7, 2]],
    "nuclei": [[4, 9, 1], [6, 3, 8], [2, 7, 5], [8, 1, 3]],
}
"""Tokens of each group's responses. Those of `nuclei` were each drawn from 1 to 9 tokens."""
MASKED = {
    "mixed": {(1, 1)},
    "four": {(1, 1)},
    "lopsided": set(),
    "uneven": set(),
    "single": {(0, 0), (0, 2)},
    "nuclei": {(1, 1)},
}


LARGE = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
"""At ZeRO stage 3 a tensor stays whole on every rank if it has at most 100,000 elements, or if it is used again within
1e9 elements. The tiny model is below both, so DeepSpeed would never gather a tensor twice, and most of them never."""


@dataclass(frozen=True)
class Case:
    """A way to run a rollout step. Its gradient must follow from `data`, `algorithm` and `given_proximal` alone.

    `given_proximal`: ratios compare with `shifted` behaviour, so that clips and corrections apply at the first step.
    `widened`: float64 with ZeRO, which no recipe may request, through tests/conformance/widened.py.
    """

    name: str
    stage: int = 1
    dtype: str = "float32"
    budget: int = 2048
    data: str = "mixed"
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    given_proximal: bool = False
    share_prompts: bool = True
    checkpointing: bool = False
    backwards: bool = False
    mini_batch_groups: int = 3
    gradient_clip: float = 1e9
    short_cut: bool = True
    widened: bool = False
    head_dtype: str | None = None


def recipe(folder: Path, case: Case) -> Recipe:
    """The case's recipe; learning rates are high, and nothing is clipped unless the case has a clip."""
    if case.widened:
        allowed = recipe(folder, replace(case, stage=0, widened=False))
        learner = allowed.learner.model_copy(update={"zero_stage": case.stage})
        return allowed.model_copy(update={"learner": learner})
    return parse_recipe(
        {
            "name": "case",
            "model": {"path": str(folder), "head_dtype": case.head_dtype},
            "rollout": {"temperature": TEMPERATURE},
            "algorithm": {"group_size": 3, **case.algorithm},
            "learner": {
                "zero_stage": case.stage,
                "dtype": case.dtype,
                "micro_batch_tokens": case.budget,
                "learning_rate": 1e-2,
                "weight_decay": 0.1,
                "warmup_rollout_steps": 0,
                "gradient_clip": case.gradient_clip,
                "mini_batch_groups": case.mini_batch_groups,
                "activation_checkpointing": case.checkpointing,
                "ranks": 1,
            },
            "limits": {"rollout_steps": 1, "groups_per_step": 6 * case.mini_batch_groups, "max_inflight_groups": 64},
        }
    )


def shifted(behaviour: Tensor) -> Tensor:
    """Proximal log-probs that differ from `behaviour` [N] by up to 0.4 nats, a different way for each token."""
    exact = behaviour.double()
    return (exact + 0.4 * torch.sin(37 * exact)).to(behaviour.dtype)


def proximal_of(case: Case) -> dense.Proximal:
    """The log-probs with which the case's ratios compare at the first optimizer step."""
    if case.given_proximal:
        return lambda payload, current: shifted(dense.behaviour(payload, current))
    return dense.behaviour if case.algorithm.get("proximal") == "behaviour" else dense.own


@torch.no_grad()
def scaled(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of `model` that serves as its reference policy."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.mul_(REFERENCE_SCALE)
    return other


def drawn_nuclei(draw: np.random.Generator, answer: NDArray[np.int32]) -> Nuclei:
    """A nucleus of 1 to 9 tokens for each token of `answer`, in any order."""
    rows = []
    for token in answer:
        others = draw.permutation(np.delete(np.arange(VOCABULARY, dtype=np.int32), token))[: draw.integers(9)]
        rows.append(draw.permutation(np.append(others, token)))
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return Nuclei(np.concatenate(rows), offsets)


def step_data(folder: Path, data: str, *, backwards: bool = False) -> tuple[Batch, dict[str, SamplePayload]]:
    """Groups of three responses, sampled off-policy: behaviour is about 0.6 nats from the policy in `folder`."""
    draw = np.random.default_rng(7)
    model = dense.load(folder)
    payloads = {}
    members = []
    for group, lengths in enumerate(RESPONSES[data]):
        prompt = draw.integers(0, VOCABULARY, 6 + group, dtype=np.int32)
        samples = []
        for index, tokens in enumerate(lengths):
            key = f"{group}:{index}"
            answer = draw.integers(0, VOCABULARY, tokens, dtype=np.int32)
            nuclei = drawn_nuclei(draw, answer) if data == "nuclei" else None
            payloads[key] = SamplePayload(prompt, answer, np.zeros(tokens, np.float32), "", "stop", (), nuclei)
            with torch.no_grad():
                current = dense.response(model, payloads[key], TEMPERATURE)[0].numpy()
            behaviour = (current + draw.normal(0.0, 0.6, tokens)).astype(np.float32)
            # All but the first token are of the version that trains them.
            spans = (VersionSpan(version=-1, start=0, end=1), VersionSpan(version=0, start=1, end=tokens))
            payloads[key] = SamplePayload(prompt, answer, behaviour, "", "stop", spans, nuclei)
            samples.append(
                BatchSample(
                    payload=key,
                    tokens=tokens,
                    advantage=float(draw.normal()),
                    reward=1.0,
                    correct=True,
                    masked=(group, index) in MASKED[data],
                    staleness=0,
                    replica=f"rollout-{index % 2}",
                )
            )
        samples = samples[::-1] if backwards else samples
        members.append(BatchGroup(group=f"g{group}", samples=tuple(samples), prompt_tokens=len(prompt)))
    batch = batch_with(members[::-1] if backwards else members)
    return batch, payloads


@contextmanager
def large_for_zero(**settings: int) -> Iterator[None]:
    """Trainers created in the body gather and release each tensor, as those of a large model. `settings`: more ones."""
    with pytest.MonkeyPatch.context() as patch:
        zero = deepspeed_engine._zero

        def changed(learner: LearnerSettings) -> dict[str, Any]:
            config = zero(learner)
            return config | {"zero_optimization": config["zero_optimization"] | LARGE | settings}

        patch.setattr(deepspeed_engine, "_zero", changed)
        yield


def open_trainer(folder: Path, case: Case, ranks: Ranks) -> Trainer:
    """The case's trainer, with a reference policy that differs from the initial one."""
    with large_for_zero():
        trainer = Trainer(folder, recipe(folder, case), ranks, short_cut=case.short_cut)
    trainer._share_prompts = trainer._share_prompts and case.share_prompts
    if case.given_proximal:
        trainer._start._proximal = lambda work, known=None: [
            [shifted(micro_batch.data.behaviour) for micro_batch in part] for part in work
        ]  # type: ignore[method-assign]
    if trainer._engine.module.value_head is not None:
        _set_value_head(trainer, trainer._engine.module.value_head.weight)
    if trainer._reference is not None:
        _scale(trainer, list(trainer._reference.parameters()))
    return trainer


def value_weight(width: int) -> Tensor:
    """The value head of the cases, float64 [1, width]: its values are about as large as rewards."""
    return torch.sin(torch.arange(width, dtype=torch.float64))[None] / width**0.5


def _set_value_head(trainer: Trainer, weight: Any) -> None:
    with _modified(trainer, [weight]):
        weight.copy_(value_weight(getattr(weight, "ds_shape", weight.shape)[1]))


def _scale(trainer: Trainer, parameters: list[Any]) -> None:
    with _modified(trainer, parameters):
        for parameter in parameters:
            parameter.mul_(REFERENCE_SCALE)


@contextmanager
def _modified(trainer: Trainer, parameters: list[Any]) -> Iterator[None]:
    """Make `parameters` whole, and keep what the body, without gradient, does to them."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0, enabled=trainer.partitioned), torch.no_grad():
        yield


def run_case(
    folder: Path, case: Case, ranks: Ranks, watch: Callable[[Trainer], object] = lambda trainer: None
) -> tuple[dict[str, Tensor], Trained]:
    """One rollout step: Adam's first moment (0.1 x the last clipped gradient at one step) and the weights after it.

    `watch` is called with the trainer before the step.
    """
    with pytest.MonkeyPatch.context() as patch, in_float64() if case.widened else nullcontext():
        # Small chunks, so that ranks run the head a different number of times.
        patch.setattr(logprobs, "CHUNK_TOKENS", CHUNK_TOKENS)
        trainer = open_trainer(folder, case, ranks)
        watch(trainer)
        return _run(trainer, folder, case, ranks)


def _run(trainer: Trainer, folder: Path, case: Case, ranks: Ranks) -> tuple[dict[str, Tensor], Trained]:
    batch, payloads = step_data(folder, case.data, backwards=case.backwards)
    plans = trainer.plan(batch)
    own = {sample.payload for plan in plans for sample in plan.shares[ranks.rank]}
    trained = trainer.train(plans, {key: payloads[key] for key in own}, batch.version)
    found = {}
    for name, parameter in trainer._named().items():
        with trainer.gathered([parameter]):
            found[f"weight.{name}"] = parameter.detach().clone()
        found[f"moment.{name}"] = moment(trainer, case, name, ranks).clone()
    trainer.close()
    return found, trained


def moment(trainer: Trainer, case: Case, name: str, ranks: Ranks) -> Any:
    """Adam's first moment of a parameter, whole on rank 0. Collective."""
    parameter = trainer._named()[name]
    if case.stage == 0:
        optimizer = trainer._engine.optimizer
        return optimizer.state[_master(optimizer, parameter)]["exp_avg"]
    if case.stage == 3:
        from deepspeed.utils import safe_get_full_optimizer_state

        return safe_get_full_optimizer_state(parameter, "exp_avg")
    # DeepSpeed's own function rounds to float32, and does not find the second group of parameters.
    return STAGES[case.stage](trainer._engine, trainer._named(), ranks)._whole(name, "exp_avg", 0)


def _master(optimizer: Any, parameter: Any) -> Any:
    """The float32 weights that Adam updates at stage 0: in bfloat16, DeepSpeed keeps them beside the parameters."""
    groups = zip(getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", []), strict=True)
    pairs = [pair for rounded, masters in groups for pair in zip(rounded, masters, strict=True)]
    return next((master for rounded, master in pairs if rounded is parameter), parameter)


def micro_batch_counts(folder: Path, case: Case, ranks: int) -> list[int]:
    """The number of micro-batches of each of `ranks` in the first mini-batch, before fillers."""
    return [len(part) for part in micro_batches_of(folder, case, ranks)]


def micro_batches_of(folder: Path, case: Case, ranks: int) -> list[list[MicroBatch]]:
    """The micro-batches of each of `ranks` in the first mini-batch, before fillers."""
    batch, payloads = step_data(folder, case.data)
    row_tokens = longest_shared_row(case.budget, share_prompts=case.share_prompts)
    plan = plan_step(batch, case.mini_batch_groups, "token", ranks, longest=1, row_tokens=row_tokens)[0]
    return [micro_batches(share, payloads, case.budget, share_prompts=case.share_prompts) for share in plan.shares]
