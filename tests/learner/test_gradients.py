"""A rollout step is AdamW on exact mini-batch gradients: several optimizer steps at one rate, clipped, recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from learner.training.process_group import Ranks
from learner.training.results import Trained
from learner.training.trainer import Trainer
from services.contracts import Batch
from services.streams.delivery.payloads import SamplePayload
from tests.conformance import dense
from tests.learner.cases import EVERYTHING, ICEPOP, Case, open_trainer, proximal_of, recipe, run_case, scaled, step_data

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:(torch|deepspeed)") for kind in ("DeprecationWarning", "FutureWarning")
]
Found = dict[str, Tensor]

CONSTANT = {"reduction": "constant_length", "constant_length": 37}
EXACT = Case("exact", stage=0, dtype="float64", budget=40, data="four", mini_batch_groups=2)
STEPS = {
    case.name: case
    for case in (
        replace(EXACT, name="two-steps", gradient_clip=1.0),
        replace(EXACT, name="recomputed", gradient_clip=1.0, short_cut=False),
        replace(EXACT, name="everything", algorithm=EVERYTHING),
        # Two micro-batches of different responses in each step, each with its own proximal and reference log-probs.
        replace(EXACT, name="micro-batches", budget=20, algorithm=EVERYTHING),
        replace(EXACT, name="nuclei", data="nuclei", short_cut=False),
        replace(EXACT, name="nuclei-everything", data="nuclei", algorithm=EVERYTHING, checkpointing=True),
        replace(EXACT, name="nuclei-zero-3", data="nuclei", stage=3, dtype="float32", gradient_clip=1.0),
        replace(EXACT, name="partial", mini_batch_groups=3, algorithm=ICEPOP, gradient_clip=0.1),
        replace(EXACT, name="behaviour", algorithm={"proximal": "behaviour"} | CONSTANT),
        *(replace(EXACT, name=f"zero-{stage}", stage=stage, dtype="float32", gradient_clip=1.0) for stage in (1, 2, 3)),
    )
}


def train(trainer: Trainer, batch: Batch, payloads: dict[str, SamplePayload]) -> Trained:
    return trainer.train(trainer.plan(batch), payloads)


def by_hand(folder: Path, case: Case) -> tuple[Found, Found, list[tuple[float, float]]]:
    """Plain torch in float64: (initial weights, weights after the rollout step, each step's loss and gradient norm)."""
    settings = recipe(folder, case)
    model = dense.load(folder)
    reference = scaled(model) if settings.algorithm.kl_coefficient else None
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    batch, payloads = step_data(folder, case.data)
    with torch.no_grad():
        before = {
            id(payload): dense.response(model, payload, settings.rollout.temperature)[0]
            for payload in payloads.values()
        }
    proximal = proximal_of(case)
    if proximal is dense.own:
        proximal = lambda payload, current: before[id(payload)]  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    steps = []
    for start in range(0, len(batch.groups), case.mini_batch_groups):
        optimizer.zero_grad()
        groups = batch.groups[start : start + case.mini_batch_groups]
        loss = dense.loss(model, groups, payloads, settings, proximal, reference)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.gradient_clip)
        optimizer.step()
        steps.append((float(loss.detach()), float(norm)))
    return initial, {name: parameter.detach() for name, parameter in model.named_parameters()}, steps


@pytest.mark.conformance(
    formula="AdamW on the exact gradient of each mini-batch, its norm clipped", setting="learner.*"
)
@pytest.mark.parametrize("name", STEPS)
def test_a_rollout_step_by_hand(name: str, policy: Path, ranks: Ranks) -> None:
    """Two optimizer steps: their losses, their gradient norms before clipping, and the final weights."""
    case = STEPS[name]
    initial, weights, steps = by_hand(policy, case)
    found, trained = run_case(policy, case, ranks)
    exact = case.dtype == "float64"
    assert [step.applied for step in trained.optimizer] == [True, True]
    # Adam's first step moves each weight by its sign: where a gradient is near 0, float32's rounding decides.
    bounds = (1e-8, 1e-8) if exact else (1e-5, 3e-4)
    for record, (loss, norm), bound in zip(trained.optimizer, steps, bounds, strict=True):
        assert record.loss == pytest.approx(loss, rel=1e-8 if exact else 1e-3)
        assert record.gradient_norm == pytest.approx(norm, rel=bound)
    moved = torch.cat([(found[f"weight.{key}"].double() - initial[key]).flatten() for key in initial])
    wanted = torch.cat([(weights[key] - initial[key]).flatten() for key in initial])
    difference = float((moved - wanted).norm() / wanted.norm())
    print(f"{name}: |dw| / |w| = {difference:.1e}")
    assert difference <= (1e-7 if exact else 1e-3)
    clipped = [norm > case.gradient_clip for _, norm in steps]
    assert all(clipped) if case.gradient_clip <= 1 else not any(clipped)


@pytest.mark.conformance(formula="Adam's first update: |dw| = learning rate, without a decay before", setting="dtype")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_first_update_is_the_learning_rate(stage: int, dtype: str, policy: Path, ranks: Ranks) -> None:
    found, _ = run_case(policy, Case("first", stage, dtype), ranks)
    rounding = torch.finfo(getattr(torch, dtype)).eps
    for name, weights in load_file(policy / "model.safetensors").items():
        start = weights.to(getattr(torch, dtype)).double()
        moved = (found[f"weight.{name}"].double() - start).abs()
        # The decay is a thousandth of a weight, and Adam's epsilon at most that of these gradients.
        room = 1e-5 + (1e-3 + rounding) * (start.abs() + 1e-2)
        certain = found[f"moment.{name}"].abs() > 1e-6
        assert bool(((moved - 1e-2).abs() <= room)[certain].all()), name


@pytest.mark.conformance(
    formula="pi_old: the policy at the start of the rollout step (DAPO Eq. 8)", setting="proximal = recomputed"
)
def test_the_short_cut_saves_a_pass_and_keeps_the_result(policy: Path, ranks: Ranks) -> None:
    """At the first optimizer step the proximal policy is the current one; at the second its ratios differ from 1."""
    short, full = (run_case(policy, STEPS[name], ranks) for name in ("two-steps", "recomputed"))
    assert all(torch.equal(tensor, full[0][name]) for name, tensor in short[0].items())
    assert abs(short[1].metrics["ratio_mean"] - 1.0) > 1e-3


@pytest.mark.conformance(formula="linear warm-up over rollout steps (DAPO 4.1)", setting="learner.warmup_rollout_steps")
def test_warm_up_counts_rollout_steps_not_optimizer_steps(policy: Path, ranks: Ranks) -> None:
    document = recipe(policy, EXACT)
    learner = document.learner.model_copy(update={"warmup_rollout_steps": 4})
    trainer = Trainer(policy, document.model_copy(update={"learner": learner}), ranks)
    batch, payloads = step_data(policy, "four")
    used: list[float] = []
    step = trainer._engine.step

    def noted() -> None:
        used.extend(group["lr"] for group in trainer._engine.optimizer.param_groups)
        step()

    trainer._engine.step = noted
    rates = [train(trainer, batch, payloads).metrics["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])
    assert used == [rate for rate in rates for _ in range(2)]
    trainer.close()


def forwards(trainer: Trainer) -> list[None]:
    """A list that gets an entry for each forward pass of the policy's first layer."""
    calls: list[None] = []
    trainer.causal_lm.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    return calls


@pytest.mark.parametrize(
    ("case", "passes"),
    [
        # 2 x 2 micro-batches; those of the second optimizer step also run without gradient, before the first.
        (EXACT, 4 + 2),
        (replace(EXACT, algorithm={"proximal": "behaviour"}), 4),
        # With checkpointing each of the 4 runs again in the backward pass.
        (replace(EXACT, checkpointing=True), 4 + 2 + 4),
        (replace(EXACT, checkpointing=True, dtype="float32", stage=3), 4 + 2 + 4),
    ],
)
def test_the_number_of_forward_passes(case: Case, passes: int, policy: Path, ranks: Ranks) -> None:
    trainer = open_trainer(policy, replace(case, budget=20), ranks)
    calls = forwards(trainer)
    batch, payloads = step_data(policy, "four")
    work = trainer._micro_batches(trainer.plan(batch), payloads)
    assert [len(part) for part in work] == [2, 2]
    train(trainer, batch, payloads)
    assert len(calls) == passes
    trainer.close()


@pytest.mark.conformance(formula="exp(d) - 1 - d, d = policy - behaviour", setting="proximal = behaviour")
def test_behaviour_as_proximal_measures_the_current_policy(policy: Path, ranks: Ranks) -> None:
    """The mismatch metrics are exp(d) - 1 - d and exp(d), d = policy - behaviour, over all counted tokens."""
    case = replace(EXACT, algorithm={"proximal": "behaviour"}, mini_batch_groups=4)
    _, trained = run_case(policy, case, ranks)
    batch, payloads = step_data(policy, "four")
    model = dense.load(policy)
    with torch.no_grad():
        samples = (sample for group in batch.groups for sample in group.samples if not sample.masked)
        gaps = [
            dense.response(model, payload, 0.7)[0] - torch.from_numpy(payload.behaviour_logprobs).double()
            for payload in (payloads[sample.payload] for sample in samples)
        ]
    gap = torch.cat(gaps)
    weight = torch.exp(gap)
    assert trained.metrics["mismatch_kl"] == pytest.approx(float((weight - 1 - gap).mean()))
    assert trained.metrics["ratio_mean"] == pytest.approx(float(weight.mean()))
    share = float(weight.sum() ** 2 / (len(weight) * weight.square().sum()))
    assert trained.metrics["effective_sample_size"] == pytest.approx(share)
    assert trained.metrics["importance_p99"] == pytest.approx(trained.metrics["ratio_p99"])
    assert trained.metrics["importance_p99"] > 1.5


@pytest.mark.conformance(formula="pi_ref: the initial policy of the run", setting="algorithm.kl_coefficient")
def test_the_reference_stays_at_the_initial_policy(policy: Path, ranks: Ranks) -> None:
    """k3 is 0 for the initial policy and positive after a rollout step; without a coefficient it is absent."""
    case = replace(EXACT, algorithm={"kl_coefficient": 0.1}, mini_batch_groups=4)
    trainer = Trainer(policy, recipe(policy, case), ranks)
    batch, payloads = step_data(policy, "four")
    found = [train(trainer, batch, payloads).metrics["kl_reference"] for _ in range(3)]
    assert found[0] == pytest.approx(0.0, abs=1e-12)
    assert min(found[1:]) > 0.01
    assert not any(
        parameter.requires_grad or parameter.grad is not None for parameter in trainer._reference.parameters()
    )
    trainer.close()
    trainer = Trainer(policy, recipe(policy, EXACT), ranks)
    assert trainer._reference is None
    assert "kl_reference" not in train(trainer, batch, payloads).metrics
    trainer.close()
