"""The benchmark of a learner's step: both sides train the same gradient, and operations are counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks.learner.gpu.flops import drawn_flops
from benchmarks.learner.gpu.workload import Shape
from benchmarks.learner.step.command import TARGETS, figures_of, panel_of
from benchmarks.learner.step.padded import PaddedLoop
from benchmarks.learner.step.sides import Side, gemm_peak, measured
from benchmarks.learner.step.workload import DEMO, WORKS, Work, recipe_of, shape_of
from learner.training.process_group import Ranks
from learner.training.shares import PlannedSample
from learner.training.trainer import Trainer
from services.settings import parse_recipe
from services.streams.delivery.payloads import SamplePayload

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:(torch|deepspeed)") for kind in ("DeprecationWarning", "FutureWarning")
]
SMALL = Work("small", 4, 3, 5, 2, 12, 32, 2)


def test_both_sides_train_the_same_gradient(policy: Path, ranks: Ranks) -> None:
    """Two optimizer steps: their losses and norms, and both of Adam's moments of every parameter."""
    recipe = recipe_of(policy, SMALL, 1)
    batch, payloads = SMALL.step(shape_of(policy).vocabulary, 3)
    trainer, loop = Trainer(policy, recipe, ranks), PaddedLoop(policy, recipe, SMALL)
    trained, steps = trainer.train(trainer.plan(batch), payloads), loop.train(batch, payloads)
    assert len(steps) == len(trained.optimizer) == 2
    for (loss, norm), step in zip(steps, trained.optimizer, strict=True):
        assert (step.loss, step.gradient_norm) == pytest.approx((loss, norm), rel=1e-4, abs=1e-6)
    learned = trainer._engine.optimizer.state
    for (name, ours), theirs in zip(trainer._named().items(), loop.model.parameters(), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            found, expected = learned[ours][moment], loop.optimizer.state[theirs][moment]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()), msg=name)
    trainer.close()


def test_the_padded_loop_does_not_sort(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its micro-batches follow the order of the batch, so that a short response is padded to a long one beside it."""
    loop, order, logprobs = PaddedLoop(policy, recipe_of(policy, SMALL, 1), SMALL), [], PaddedLoop._logprobs

    def noted(loop: PaddedLoop, rows: Sequence[PlannedSample], payloads: dict[str, SamplePayload]) -> torch.Tensor:
        if torch.is_grad_enabled():
            order.extend(row.payload for row in rows)
        return logprobs(loop, rows, payloads)

    monkeypatch.setattr(PaddedLoop, "_logprobs", noted)
    batch, payloads = SMALL.step(shape_of(policy).vocabulary, 3)
    loop.train(batch, payloads)
    assert order == list(payloads)


def test_operations_by_hand() -> None:
    """A prompt of 3 once per group; the last token of a response is no input, but the head runs for each."""
    shape = Shape(hidden=4, layers=2, heads=1, key_value_heads=1, intermediate=8, vocabulary=10)
    others, attention = 100, 12 * 2 * 4
    prompts = 2 * 3 * (6 * others + attention * 3)
    inputs = 1 * (6 * others + attention * 4) + 4 * (6 * others + attention * 7) + 0
    assert drawn_flops(shape, others + 40, 3, [[2, 5], [1]]) == prompts + inputs + (2 + 5 + 1) * 6 * 40


def test_lengths_are_within_their_bounds() -> None:
    for work in WORKS.values():
        drawn = [tokens for members in work.lengths(0) for tokens in members]
        assert len(drawn) == work.groups * work.size
        assert work.shortest <= min(drawn) <= max(drawn) <= work.longest
        assert work.lengths(0) == work.lengths(0)
    assert [work.rows for work in WORKS.values()] == [14, 14, 8], "as the method says"


def test_the_demo_is_its_recipe() -> None:
    work, recipe = WORKS["demo"], parse_recipe(yaml.safe_load(DEMO.read_text()))
    assert (work.budget, work.mini) == (recipe.learner.micro_batch_tokens, recipe.learner.mini_batch_groups)
    assert (work.groups, work.size) == (recipe.limits.groups_per_step, recipe.algorithm.group_size)
    assert work.longest == recipe.rollout.max_new_tokens


def test_a_side_reports_what_it_did(policy: Path) -> None:
    side = measured(PaddedLoop(policy, recipe_of(policy, SMALL, 1), SMALL).train, policy, SMALL, 2)
    assert (len(side.seconds), len(side.flops)) == (2, 2)
    assert side.tokens == tuple(sum(map(sum, SMALL.lengths(seed))) for seed in range(2))
    assert min(*side.seconds, *side.flops, *side.peak_flops, side.peak_bytes) > 0
    assert gemm_peak(shape_of(policy), rows=(8,)) > 0


def test_the_figures_are_ratios_of_the_sides() -> None:
    learner = Side((2.0, 4.0), (10, 10), (30.0, 60.0), (20.0, 25.0), 2**30)
    padded = Side((5.0, 8.0), (10, 10), (30.0, 60.0), (20.0, 25.0), 2**31)
    found = {figure.name: figure for figure in figures_of("uniform", learner, padded)}
    assert found["uniform: learner / padded loop, tokens/s"].values == (2.5, 2.0)
    assert found["uniform: learner / padded loop, tokens/s"].target == TARGETS["uniform"]
    assert found["uniform: learner, share of the GEMM peak"].values == (0.6, 0.6)
    assert found["uniform: padded loop, peak memory"].values == (2.0,)
    assert panel_of("uniform", learner, padded).series[0].y == (5.0, 2.5)
