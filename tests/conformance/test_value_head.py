"""PPO with a value head: loss and gradient equal those of a dense float64 computation, for any cut of the work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.training.minibatches import filler
from learner.training.process_group import Ranks
from learner.training.token_advantages import with_advantages
from services.settings import Recipe, ValueSettings
from services.streams.delivery.payloads import SamplePayload
from tests.conformance import dense
from tests.learner.cases import PPO, TEMPERATURE, Case, recipe, run_case, scaled, shifted, step_data, value_weight

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
    pytest.mark.conformance(
        formula="gradient of the clipped objective with GAE's advantages plus c1 x the clipped value loss (PPO Eq. 9)",
        setting="advantage = gae",
    ),
]
CASE = Case("ppo", stage=0, dtype="float64", algorithm=PPO, given_proximal=True)
Found = dict[str, Tensor]


def advantages(values: Tensor, reward: float, wanted: Recipe) -> Tensor:
    """GAE of one response, by its recursion from the last token back."""
    value, found, following = wanted.algorithm.value, [], 0.0
    after = [*values.tolist()[1:], 0.0]
    for index in reversed(range(len(values))):
        earned = reward if index == len(values) - 1 else 0.0
        delta = earned + value.discount * after[index] - float(values[index])
        following = delta + value.discount * value.gae_lambda * following
        found.append(following)
    return torch.tensor(found[::-1], dtype=torch.float64)


def values_of(model: torch.nn.Module, head: Tensor, payload: SamplePayload) -> Tensor:
    """The values [n] at the positions that predict the n tokens of a response."""
    ids = torch.from_numpy(np.concatenate([payload.prompt_ids, payload.response_ids]).astype(np.int64))[None]
    hidden = model.model(input_ids=ids).last_hidden_state[0]
    return (hidden[len(payload.prompt_ids) - 1 : -1] @ head.T)[:, 0]


def term(
    logprobs: Tensor, entropy: Tensor, before: Tensor, sampled: Tensor, anchor: Tensor, advantage: Tensor
) -> Tensor:
    """The objective of each token of a response [n], with the settings of PPO in tests/learner/cases.py."""
    ratio, importance = torch.exp(logprobs - before), torch.exp(before - sampled)
    objective = torch.minimum(ratio * advantage, ratio.clamp(0.85, 1.25) * advantage)
    objective = torch.where(advantage < 0, torch.maximum(objective, 1.5 * advantage), objective)
    gap = anchor - logprobs
    return importance.clamp(max=1.2) * objective - 0.3 * (torch.exp(gap) - gap - 1) + 0.05 * entropy


def dense_step(folder: Path) -> tuple[float, Found]:
    """The loss of the only mini-batch, and its gradient by parameter name, with no micro-batches and no shared rows."""
    wanted = recipe(folder, CASE)
    batch, payloads = step_data(folder, CASE.data)
    model = dense.load(folder)
    head = value_weight(model.config.hidden_size).requires_grad_()
    policy = dense.evaluated(model, batch.groups, payloads, TEMPERATURE)
    anchor = dense.evaluated(scaled(model), batch.groups, payloads, TEMPERATURE)
    rewards = {sample.payload: sample.advantage for group in batch.groups for sample in group.samples}
    values = {key: values_of(model, head, payloads[key]) for key in policy}
    raw = {key: advantages(values[key].detach(), rewards[key], wanted) for key in policy}
    everything = torch.cat(list(raw.values()))
    spread = torch.sqrt(everything.var(correction=0) + 1e-8)
    groups: dict[str, list[Tensor]] = {}
    for key, (logprobs, entropy) in policy.items():
        sampled = torch.from_numpy(payloads[key].behaviour_logprobs).double()
        whitened = (raw[key] - everything.mean()) / spread
        worth = term(logprobs, entropy, shifted(sampled), sampled, anchor[key][0].detach(), whitened)
        # The values have not moved since the start of the rollout step, so none is clipped.
        error = (values[key] - (raw[key] + values[key].detach())).square() / 2
        groups.setdefault(key.partition(":")[0], []).append(worth - 0.3 * error)
    loss = -torch.stack([torch.cat(group).mean() for group in groups.values()]).mean()
    loss.backward()
    gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
    return float(loss.detach()), gradient | {"value_head.weight": head.grad}


def gradient_of(found: Found) -> Found:
    """Adam's first moments are a tenth of the gradient after one step."""
    return {name.removeprefix("moment."): 10 * moment for name, moment in found.items() if name.startswith("moment.")}


def difference(found: Found, expected: Found) -> float:
    """The error of the gradient relative to its norm."""
    assert found.keys() == expected.keys()
    gap = torch.cat([(found[name].double() - expected[name]).flatten() for name in expected])
    return float(gap.norm() / torch.cat([part.flatten() for part in expected.values()]).norm())


CUTS = {
    "whole": CASE,
    "split": replace(CASE, budget=40),
    "one-response-each": replace(CASE, budget=1, share_prompts=False),
    "checkpointed": replace(CASE, budget=40, checkpointing=True),
    "backwards": replace(CASE, budget=40, backwards=True),
}


@pytest.mark.parametrize("name", CUTS)
def test_the_gradient_is_that_of_the_dense_loss(name: str, policy: Path, ranks: Ranks) -> None:
    loss, gradient = dense_step(policy)
    found, trained = run_case(policy, CUTS[name], ranks)
    assert trained.optimizer[0].loss == pytest.approx(loss, rel=1e-10)
    assert difference(gradient_of(found), gradient) < 1e-10
    assert float(gradient["value_head.weight"].norm()) > 1e-3, "the value head learns"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_gradient_with_zero(stage: int, policy: Path, ranks: Ranks) -> None:
    """In float32: 1e-4 is ten times what DeepSpeed's sums lose here, and far below any term of the loss."""
    _, gradient = dense_step(policy)
    found, _ = run_case(policy, replace(CASE, stage=stage, dtype="float32", budget=40), ranks)
    assert difference(gradient_of(found), gradient) < 1e-4


def test_the_head_has_a_learning_rate_of_its_own(policy: Path, ranks: Ranks) -> None:
    """Adam's first step moves each weight by its learning rate, whatever the gradient."""
    value = {**PPO["value"], "learning_rate": 1e-4}
    case = replace(CASE, algorithm={**PPO, "value": value}, given_proximal=False)
    found, _ = run_case(policy, case, ranks)
    moved = found["weight.value_head.weight"] - value_weight(found["weight.value_head.weight"].shape[1])
    # Adam's step, and weight decay of 0.1 at the same rate
    assert moved.abs().median().item() == pytest.approx(1e-4, rel=0.05)


def test_values_are_reported(policy: Path, ranks: Ranks) -> None:
    _, trained = run_case(policy, CASE, ranks)
    assert trained.metrics["value_loss"] > 0
    assert trained.metrics["value_explained_variance"] < 1
    assert trained.metrics["value_clip_share"] == 0
    assert "zero_advantage_share" not in trained.metrics, "advantages differ within a response"
    _, two_steps = run_case(policy, replace(CASE, data="four", mini_batch_groups=2), ranks)
    assert 0 < two_steps.metrics["value_clip_share"] < 1, "the second optimizer step starts from moved values"
    _, without = run_case(policy, replace(CASE, algorithm={}), ranks)
    assert not {name for name in without.metrics if "value" in name or "return" in name}


def test_a_filler_does_not_enter_the_whitening() -> None:
    """Its value is that of a meaningless token; two real tokens with rewards 1 and -1 are whitened to themselves."""
    real = replace(filler(), data=replace(filler().data, weight=torch.ones(1, dtype=torch.float64)))
    work = [
        [replace(real, data=replace(real.data, advantage=torch.tensor([reward]))) for reward in (1.0, -1.0)]
        + [filler()]
    ]
    values = [[torch.zeros(1), torch.zeros(1), torch.full((1,), 50.0)]]
    found, _ = with_advantages(work, values, ValueSettings(), lambda total: total)
    assert [float(batch.data.advantage) for batch in found[0][:2]] == pytest.approx([1.0, -1.0])
