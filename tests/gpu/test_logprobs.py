"""A learner in bfloat16 on a device: its log-probs and gradients are those of float64 on the CPU, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from learner.algorithm.parity import OFF
from learner.training.minibatches import micro_batches
from learner.training.network.policy import inputs
from learner.training.process_group import Ranks
from tests.conformance.rounding import Exact, difference
from tests.gpu.exact import CASES, ROW_TOKENS, Known, errors, known, learned, rows, trainer_of
from tests.gpu.needs import device, needs
from tests.learner.cases import Case, recipe, run_case, step_data

pytestmark = needs(1)
STAGES = (1, 2, 3)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("head_dtype", [None, "float32"])
@pytest.mark.parametrize("name", ["dapo", "nuclei"])
def test_log_probs_are_exact_up_to_rounding(
    name: str, head_dtype: str | None, stage: int, policy: Path, ranks: Ranks
) -> None:
    """In rows of one response and in shared ones; both layouts have the same bounds."""
    case, data = replace(CASES[name], stage=stage), step_data(policy, CASES[name].data)
    expected = known(policy, name, float32_head=head_dtype is not None)
    with trainer_of(policy, case, ranks, head_dtype) as trainer:
        for share_prompts in (False, True):
            found = errors(learned(trainer, data, share_prompts=share_prompts), expected.logprobs)
            print(f"shared rows: {share_prompts}; {found} of {expected.bounds}")
            assert found.largest <= expected.bounds.largest
            assert found.typical <= expected.bounds.typical


def gradient_of(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adam's first moments are a tenth of the gradient after one step."""
    moments = {name: value for name, value in found.items() if name.startswith("moment.")}
    return {name.removeprefix("moment."): 10 * moment.cpu() for name, moment in moments.items()}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cut", [{}, {"budget": 40}, {"checkpointing": True}], ids=["whole", "split", "checkpointed"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_exact_up_to_rounding(
    name: str, cut: dict[str, int], stage: int, policy: Path, ranks: Ranks
) -> None:
    expected = known(policy, name)
    found, trained = run_case(policy, replace(CASES[name], stage=stage, **cut), ranks)
    [step] = trained.optimizer
    assert step.loss is not None
    apart = difference(gradient_of(found), expected.exact.gradient)
    gap = abs(step.loss - expected.exact.loss)
    print(f"|dL| = {gap:.1e}, |dg| / |g| = {apart:.1e} of {expected.bounds}")
    assert gap <= expected.bounds.loss
    assert apart <= expected.bounds.gradient


def _at_temperature_1(expected: Known) -> Exact:
    wanted = expected.problem.recipe
    rollout = wanted.rollout.model_copy(update={"temperature": 1.0})
    return replace(expected.problem, recipe=wanted.model_copy(update={"rollout": rollout})).exact()


def _without_a_group(expected: Known) -> Exact:
    return replace(expected.problem, groups=expected.problem.groups[:-1]).exact()


def _by_sample(expected: Known) -> Exact:
    wanted = expected.problem.recipe
    algorithm = wanted.algorithm.model_copy(update={"reduction": "sample"})
    return replace(expected.problem, recipe=wanted.model_copy(update={"algorithm": algorithm})).exact()


@pytest.mark.parametrize("fault", [_at_temperature_1, _without_a_group, _by_sample])
def test_the_bounds_reject_a_fault(fault: Callable[[Known], Exact], policy: Path) -> None:
    """Temperature left out, the shortest group left out, the wrong mean: each is beyond the bound of the gradient."""
    expected = known(policy, "dapo")
    assert difference(fault(expected).gradient, expected.exact.gradient) > expected.bounds.gradient


@torch.no_grad()
def test_a_float32_head_moves_no_token_by_a_percent(large_logits: Path, ranks: Ranks) -> None:
    """Against float64 logits of the learner's own hidden states, so that only the head's rounding is compared.

    A logit between 4 and 8 is rounded to bfloat16 by up to 2^-6, which is 1.6 %; to float32 by 2^-22.
    """
    case, data, off = Case("head", dtype="bfloat16"), step_data(large_logits, "mixed"), {}
    for head_dtype in (None, "float32"):
        with trainer_of(large_logits, case, ranks, head_dtype) as trainer:
            model, gaps = trainer.causal_lm, []
            trainer._engine.module.attend(in_rows=False)  # as in the engine's own passes over these rows
            weight = model.get_output_embeddings().weight.double()
            for _, row in rows(data, share_prompts=False):
                [part] = micro_batches(row, data[1], ROW_TOKENS, share_prompts=False)
                part = part.to(device(), torch.float32)
                hidden = model.base_model(input_ids=part.input_ids, position_ids=part.position_ids).last_hidden_state
                logits = hidden[0, part.source].double() @ weight.T / trainer._engine.module.temperature
                exact = torch.log_softmax(logits, -1).gather(1, part.targets[:, None])[:, 0]
                gaps.append(trainer._engine(**inputs(part)).logprobs.double() - exact)
            off[head_dtype] = float(((torch.exp(torch.cat(gaps)) - 1).abs() > OFF).double().mean())
    print(f"share of tokens off by more than 1 %: {off}")
    assert off["float32"] == 0 < (off[None] or 0)


@pytest.mark.parametrize("stage", STAGES)
def test_two_passes_over_the_same_tokens_agree(stage: int, policy: Path, ranks: Ranks) -> None:
    """Bit by bit: a forward pass on one device has no atomic additions, and no dropout."""
    data = step_data(policy, "uneven")
    with trainer_of(policy, replace(CASES["dapo"], stage=stage), ranks) as trainer:
        first, second = (learned(trainer, data, share_prompts=True) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_case_is_a_mini_batch(policy: Path) -> None:
    """So that the gradient of the only optimizer step is that of the dense computation."""
    for case in CASES.values():
        assert recipe(policy, case).learner.mini_batch_groups == len(step_data(policy, case.data)[0].groups)
