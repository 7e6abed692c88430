"""The training comparison with TRL, as far as it needs no TRL: problems, the trainer's arguments, the record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.peers.trl.configuration import batches, grpo_arguments
from benchmarks.peers.trl.problems import HELD_OUT, RECIPE, TRAIN, documents, main
from benchmarks.peers.trl.record import Spent, TrainingRecord, average_at, due, spent, write
from deploy.cli.commands.stack import demo_recipe
from services.sampler.data import load_splits
from services.settings import load_recipe
from verifier.verifiers.reasoning_gym import judge


def test_the_problems_are_the_splits_of_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_recipe() == RECIPE
    assert main([str(tmp_path / "first")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "first" / name) for name in (TRAIN, HELD_OUT)]
    assert main([str(tmp_path / "second")]) == 0
    recipe = load_recipe(RECIPE)
    splits = load_splits(recipe.data)
    for name, prompts, count in ((TRAIN, splits.train, 120), (HELD_OUT, splits.held_out, 64)):
        text = (tmp_path / "first" / name).read_text()
        assert text == (tmp_path / "second" / name).read_text()
        problems = json.loads(text)["problems"]
        assert len(problems) == count
        assert [problem["id"] for problem in problems] == [prompt.id for prompt in prompts]
        assert [problem["messages"] for problem in problems] == [list(prompt.messages) for prompt in prompts]
        for problem in problems:
            answer = problem["reference"]["entry"]["answer"]
            assert judge(f"It is {answer}.", problem["reference"], {}).correct
            assert not judge(f"It is {answer}1.", problem["reference"], {}).correct


def test_the_settings_are_those_of_the_recipe() -> None:
    recipe = load_recipe(RECIPE)
    train, held_out = documents(recipe)
    assert held_out["sampling"] == {"samples": 4, "temperature": 1.0, "top_p": 0.7, "max_new_tokens": 24}
    found = grpo_arguments(train["settings"], seed=3, steps=12, micro_batch=16, continuous=False)
    expected = {
        "loss_type": "dapo",
        "epsilon": recipe.algorithm.clip_low,
        "epsilon_high": recipe.algorithm.clip_high,
        "beta": 0.0,
        "num_generations": 8,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 16,
        "max_completion_length": 24,
        "learning_rate": 2e-5,
        "weight_decay": recipe.learner.weight_decay,
        "max_grad_norm": recipe.learner.gradient_clip,
        "max_steps": 24,
        "seed": 3,
    }
    assert {name: found[name] for name in expected} == expected
    assert train["settings"]["overlong_cache"] == 8
    with pytest.raises(ValueError, match="warmup_rollout_steps: 2"):
        grpo_arguments(train["settings"] | {"warmup_rollout_steps": 2}, seed=3, steps=1, micro_batch=8, continuous=True)


def test_other_verifiers_are_refused(tmp_path: Path) -> None:
    shutil.copy(RECIPE, tmp_path / "recipe.yaml")
    row = {"question": "1 + 1", "verifier": "math", "reference": {"answer": "2"}}
    rows = [json.dumps(row | {"question": f"{index} + 1", "reference": {"answer": str(index + 1)}}) for index in (1, 2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    recipe = load_recipe(RECIPE)
    data = type(recipe.data)(source="jsonl", path=str(tmp_path / "rows.jsonl"), train=1, held_out=1)
    with pytest.raises(ValueError, match="'jsonl' is not valid: expected 'reasoning-gym'"):
        documents(recipe.model_copy(update={"data": data}))


@pytest.mark.parametrize(("micro_batch", "accumulated"), [(32, 1), (8, 4), (1, 32)])
def test_two_updates_share_a_rollout(micro_batch: int, accumulated: int) -> None:
    found = batches(8, 8, 2, micro_batch)
    assert found["per_device_train_batch_size"] * found["steps_per_generation"] == 64
    assert found["gradient_accumulation_steps"] == accumulated
    assert found["steps_per_generation"] == 2 * accumulated


@pytest.mark.parametrize("micro_batch", [64, 24])
def test_a_micro_batch_divides_an_update(micro_batch: int) -> None:
    with pytest.raises(ValueError, match=f"{micro_batch} is not valid: expected a divisor of 32 responses"):
        batches(8, 8, 2, micro_batch)


def test_a_record_counts_steps_and_no_evaluations(tmp_path: Path) -> None:
    clocks = iter(
        [(100.0, 5.0), (110.0, 8.0), (115.0, 12.0), (120.0, 13.0), (150.0, 33.0), (157.0, 43.0), (160.0, 49.0)]
    )
    record = TrainingRecord(1000.0, Spent(3.0, 2.0), lambda: Spent(*next(clocks)))
    with record.aside():
        record.evaluated(0, 0.2)
    record.begin()
    record.begin()
    assert record.end_step(1) == {"step": 1, "seconds": 30.0, "cpu_seconds": 20.0}
    with record.aside():
        record.evaluated(1, 0.4)
    write(tmp_path / "new" / "trl.json", record.document(seed=7))
    assert json.loads((tmp_path / "new" / "trl.json").read_text()) == {
        "started": 1000.0,
        "startup_seconds": 18.0,
        "startup_cpu_seconds": 6.0,
        "steps": [{"step": 1, "seconds": 30.0, "cpu_seconds": 20.0}],
        "evaluations": [{"step": 0, "accuracy": 0.2}, {"step": 1, "accuracy": 0.4}],
        "seed": 7,
    }


def test_what_is_spent_grows() -> None:
    before = spent()
    assert sum(range(10_000)) > 0
    assert spent().less(before).wall >= 0.0
    assert spent().less(before).cpu >= 0.0


def test_the_average_is_over_prompts() -> None:
    assert average_at([True, False, True, True], 2) == 0.75
    for answers in ([], [True, False, True]):
        with pytest.raises(ValueError, match="expected 2 per prompt"):
            average_at(answers, 2)


def test_evaluations_are_due_at_both_ends() -> None:
    assert [step for step in range(11) if due(step, 4, 10)] == [0, 4, 8, 10]
    assert not any(due(step, 0, 10) for step in range(11))
