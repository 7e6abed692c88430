"""With bfloat16 weights, the gradients of many micro-batches add up in float32: none is rounded away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.algorithm.loss import token_loss
from learner.training.network.policy import inputs, load_policy
from learner.training.process_group import Ranks
from learner.training.trainer import Trainer
from services.contracts import Batch
from services.streams.delivery.payloads import SamplePayload
from tests.learner.cases import MASKED, RESPONSES, TEMPERATURE, Case, moment, open_trainer, step_data

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:(torch|deepspeed)") for kind in ("DeprecationWarning", "FutureWarning")
]
LENGTHS = np.random.default_rng(0).integers(3, 20, (4, 16)).tolist()
CASE = Case("many", dtype="bfloat16", budget=1, data="many", mini_batch_groups=4, share_prompts=False)
"""64 responses, each in a micro-batch of its own, in one optimizer step."""
Gradient = dict[str, Tensor]


def added_up(trainer: Trainer, folder: Path, data: tuple[Batch, dict[str, SamplePayload]]) -> tuple[Gradient, Gradient]:
    """The sum of the micro-batches' bfloat16 gradients in float64, and in bfloat16."""
    batch, payloads = data
    model, exact, rounded = load_policy(folder, "bfloat16", TEMPERATURE), Gradient(), Gradient()
    names = [name for name, _ in model.causal_lm.named_parameters()]
    [work] = trainer._micro_batches(trainer.plan(batch), payloads)
    assert len(work) == 64
    for part in work:
        found, entropy, _ = model(**inputs(part))
        loss = token_loss(found, entropy, found.detach(), part.data, trainer._loss).loss
        for name, gradient in zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            exact[name] = exact.get(name, 0) + gradient.double()
            rounded[name] = rounded.get(name, 0) + gradient
    return exact, rounded


def error(found: Gradient, exact: Gradient) -> float:
    """The relative error of a gradient."""
    left, right = (torch.cat([part[name].double().flatten() for name in exact]) for part in (found, exact))
    return float((left - right).norm() / right.norm())


@pytest.mark.conformance(formula="g = sum of micro-batches, in float32", setting="learner.dtype = bfloat16")
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_no_gradient_is_rounded_away(stage: int, policy: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RESPONSES, "many", LENGTHS)
    monkeypatch.setitem(MASKED, "many", set())
    case = replace(CASE, stage=stage)
    trainer, data = open_trainer(policy, case, ranks), step_data(policy, "many")
    exact, rounded = added_up(trainer, policy, data)
    trained = trainer.train(trainer.plan(data[0]), data[1])
    found = {name: moment(trainer, case, name, ranks) / 0.1 for name in exact}
    assert error(found, exact) < 1e-6
    assert error(rounded, exact) > 5e-3, "the test would not notice bfloat16 sums"
    norm = float(torch.cat([gradient.flatten() for gradient in exact.values()]).norm())
    assert trained.optimizer[0].gradient_norm == pytest.approx(norm, rel=1e-6)
    trainer.close()
