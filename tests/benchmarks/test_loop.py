"""The benchmarks of whole runs: what they compute from a run, and what they submit. No run is started here."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.loop import demo, held_out, overlap, versions, vs_trl
from benchmarks.loop.measured_run import (
    DEMO,
    ROOT,
    MeasuredRun,
    MeasuredStep,
    core_list,
    demo_document,
    first_cores,
    pinned,
    role_of,
)
from benchmarks.loop.reaching import Spent, Training, of_record, unreached
from benchmarks.report.figures import Figure
from services.contracts import BatchGroup, BatchSample
from services.settings import parse_recipe
from tests.benchmarks.whole_runs import measured_run, record
from tests.harness.batches import batch_with
from tests.harness.stack import command_of


def by_name(figures: list[Figure]) -> dict[str, Figure]:
    found = {figure.name: figure for figure in figures}
    assert len(found) == len(figures), "two figures have one name"
    return found


def test_a_step_is_read_from_the_record_of_the_api() -> None:
    step = MeasuredStep.of(record(3, 100.0, generation=4.0, learning=5.0))
    assert (step.step, step.generation_started, step.generation_finished) == (3, 91.0, 95.0)
    assert (step.learning_started, step.learning_finished, step.publish_s) == (95.0, 100.0, 1.0)


def test_a_run_is_summarised() -> None:
    run = measured_run()
    assert (run.first_dispatch, run.last_update) == (21.0, 70.0)
    assert run.cpu_s(10.0, 20.0) == pytest.approx(15.0)
    summary = json.loads(json.dumps(run.summary()))
    assert summary["seconds"] == {
        "ready": 10.0,
        "submitted": 11.0,
        "ended": 90.0,
        "first dispatch": 21.0,
        "last update": 70.0,
    }
    assert summary["cpu seconds"]["whole"] == {"engine": 45.0, "learner": 90.0}
    assert [step["learning"] for step in summary["steps"]][:2] == [[25.0, 30.0], [35.0, 40.0]]
    with pytest.raises(KeyError, match="no evaluation 'step-2' of 'held-out'"):
        run.evaluation("step-2")


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("/opt/valkey-server 127.0.0.1:4242", "redis"),
        ("ray::Gateway", "gateway"),
        ("VLLM::EngineCore", "engine"),
        ("ray::RoleActor", ""),
        ("/site-packages/ray/core/src/ray/raylet/raylet --raylet_socket_name=...", "ray"),
        ("python -m deploy.local.head --host 127.0.0.1", "ray"),
        ("python /venv/bin/penstock up --port 1", "stack"),
        ("g++ -x c++-header", ""),
    ],
)
def test_processes_have_roles(command: str, role: str) -> None:
    assert role_of(command) == role


def test_cores_are_pinned_for_what_is_started() -> None:
    own = os.sched_getaffinity(0)
    with pinned([min(own)]):
        assert os.sched_getaffinity(0) == {min(own)}
    assert os.sched_getaffinity(0) == own
    assert core_list(str(min(own))) == (min(own),)
    assert first_cores(1) == (min(own),)
    for text in ("", "x", "0,", "99999", "0,0"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected numbers of"):
            core_list(text)
    with pytest.raises(ValueError, match="expected at least 99999"):
        first_cores(99999)


def test_a_checkout_has_a_command_of_its_own(tmp_path: Path) -> None:
    assert command_of(tmp_path) == command_of(None)
    own = tmp_path / ".venv" / "bin" / "penstock"
    own.parent.mkdir(parents=True)
    own.touch()
    assert command_of(tmp_path) == own


def test_what_is_submitted_is_valid(tmp_path: Path) -> None:
    parse_recipe(demo_document(seed=3, limits={"rollout_steps": 2}))
    for bound in overlap.BOUNDS:
        recipe = parse_recipe(overlap.document(demo_document(), bound, 1, 12))
        assert (recipe.limits.max_staleness, recipe.seed, recipe.limits.rollout_steps) == (bound, 1, 12)
        assert recipe.rollout.max_threads is None, "a stage has one core, whether it overlaps or not"
        expected = recipe.limits.groups_per_step * (bound + 1)
        assert recipe.limits.max_inflight_groups >= 5 * expected, "it would limit what is measured"
    recipe = parse_recipe(vs_trl.recipe_of(ROOT / DEMO, tmp_path, 2, 12))
    assert (recipe.evaluated_sets, recipe.learner.checkpoint_every, recipe.data.train) == (("one",), 0, None)
    assert (recipe.limits.groups_per_step, recipe.algorithm.group_size) == (8, 8)
    assert (recipe.learner.mini_batch_groups, recipe.learner.learning_rate) == (4, 2e-5)


def test_the_bound_is_that_of_the_largest_stage() -> None:
    stages = overlap.Stages(step=12.0, generation=4.0, learning=6.0, publishing=1.5)
    assert stages.bound == 2.0
    found = overlap.Stages.of(measured_run(every=12.0))
    assert found == overlap.Stages(step=12.0, generation=4.0, learning=5.0, publishing=1.0)


def test_the_ends_of_a_run_are_not_timed() -> None:
    run = measured_run(every=10.0, steps=6)
    assert [step.step for step in overlap.measured(run)] == [3, 4, 5]
    assert overlap.span(run) == (40.0, 70.0)
    assert overlap.step_seconds(run) == 10.0
    assert overlap.learner_idle(run) == pytest.approx(0.2)
    assert overlap.fleet_idle(run) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="3 rollout steps are too few: the first 2 and the last 1 are not measured"):
        overlap.measured(measured_run(steps=3))


def test_steps_beside_the_first_evaluation_are_not_timed() -> None:
    run = measured_run(every=10.0, steps=6, evaluated=45.0)
    assert [step.step for step in overlap.measured(run)] == [4, 5], "step 3 ends at 50 and begins before 45"
    assert overlap.span(run) == (50.0, 70.0)


def test_stale_tokens_are_a_share_of_those_for_training() -> None:
    assert overlap.stale_share({"generated": 1100, "evaluated": 100, "stale": 50}) == 0.05
    assert overlap.stale_share({"generated": 10}) == 0.0
    assert overlap.stale_share({"generated": 100, "evaluated": 100}) == 0.0


def with_metrics(run: MeasuredRun, **by_step: list[float]) -> MeasuredRun:
    named = [{name: values[at] for name, values in by_step.items()} for at in range(len(run.steps))]
    steps = [replace(step, metrics={**step.metrics, **own}) for step, own in zip(run.steps, named, strict=True)]
    return replace(run, steps=tuple(steps))


def test_overlap_counts_work_not_steps() -> None:
    """A step that takes as long and has half as many tokens more is half as fast again."""
    base = measured_run(every=10.0)
    long = with_metrics(base, input_tokens=[90.0] * 5, trained_tokens=[75.0] * 5)
    found = by_name(overlap.figures([{0: base, 1: long, 2: base, 4: base}]))
    assert found["speed-up at staleness 1, tokens/s"].values == pytest.approx((1.5,))
    assert found["speed-up at staleness 2, tokens/s"].values == pytest.approx((1.0,))


def test_accuracy_is_compared_at_equal_tokens() -> None:
    few = with_metrics(measured_run(), trained_tokens=[10.0] * 5, accuracy=[0.1, 0.2, 0.3, 0.4, 0.5])
    many = with_metrics(measured_run(), trained_tokens=[20.0] * 5, accuracy=[0.1, 0.3, 0.5, 0.7, 0.9])
    found = by_name(overlap.figures([{0: few, 1: many, 2: many, 4: many}]))
    assert found["accuracy at equal tokens at staleness 0"].values == pytest.approx((0.5,))
    assert found["accuracy at equal tokens at staleness 1"].values == pytest.approx((0.4,)), "after 50 of 100 tokens"


def test_a_prompt_counts_once_in_the_learner_s_inputs() -> None:
    sample = {"advantage": 0.0, "reward": 1.0, "correct": True, "masked": False, "staleness": 0}
    samples = tuple(BatchSample(payload=f"p{tokens}", tokens=tokens, **sample) for tokens in (3, 5))
    group = BatchGroup(group="g", samples=samples, prompt_tokens=46)
    assert overlap.input_tokens(batch_with([group, group])) == 2 * (46 + 2 + 4)


def test_overlap_compares_within_a_repeat() -> None:
    slow, fast = measured_run(every=10.0), measured_run(every=6.25)
    twice = measured_run(every=5.0, stale=20)
    repeats = [{0: slow, 1: fast, 2: twice, 4: twice}, {0: fast, 1: fast, 2: fast, 4: slow}]
    found = by_name(overlap.figures(repeats))
    assert found["bound of the speed-up by overlap"].values == (2.0, 1.25)
    assert found["speed-up at staleness 2, tokens/s"].values == (2.0, 1.0)
    assert found["share of the bound at staleness 2"].values == (1.0, 0.8)
    assert str(found["share of the bound at staleness 2"].target) == ">= 0.9"
    assert found["share of the bound at staleness 1"].target is None
    assert found["stale tokens at staleness 2"].values == (0.02, 0.0)
    assert found["trained tokens at staleness 4 / at staleness 0"].values == (1.0, 1.0)
    assert "speed-up at staleness 0, tokens/s" not in found
    assert len(overlap.panels(repeats)) == 3
    assert sorted(overlap.order(1)) == sorted(overlap.BOUNDS)
    assert {overlap.order(number)[0] for number in range(4)} == set(overlap.BOUNDS)


def test_the_demo_is_timed_in_parts() -> None:
    runs = [measured_run(), measured_run(gained=0.5)]
    found = by_name(demo.figures(runs, [], with_targets=True))
    parts = {name: found[name].values[0] for name in demo.SECONDS}
    assert parts == {"up": 10.0, "prepare": 10.0, "steps": 49.0, "end": 20.0, "whole": 90.0}
    assert str(found["whole"].target) == "<= 420"
    assert found["CPU, whole"].values == (135.0, 135.0)
    assert found["CPU, steps: learner"].values == pytest.approx((49.0, 49.0))
    assert found["CPU, steps: ray"].values == (0.0, 0.0)
    waits = [found[f"the learner waits for a publication, {of}"] for of in ("mean of the steps", "longest")]
    assert [(wait.values, str(wait.target)) for wait in waits] == [((0.25, 0.25), "<= 0.5"), ((0.25, 0.25), "None")]
    assert found["gain"].values == (0.25, 0.5)
    assert demo.spread(runs) == "gain over 2 seeds: mean +0.375, standard deviation 0.177"
    assert demo.spread(runs[:1]) == "gain over 1 seed: mean +0.250"
    assert by_name(demo.figures(runs, [], with_targets=False))["whole"].target is None


def test_the_demo_of_two_checkouts_is_compared() -> None:
    found = by_name(demo.figures([measured_run(every=5.0)], [measured_run(every=10.0)], with_targets=True))
    assert found["steps, after / before"].values[0] == pytest.approx(29 / 49)
    assert found["gain (the other checkout)"].values == (0.25,)
    assert len(demo.panels([measured_run()], [measured_run()])[0].series) == 2
    with pytest.raises(SystemExit):
        demo.main(["--before", str(ROOT / "docs")])


def training(accuracies: dict[int, float], seconds: float = 10.0) -> Training:
    spent = {step: Spent(seconds * step, 2 * seconds * step) for step in range(5)}
    return Training(spent, accuracies, Spent(1.0, 2.0))


def test_the_time_to_an_accuracy_is_interpolated() -> None:
    found = training({0: 0.2, 2: 0.6, 4: 0.8})
    assert found.reaching(0.6) == found.reaching(0.6)
    assert found.reaching(0.6).spent == Spent(20.0, 40.0)
    assert found.reaching(0.7).spent.seconds == pytest.approx(30.0)
    assert found.reaching(0.4).spent.cpu_s == pytest.approx(20.0)
    assert found.reaching(0.2).spent == Spent(0.0, 0.0)
    late = found.reaching(0.9)
    assert (late.spent, late.in_time) == (Spent(40.0, 80.0), False)


def test_the_first_crossing_counts() -> None:
    found = training({0: 0.2, 1: 0.8, 2: 0.4, 4: 0.9})
    assert found.reaching(0.8).spent.seconds == 10.0


def test_a_record_of_trl_is_read() -> None:
    steps = [{"step": 1, "seconds": 5.0, "cpu_seconds": 9.0}, {"step": 2, "seconds": 11.0, "cpu_seconds": 20.0}]
    document = {"started": 0.0, "startup_seconds": 3.0, "startup_cpu_seconds": 4.0, "steps": steps}
    found = of_record(document, {0: 0.2, 2: 0.6})
    assert found.spent == {0: Spent(0.0, 0.0), 1: Spent(5.0, 9.0), 2: Spent(11.0, 20.0)}
    assert (found.last, found.start_up) == (2, Spent(3.0, 4.0))
    with pytest.raises(KeyError):
        of_record({"steps": []}, {})


def test_both_sides_are_compared_within_a_repeat() -> None:
    ours, theirs = training({0: 0.2, 4: 0.9}, seconds=10.0), training({0: 0.2, 4: 0.75}, seconds=40.0)
    repeats = [{vs_trl.OURS: ours, vs_trl.THEIRS: theirs}]
    found = by_name(vs_trl.figures(repeats))
    wall = found["to 0.70: TRL / Penstock"]
    assert wall.values[0] == pytest.approx(4 * (0.5 / 0.55) / (0.5 / 0.7))
    assert str(wall.target) == ">= 3"
    assert str(found["to 0.70: TRL / Penstock, CPU"].target) == ">= 2"
    assert found["to 0.60: TRL / Penstock"].target is None
    assert found["TRL to 0.80"].values == (160.0,)
    assert found["Penstock: accuracy after the last step"].values == (0.9,)
    assert vs_trl.notes(repeats) == ["TRL did not reach 0.80 in 1 of 1 repeats: the whole training stands for it."]
    assert unreached("TRL", 0.7, [theirs.reaching(0.7)]) is None
    assert [len(panel.series) for panel in vs_trl.panels(repeats)] == [2, 2]


def test_a_run_of_penstock_is_a_training() -> None:
    found = vs_trl.training_of(measured_run())
    assert found.spent[0] == Spent(0.0, 0.0)
    assert found.spent[1].seconds == 9.0
    assert found.spent[5].cpu_s == pytest.approx(49.0 * 1.5)
    assert found.start_up.seconds == 21.0


def test_a_problem_becomes_a_row() -> None:
    problem = {"id": "p1", "messages": [{"role": "user", "content": "1 + 1?"}], "reference": {"task": "chain_sum"}}
    assert vs_trl.row(problem) == {
        "question": "1 + 1?",
        "verifier": "reasoning-gym",
        "reference": {"task": "chain_sum"},
    }
    with pytest.raises(ValueError, match="too many values"):
        vs_trl.row(problem | {"messages": problem["messages"] * 2})


def test_weights_are_saved_at_the_interval_and_the_end() -> None:
    assert [step for step in range(1, 6) if versions.due(step, 2, 5)] == [2, 4, 5]


def test_the_held_out_accuracy_is_judged(tmp_path: Path) -> None:
    from tests.harness.tiny_model import write_tiny_model

    folder = write_tiny_model(tmp_path)
    entry = {"question": "1 + 1 =", "answer": "2", "metadata": {}}
    problem = {"messages": [{"role": "user", "content": "1 + 1 ="}], "reference": {"task": "chain_sum", "entry": entry}}
    sampling = {"samples": 2, "temperature": 1.0, "top_p": 0.7, "max_new_tokens": 4}
    first = held_out.accuracy_of(folder, [problem] * 3, sampling)
    assert 0.0 <= first <= 1.0
    assert held_out.accuracy_of(folder, [problem] * 3, sampling) == first, "the same seed draws the same"
    assert held_out._judged(["2", "so 3", "= 2", "no"], [problem] * 2) == [1.0, 0.0, 1.0, 0.0]
