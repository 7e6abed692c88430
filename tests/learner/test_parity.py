"""Log-probs of learner and engines: compared where both had the same weights; a stale engine is named in its step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from learner.algorithm.parity import NOT_COMPARED, EngineComparison, ReplicaDifference
from learner.coordinator.parity_gate import JUDGED_TOKENS, differing, explanation
from learner.training.process_group import Ranks
from learner.training.results import Trained
from learner.training.trainer import Trainer
from services.contracts import Batch, BatchGroup, BatchSample, VersionSpan
from services.settings import Recipe, parse_recipe
from services.streams.delivery.payloads import SamplePayload
from tests.conformance import dense
from tests.harness.batches import batch_with
from tests.harness.small_run import recipe_document

pytestmark = [
    pytest.mark.timeout(600),
    *[
        pytest.mark.filterwarnings(f"ignore::{kind}:(torch|deepspeed)")
        for kind in ("DeprecationWarning", "FutureWarning")
    ],
]
REPLICAS, TOKENS, DEMO_RATE = ("rollout-a", "rollout-b"), 20, 2e-5
"""Who samples, the tokens of each response, and the learning rate of the demo's recipe."""
SAME_WEIGHTS = pytest.mark.conformance(
    formula="mean |log pi_learner - log pi_engine|, same weights", setting="limits.max_logprob_difference"
)
Score = Callable[[SamplePayload, str], np.ndarray]


def recipe(folder: Path, rate: float = DEMO_RATE, **algorithm: Any) -> Recipe:
    learner = {"learning_rate": rate, "zero_stage": 1, "micro_batch_tokens": 80}
    return parse_recipe(recipe_document(folder, algorithm={"group_size": 4, **algorithm}, learner=learner))


def logprobs(weights: Any, payload: SamplePayload) -> np.ndarray:
    """What an exact engine with these weights reports."""
    with torch.no_grad():
        found: np.ndarray = dense.response(weights, payload, 1.0)[0].float().numpy()
    return found


def held(trainer: Trainer, folder: Path) -> Any:
    """The policy of the trainer as it is now, in float64."""
    model = dense.load(folder)
    model.load_state_dict({name: value.double() for name, value in trainer.causal_lm.state_dict().items()})
    return model


def sampled(score: Score, version: int, seed: int = 0) -> tuple[Batch, dict[str, SamplePayload]]:
    """Four groups of four responses; each second is of replica b. Each began with version 1, for three tokens."""
    draw, payloads, groups = np.random.default_rng(seed), {}, []
    for group in range(4):
        samples = []
        prompt = draw.integers(0, 107, 6, dtype=np.int32)
        for index in range(4):
            key, replica = f"{group}:{index}", REPLICAS[index % 2]
            ids = draw.integers(0, 107, TOKENS, dtype=np.int32)
            spans = (VersionSpan(version=1, start=0, end=3), VersionSpan(version=version, start=3, end=TOKENS))
            payload = SamplePayload(prompt, ids, np.zeros(TOKENS, np.float32), "", "stop", spans)
            behaviour = score(payload, replica)
            behaviour[:3] = -9.0
            payloads[key] = replace(payload, behaviour_logprobs=behaviour)
            samples.append(
                BatchSample(
                    payload=key,
                    tokens=TOKENS,
                    advantage=float(draw.normal()),
                    reward=1.0,
                    correct=True,
                    masked=False,
                    staleness=0,
                    replica=replica,
                )
            )
        groups.append(BatchGroup(group=f"g{group}", samples=tuple(samples)))
    batch = batch_with(groups, step=version, version=version)
    return batch, payloads


def train(trainer: Trainer, drawn: tuple[Batch, dict[str, SamplePayload]], version: int | None) -> Trained:
    return trainer.train(trainer.plan(drawn[0]), drawn[1], version)


@SAME_WEIGHTS
def test_exact_engines_differ_by_rounding_only(policy: Path, ranks: Ranks) -> None:
    """Also in the second optimizer step, which the first one moved: the policy at the start of the step counts."""
    settings = recipe(policy, rate=1e-2)
    trainer, model = Trainer(policy, settings, ranks), dense.load(policy)
    trained = train(trainer, sampled(lambda payload, _: logprobs(model, payload), 5), 5)
    assert trained.optimizer_steps == 2
    assert trained.metrics["compared_tokens"] == 16 * (TOKENS - 3)
    assert trained.metrics["logprob_difference_mean"] < 1e-5
    assert trained.metrics["logprob_difference_p99"] < 1e-4
    assert trained.metrics["logprob_off_share"] == 0
    assert {name: found.tokens for name, found in trained.differences.items()} == dict.fromkeys(REPLICAS, 136)
    assert differing(trained.differences, settings.max_logprob_difference) == {}
    trainer.close()


@SAME_WEIGHTS
@pytest.mark.parametrize("version", [None, 4, 6])
def test_other_versions_are_not_compared(version: int | None, policy: Path, ranks: Ranks) -> None:
    """A version of the same step that another learner published may have other weights."""
    trainer = Trainer(policy, recipe(policy), ranks)
    drawn = sampled(lambda payload, _: np.full(TOKENS, -9.0, np.float32), 5)
    trained = train(trainer, drawn, version)
    assert trained.differences == {}
    measured = {name: value for name, value in trained.metrics.items() if "logprob" in name or "compared" in name}
    assert measured == {"compared_tokens": 0.0}
    trainer.close()


@SAME_WEIGHTS
def test_behaviour_as_proximal_compares_the_first_step(policy: Path, ranks: Ranks) -> None:
    """Later optimizer steps compute no log-prob of the policy at the start of the rollout step."""
    trainer, model = Trainer(policy, recipe(policy, rate=1e-2, proximal="behaviour"), ranks), dense.load(policy)
    trained = train(trainer, sampled(lambda payload, _: logprobs(model, payload), 5), 5)
    assert trained.optimizer_steps == 2
    assert trained.metrics["compared_tokens"] == 8 * (TOKENS - 3)
    assert trained.metrics["logprob_difference_mean"] < 1e-5
    trainer.close()


@SAME_WEIGHTS
def test_a_stale_replica_is_named_within_one_step(policy: Path, ranks: Ranks) -> None:
    """At the demo's learning rate: b reports version 3 but still holds version 2."""
    settings = recipe(policy)
    trainer, before = Trainer(policy, settings, ranks), dense.load(policy)
    train(trainer, sampled(lambda payload, _: logprobs(before, payload), 2), 2)
    after = held(trainer, policy)
    weights = {"rollout-a": after, "rollout-b": before}
    trained = train(trainer, sampled(lambda payload, replica: logprobs(weights[replica], payload), 3, seed=1), 3)
    found = differing(trained.differences, settings.max_logprob_difference)
    assert list(found) == ["rollout-b"]
    assert found["rollout-b"].mean > 100 * trained.differences["rollout-a"].mean
    trainer.close()


@SAME_WEIGHTS
def test_few_tokens_are_not_judged() -> None:
    assert differing({"a": ReplicaDifference(JUDGED_TOKENS - 1, 5.0), "b": ReplicaDifference(1000, 0.1)}, 0.1) == {}
    together = {name: ReplicaDifference(JUDGED_TOKENS // 2, 0.2) for name in "ab"}
    assert differing(together, 0.1) == together
    assert explanation(4, 7, differing(together, 0.1), 0.1) == (
        "step 4: log-probs of policy version 7 differ from the learner's: a by 0.2 nats on 16 tokens, b by 0.2 nats on "
        "16 tokens; limits.max_logprob_difference is 0.1: these replicas may hold other weights than they report"
    )


@SAME_WEIGHTS
def test_no_replica_is_blamed_for_what_several_drew() -> None:
    comparison = EngineComparison(["", "a"])
    comparison.add(torch.zeros(4), torch.tensor([-9.0, -9.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1]))
    assert comparison.by_replica() == {"a": ReplicaDifference(2, 0.0)}
    assert comparison.metrics()["logprob_difference_mean"] == 4.5, "it counts in the metrics of the step"


@SAME_WEIGHTS
def test_ranks_and_parts_add_up() -> None:
    """Two micro-batches on each of two ranks give the figures of all tokens at once; a NaN is left out."""
    draw = torch.Generator().manual_seed(0)
    behaviour = -torch.rand(40, generator=draw)
    learner = behaviour + 0.02 * torch.randn(40, generator=draw)
    learner[7], learner[10] = torch.nan, -torch.inf
    replica = torch.arange(40) % 3 + NOT_COMPARED
    whole, parts = EngineComparison(["a", "b"]), [EngineComparison(["a", "b"]) for _ in range(2)]
    whole.add(learner, behaviour, replica)
    for number, rows in enumerate(torch.arange(40).split(10)):
        parts[number % 2].add(learner[rows], behaviour[rows], replica[rows])
    others = torch.cat([parts[1]._sums.flatten(), parts[1]._histogram.double()])
    parts[0].reduce(lambda values: values.add_(others))
    assert parts[0].metrics() == pytest.approx(whole.metrics())
    gap = (learner - behaviour)[(replica >= 0) & learner.isfinite()].double().abs()
    assert whole.metrics()["compared_tokens"] == len(gap) == 24
    ratio = torch.exp(learner - behaviour)[(replica >= 0) & learner.isfinite()]
    off = float(((ratio < 0.99) | (ratio > 1.01)).double().mean())
    assert whole.metrics()["logprob_off_share"] == pytest.approx(off)
    assert whole.metrics()["logprob_difference_mean"] == pytest.approx(float(gap.mean()))
    assert whole.metrics()["logprob_difference_p99"] == pytest.approx(float(gap.max()), rel=0.03)
    assert sum(found.tokens * found.mean for found in whole.by_replica().values()) == pytest.approx(float(gap.sum()))
