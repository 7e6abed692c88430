"""Replay of a real run: the same bits from the model and from a checkpoint; differences and damage are reported."""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from prometheus_client import REGISTRY
from typer.testing import CliRunner

from deploy.cli.main import app
from learner.archive import ArchiveError, RunArchive
from learner.recovery.replay import Comparison, ReplayedStep, ReplayError, _compare, plan_replay, replay
from learner.service import LearnerService
from services.contracts import UNOWNED, Fence, OptimizerStepRecord, StepRecord
from services.metrics import forget
from services.process.hosting import ServiceThread
from services.streams.connection.client import connect
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts
from services.streams.state.policy_history import History, read_policy
from tests.learner.running import (
    drain_ranks,
    end_ranks,
    put_batch,
    put_evaluation,
    start_ranks,
    submit,
    train_run,
    until_event,
)

pytestmark = [
    pytest.mark.xdist_group("learner-replay"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
DEADLINE_S = 240.0


class Trained(NamedTuple):
    """A finished run: five rollout steps of two optimizer steps, checkpoints of steps 2 and 4."""

    folder: Path
    records: list[StepRecord]


@pytest.fixture(scope="module")
def trained(redis_url: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    runs = tmp_path_factory.mktemp("runs")

    async def train() -> list[StepRecord]:
        redis = await connect(redis_url)
        await submit(
            redis,
            "replayed",
            tiny_model,
            limits={"rollout_steps": 5},
            learner={"checkpoint_every": 2, "checkpoints_kept": 3, "warmup_rollout_steps": 4},
        )
        await train_run(redis, redis_url, "replayed", 5)
        steps = [step for _, step in await EventLog(redis, RunKeys("replayed"), "test").steps()]
        await redis.aclose()
        return steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_RUNS", str(runs))
        patch.setenv("PENSTOCK_HOST", "127.0.0.1")
        return Trained(runs / "replayed", asyncio.run(train()))


@pytest.fixture
def copy(trained: Trained, tmp_path: Path) -> Path:
    """A copy of the run's folder that a test may damage."""
    return Path(shutil.copytree(trained.folder, tmp_path / "replayed"))


def writer(folder: Path, step: int) -> Fence:
    """The learner that archived a step."""
    return RunArchive(folder).trained()[step]


def penstock(folder: Path, step: int) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", folder.name, str(step), "--runs", str(folder.parent)])
    return result.exit_code, result.output


@pytest.mark.slow
def test_replay_from_the_model_is_bit_equal(trained: Trained, copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    plan = plan_replay(copy, 3)
    assert (plan.start, plan.steps, plan.exact) == (None, (1, 2, 3), True)
    reported: list[str] = []
    rows = replay(copy, plan, DEADLINE_S, reported.append)
    assert [(row.step, row.index, row.equal) for row in rows] == [
        (1, 1, True),
        (1, 2, True),
        (2, 1, True),
        (2, 2, True),
        (3, 1, True),
        (3, 2, True),
    ]
    # Change the trained payload too, not only the record with which it is compared.
    recorded = [record for step in trained.records[:3] for record in step.optimizer]
    assert [row.replayed for row in rows] == recorded
    assert len({record.gradient_norm for record in recorded}) == 6
    assert [line.split(" of ")[0] for line in reported] == ["step 1", "step 2", "step 3"]


def test_replay_skips_a_damaged_checkpoint_and_is_bit_equal(trained: Trained, copy: Path) -> None:
    nearest = plan_replay(copy, 5)
    assert nearest.start is not None
    assert (nearest.start.step, nearest.steps, nearest.skipped) == (4, (5,), ())
    state = copy / "checkpoints" / nearest.start.name / "rank-0000.safetensors"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(data)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    status, output = penstock(copy, 5)
    assert status == 0, output
    assert f"skipped: {state}: damaged" in output
    assert "steps 3-5 from the checkpoint of step 2 on 1 cpu rank; equal means the same bits" in output
    wanted = [
        [str(step.step), str(index), *(repr(record.loss),) * 2, *(repr(record.gradient_norm),) * 2, "yes"]
        for step in trained.records[2:]
        for index, record in enumerate(step.optimizer, start=1)
    ]
    assert [line.split() for line in output.splitlines() if line.endswith("yes")] == wanted
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


@pytest.mark.slow
def test_a_changed_log_prob_is_reported_as_different(copy: Path) -> None:
    archive = RunArchive(copy)
    batch, payloads = archive.batch(5, writer(copy, 5)), archive.share(5, 0, writer(copy, 5))
    key = batch.groups[3].samples[0].payload
    logprobs = payloads[key].behaviour_logprobs.copy()
    # By default the loss is weighted by exp(proximal - behaviour), up to 2.
    logprobs[0] = np.float32(-2.0)
    archive.write_share(
        batch, 0, payloads | {key: replace(payloads[key], behaviour_logprobs=logprobs)}, writer(copy, 5)
    )
    status, output = penstock(copy, 5)
    lines = [line.split() for line in output.splitlines() if line.endswith(("yes", "NO"))]
    # The fourth group belongs to the second optimizer step.
    assert (status, [(line[1], line[-1]) for line in lines]) == (1, [("1", "yes"), ("2", "NO")]), output


def test_replay_skips_a_checkpoint_of_other_weights(copy: Path) -> None:
    archive = RunArchive(copy)
    record = archive.record(4)
    assert record is not None
    archive.write_record(record.model_copy(update={"weights": "retrained"}))
    plan = plan_replay(copy, 5)
    assert (plan.start and plan.start.step, plan.steps) == (2, (3, 4, 5))
    assert "those of the committed step are retrained" in plan.skipped[0]


def test_a_damaged_share_is_named(copy: Path) -> None:
    share = RunArchive(copy).share_path(4, 0, writer(copy, 4))
    share.write_bytes(share.read_bytes()[:-20])
    status, output = penstock(copy, 4)
    assert status == 2
    assert f"penstock: {share}: damaged" in output
    with pytest.raises(ArchiveError, match="damaged"):
        plan_replay(copy, 4)


def test_a_step_that_cannot_be_replayed_is_an_error(copy: Path, tmp_path: Path) -> None:
    status, output = penstock(tmp_path / "no-such-run", 1)
    assert (status, output) == (
        2,
        f"penstock: RUN: 'no-such-run' is not valid: expected a run with an archive in {tmp_path} (replayed)\n",
    )
    status, output = penstock(copy, 6)
    assert (status, "STEP: 6 is not valid" in output, "archived: 1-5" in output) == (2, True, True)
    RunArchive(copy).delete_batches(2, writer(copy, 2))
    with pytest.raises(ReplayError, match=r"STEP: 2 is not valid.*archived: 3-5"):
        plan_replay(copy, 2)
    RunArchive(copy).batch_path(4, writer(copy, 4)).unlink()
    with pytest.raises(ReplayError, match=r"STEP: 4 is not valid.*archived: 3, 5"):
        plan_replay(copy, 4)


def test_a_missing_model_is_named(copy: Path, tmp_path: Path) -> None:
    archive = RunArchive(copy)
    facts = archive.facts().model_copy(update={"model_path": str(tmp_path / "gone")})
    archive.start(facts, Fence(9, "learner-9"), resumed=True)
    with pytest.raises(ReplayError, match=r"the model of run .* is missing: .*gone has no config.json"):
        plan_replay(copy, 1)


@pytest.mark.slow
def test_a_replay_ends_at_its_deadline(trained: Trained) -> None:
    started = time.monotonic()
    with pytest.raises(ReplayError, match=r"did not finish within 0\.5 s"):
        replay(trained.folder, plan_replay(trained.folder, 1), 0.5, lambda _: None)
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_rank_that_fails_is_named(copy: Path) -> None:
    plan = plan_replay(copy, 5)
    RunArchive(copy).share_path(5, 0, writer(copy, 5)).unlink()  # between planning and running
    with pytest.raises(ReplayError, match=r"rank 0 .*step-000005\..*rank-0\.parquet: missing"):
        replay(copy, plan, DEADLINE_S, lambda _: None)


LOSS = OptimizerStepRecord(loss=0.5, gradient_norm=2.0, applied=True)
ZERO = OptimizerStepRecord(loss=0.0, gradient_norm=2.0, applied=True)
SKIPPED = OptimizerStepRecord(loss=None, gradient_norm=None, applied=False)


def step_record(*optimizer: OptimizerStepRecord) -> StepRecord:
    return StepRecord(
        step=1,
        version=1,
        optimizer_steps=1,
        groups=(),
        metrics={},
        optimizer=optimizer,
        generation_started_at=0,
        generation_finished_at=0,
        learning_started_at=0,
        learning_finished_at=0,
    )


@pytest.mark.parametrize(
    ("recorded", "replayed", "exact", "near"),
    [
        (LOSS, LOSS, True, True),
        (SKIPPED, SKIPPED, True, True),
        (LOSS, SKIPPED, False, False),
        (LOSS, LOSS.model_copy(update={"applied": False}), False, False),
        (LOSS, LOSS.model_copy(update={"loss": math.nextafter(0.5, 1)}), False, True),
        # 1e-5 of the recorded value is 5e-6 and 2e-5.
        (LOSS, LOSS.model_copy(update={"loss": 0.5 + 4.9e-6}), False, True),
        (LOSS, LOSS.model_copy(update={"loss": 0.5 + 5.1e-6}), False, False),
        (LOSS, LOSS.model_copy(update={"gradient_norm": 2.0 - 1.95e-5}), False, True),
        (LOSS, LOSS.model_copy(update={"gradient_norm": 2.0 - 2.05e-5}), False, False),
        # 1e-5 of 0.1 is 1e-6.
        (ZERO, ZERO.model_copy(update={"loss": 0.9e-6}), False, True),
        (ZERO, ZERO.model_copy(update={"loss": -1.1e-6}), False, False),
    ],
)
def test_results_are_equal_within_the_tolerance(recorded: Any, replayed: Any, exact: bool, near: bool) -> None:
    found = ReplayedStep(step=1, optimizer=(replayed,))
    assert [[row.equal for row in _compare(step_record(recorded), found, tolerance)] for tolerance in (0.0, 1e-5)] == [
        [exact],
        [near],
    ]


def test_a_step_that_was_never_recorded_is_not_equal() -> None:
    rows = list(_compare(None, ReplayedStep(step=1, optimizer=(LOSS,)), 0.0))
    assert rows == [Comparison(step=1, index=1, recorded=None, replayed=LOSS, equal=False)]
    assert [row.equal for row in _compare(None, ReplayedStep(step=1, optimizer=()), 0.0)] == [False]


def test_an_optimizer_step_missing_on_one_side_is_not_equal() -> None:
    rows = _compare(step_record(LOSS, LOSS), ReplayedStep(step=1, optimizer=(LOSS,)), 0.0)
    assert [(row.index, row.equal) for row in rows] == [(1, True), (2, False)]
    assert [row.equal for row in _compare(step_record(), ReplayedStep(step=1, optimizer=()), 0.0)] == [True]


@pytest.mark.slow
async def test_two_ranks_replay_within_the_tolerance(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path
) -> None:
    keys = RunKeys(run_id)
    await submit(
        redis,
        run_id,
        tiny_model,
        limits={"rollout_steps": 3},
        algorithm={"kl_coefficient": 0.01},
        learner={"ranks": 2, "zero_stage": 3, "checkpoint_every": 2},
    )
    for version in range(3):
        await put_batch(redis, keys, version)
    await put_evaluation(redis, keys)
    ranks = start_ranks(run_id, redis_url, 2)
    try:
        await until_event(redis, keys, "exported", 240)
        await drain_ranks(ranks)
    finally:
        end_ranks(ranks)
    plan = plan_replay(runs_folder / run_id, 3)
    assert plan.start is not None
    assert (plan.start.step, plan.start.ranks, plan.steps, plan.tolerance) == (2, 2, (3,), 1e-5)
    rows = await asyncio.to_thread(replay, runs_folder / run_id, plan, DEADLINE_S, lambda _: None)
    assert [(row.step, row.index, row.equal) for row in rows] == [(3, 1, True), (3, 2, True)]


@pytest.mark.slow
async def test_three_consecutive_non_finite_gradients_fail_the_run(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = RunKeys(run_id)
    at_the_end: list[float | None] = []

    def count_and_forget(run: str) -> None:
        at_the_end.append(REGISTRY.get_sample_value("penstock_skipped_optimizer_steps_total", {"run": run}))
        forget(run)

    monkeypatch.setattr("services.process.hosting.forget", count_and_forget)
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 5})
    await put_batch(redis, keys, 0)
    # One and a half broken rollout steps: two optimizer steps of the first, one of the second.
    await put_batch(redis, keys, 1, logprob=math.nan)
    await put_batch(redis, keys, 2, logprob=math.nan)
    thread = ServiceThread(LearnerService(), run_id, redis_url)
    try:
        await asyncio.to_thread(thread._thread.join, 240)
    finally:
        thread.stop(20)
    text = str(thread.error)
    assert "3 consecutive optimizer steps had a non-finite gradient (learner.max_non_finite_steps)" in text
    assert str(RunArchive(runs_folder / run_id).batch_path(3, writer(runs_folder / run_id, 3))) in text
    assert f"`penstock replay {run_id} 3 --runs {runs_folder}`" in text
    events = [event for _, event in await EventLog(redis, keys, "test").events()]
    skips = [event.text for event in events if event.phase == "non-finite-gradient"]
    assert ["2 of 2 optimizer steps skipped" in line for line in skips] == [True, True]
    assert skips[0].endswith("2 in a row so far")
    assert [text in event.text for event in events if event.phase == "service-failed"] == [True]
    assert at_the_end == [4.0]
    # The second rollout step was committed with its skipped steps, the third was not.
    assert (await read_policy(redis, keys)).version == 2
    assert (await group_counts(redis, keys)).trained == 8
    # Those of the committed steps are in the archive.
    assert [batch.batch.step for batch in await History(redis, keys, "learner", UNOWNED).batches()] == [3]
    # The files of the failed run are enough to reproduce the failure.
    status, output = await asyncio.to_thread(penstock, runs_folder / run_id, 3)
    lines = [line for line in output.splitlines() if line.endswith(("yes", "NO"))]
    assert (status, len(lines), sum("skipped: not finite" in line for line in lines)) == (0, 6, 4), output
