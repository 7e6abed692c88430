"""A float32 head on bfloat16 weights: exact logits, a gradient for the weights, at any ZeRO stage, tied or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from learner.training.minibatches import MicroBatch, PlannedSample, micro_batches
from learner.training.network.policy import PolicyModel, can_share_prompts, inputs, load_policy
from learner.training.process_group import Ranks
from learner.training.trainer import Trainer
from services.settings import Recipe, parse_recipe
from services.streams.delivery.payloads import SamplePayload
from tests.harness.small_run import recipe_document
from tests.harness.tiny_model import write_tiny_model
from tests.learner.cases import step_data

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:(torch|deepspeed)") for kind in ("DeprecationWarning", "FutureWarning")
]
FLOAT32_HEAD = pytest.mark.conformance(formula="logits = float32(h) float32(W)^T", setting="model.head_dtype")


def batch() -> MicroBatch:
    draw = np.random.default_rng(0)
    prompt, ids = (draw.integers(0, 107, size, dtype=np.int32) for size in (6, 60))
    payload = SamplePayload(prompt, ids, np.zeros(60, np.float32), "", "stop", ())
    [found] = micro_batches([PlannedSample("k", "g", 60, 1.0, 1.0)], {"k": payload}, 100, share_prompts=False)
    return found


def exact(policy: PolicyModel, part: MicroBatch, weight: Tensor) -> Tensor:
    """The log-probs of the policy's own hidden states with the head `weight`, in float64."""
    hidden = policy.causal_lm.base_model(input_ids=part.input_ids, position_ids=part.position_ids).last_hidden_state
    logits = hidden.reshape(-1, hidden.shape[-1])[part.source].double() @ weight.T
    return torch.log_softmax(logits, -1).gather(1, part.targets[:, None])[:, 0]


@FLOAT32_HEAD
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_exact_and_their_gradient_flows(tmp_path: Path, tied: bool) -> None:
    folder, part = write_tiny_model(tmp_path, tied=tied, scale=0.2), batch()
    errors = {}
    for head_dtype in (None, "float32"):
        policy = load_policy(folder, "bfloat16", 1.0, head_dtype=head_dtype)
        head = policy.causal_lm.get_output_embeddings().weight
        weight = head.detach().double().requires_grad_()
        found, expected = policy(**inputs(part))[0], exact(policy, part, weight)
        errors[head_dtype] = float((found - expected).detach().abs().max())
        assert found.dtype == torch.float32
        if not tied and head_dtype:  # a tied head also has the gradient of the embedding
            found.sum().backward()
            expected.sum().backward()
            assert head.grad is not None
            assert weight.grad is not None
            assert head.grad.dtype == torch.bfloat16
            assert float((head.grad - weight.grad).norm() / weight.grad.norm()) < 3e-3
    assert errors["float32"] < 1e-4 < 1e-2 < errors[None]


def recipe(folder: Path, stage: int, **algorithm: Any) -> Recipe:
    learner = {"zero_stage": stage, "dtype": "bfloat16", "micro_batch_tokens": 40}
    algorithm = {"group_size": 3, **algorithm}
    document = recipe_document(folder, model={"head_dtype": "float32"}, learner=learner, algorithm=algorithm)
    return parse_recipe(document)


@FLOAT32_HEAD
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_trains_with_it(tmp_path: Path, ranks: Ranks, stage: int) -> None:
    """The first loss and gradient norm of each stage are those of stage 0; the reference policy has the head too."""
    folder, steps = write_tiny_model(tmp_path, scale=0.2), []
    drawn, payloads = step_data(folder, "mixed")
    for which in (0, stage):
        trainer = Trainer(folder, recipe(folder, which, kl_coefficient=0.1), ranks)
        trained = trainer.train(trainer.plan(drawn), payloads)
        assert trained.optimizer_steps == 2
        assert (trained.metrics["kl_reference"] > 0) == (trained.metrics["ratio_mean"] != 1)
        steps.append(trained.optimizer[0])
        trainer.close()
    assert steps[1].loss == pytest.approx(steps[0].loss, rel=1e-4)
    assert steps[1].gradient_norm == pytest.approx(steps[0].gradient_norm, rel=1e-2)


def test_it_is_part_of_the_layouts_check(tmp_path: Path) -> None:
    assert can_share_prompts(load_policy(write_tiny_model(tmp_path, scale=0.2), "bfloat16", 1.0, head_dtype="float32"))
