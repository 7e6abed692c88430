"""One whole run through `penstock up` and REST that loses its only replica: Redis, Ray, vLLM and DeepSpeed are real."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from transformers import AutoModelForCausalLM

from tests.harness.stack import Stack
from tests.integration.runs import STEPS, FinishedRun, check_reconciled, document, generated_while_learning

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(900)]


def test_a_run_that_loses_its_replica_reconciles(finished_run: FinishedRun) -> None:
    check_reconciled(finished_run.view, finished_run.summary, STEPS)
    trained = [group for step in finished_run.steps for group in step["groups"]]
    assert len(set(trained)) == len(trained) == 4 * STEPS, "each group must be trained exactly once"
    assert finished_run.replaced_by, "no replica replaced the killed one"


def test_an_on_policy_run_never_generates_while_it_learns(finished_run: FinishedRun) -> None:
    assert len(finished_run.samples) == STEPS * 4 * 4
    assert generated_while_learning(finished_run.samples, finished_run.steps) == 0
    assert [step["metrics"]["staleness_max"] for step in finished_run.steps] == [0.0] * STEPS


def test_engine_and_learner_agree_on_every_log_prob(finished_run: FinishedRun) -> None:
    """At the first version, after each sync, and in the replica that joined at a published version."""
    metrics = [step["metrics"] for step in finished_run.steps]
    assert [step["mismatch_kl"] for step in metrics] == pytest.approx([0.0] * STEPS, abs=5e-9)  # (1e-4)^2 / 2
    assert [step["effective_sample_size"] for step in metrics] == pytest.approx([1.0] * STEPS, abs=1e-6)
    assert [step["compared_tokens"] for step in metrics] == [step["trained_tokens"] for step in metrics]
    assert max(step["logprob_difference_mean"] for step in metrics) < 1e-4, "a tenth of the limit"


def test_the_export_is_the_trained_policy(finished_run: FinishedRun, tiny_model: Path) -> None:
    exported = AutoModelForCausalLM.from_pretrained(finished_run.summary["export_path"])
    initial = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert (exported.get_input_embeddings().weight - initial.get_input_embeddings().weight).abs().max() > 1e-5


def test_services_run_at_the_priority_of_their_stack(stack: Stack) -> None:
    """Ray would run them at nice 15, and on a busy machine they would miss their deadlines."""
    gateway = stack.gateway()
    assert gateway is not None, stack.output
    assert psutil.Process(gateway).nice() == psutil.Process(stack.process.pid).nice()


def test_a_missing_model_fails_with_one_clear_line(stack: Stack, questions: Path) -> None:
    run = stack.submit(document("/no/such/model", questions, max_staleness=1, steps=1))
    ends = time.monotonic() + 120
    while (view := stack.view(run))["state"] != "failed":
        assert time.monotonic() < ends, view
        time.sleep(0.2)
    assert "model.path" in view["reason"]
    assert "/no/such/model" in view["reason"]
