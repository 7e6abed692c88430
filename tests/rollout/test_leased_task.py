"""What a leased task asks of the engine and says about the responses; no engine is started."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

from rollout.engine import Generation
from rollout.generation import MIXED_VERSION_TRIES, MixedVersionError, ResponseGenerator
from rollout.tasks import GroupWorker, LeasedTask
from services.contracts import Lane, Task, VersionSpan
from services.streams.delivery.consumer import Consumer, Delivery, Lease
from services.streams.delivery.payloads import SamplePayload
from services.streams.state.group_state import GroupTransitions, missing_samples
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.hand_sampler import task

ROOT = Path(__file__).parents[2]
PROMPT_IDS = np.array([2, 4, 9], np.int32)
SPANS = (VersionSpan(version=4, start=0, end=1), VersionSpan(version=6, start=1, end=2))


@asynccontextmanager
async def leased(redis: Any, run: str, lane: Lane, message: Task, max_staleness: int = 0) -> AsyncIterator[LeasedTask]:
    """The second delivery of `message`, of a stream that is never read."""
    document = recipe_document("/none", limits={"max_staleness": max_staleness})
    async with service_context(redis, run, document, "rollout") as context:
        stream = context.keys.lane(lane).tasks
        consumer = Consumer(redis, context.keys, stream, "rollout", "me", Task, 30.0, 3)
        transitions = GroupTransitions(redis, context.keys, "rollout")
        delivery = Delivery(Lease(stream, "rollout", "me", "7-0"), message, 2)
        yield LeasedTask(context, lane, consumer, transitions, delivery)


@pytest.mark.parametrize(("finish_reason", "truncated"), [("stop", False), ("length", True)])
async def test_facts_of_a_mixed_version_response(redis: Any, run_id: str, finish_reason: str, truncated: bool) -> None:
    payload = SamplePayload(
        prompt_ids=PROMPT_IDS,
        response_ids=np.array([5, 6], np.int32),
        behaviour_logprobs=np.array([-0.5, -1.5], np.float32),
        text="ab",
        finish_reason=finish_reason,
        spans=SPANS,
    )
    async with leased(redis, run_id, Lane.TRAIN, task("g0")) as leased_task:
        sample = leased_task.sample(1, payload, 7.0)
        expected_key = leased_task.context.keys.payload("g0", 1)
    facts = sample.facts
    assert (sample.group, sample.index, sample.verifier, sample.reference) == ("g0", 1, "pattern", {"a": 2})
    assert (facts.oldest_version, facts.newest_version) == (4, 6)
    assert (facts.prompt_tokens, facts.response_tokens, facts.truncated) == (3, 2, truncated)
    assert (facts.payload, facts.mean_logprob) == (expected_key, -1.0)
    assert facts.started_at == 7.0 < facts.finished_at


@pytest.mark.parametrize(
    ("lane", "max_staleness", "one_version"),
    [(Lane.TRAIN, 0, True), (Lane.TRAIN, 1, False), (Lane.EVALUATION, 0, False)],
)
async def test_requests_of_an_on_policy_run_are_of_one_version(
    redis: Any, run_id: str, lane: Lane, max_staleness: int, one_version: bool
) -> None:
    message = task("g0")
    seeded = message.model_copy(update={"sampling": message.sampling.model_copy(update={"seed": 40})})
    async with leased(redis, run_id, lane, seeded, max_staleness) as leased_task:
        request = leased_task.request(3, PROMPT_IDS)
    assert (request.name, request.seed, request.one_version) == ("g0/3/7-0/2", 43, one_version)


class _Engine:
    """Answers every request with the same response, by default a mixed-version one."""

    def __init__(self, answer: Generation | None = None) -> None:
        self.names: list[str] = []
        ids, logprobs = np.array([5, 6], np.int32), np.array([-0.5, -1.5], np.float32)
        self.answer = answer or Generation(ids, logprobs, SPANS, "stop")

    async def generate(self, _ids: list[int], _sampling: Any, name: str, _seed: int | None) -> Generation:
        self.names.append(name)
        return self.answer


class _Tokenizer:
    def prompt_ids(self, _messages: Any) -> Any:
        return PROMPT_IDS

    def text(self, _ids: Any) -> str:
        return "ab"


async def test_mixed_version_responses_are_generated_again(redis: Any, run_id: str) -> None:
    engine = _Engine()
    generator = ResponseGenerator(engine, _Tokenizer(), 256)  # type: ignore[arg-type]
    async with leased(redis, run_id, Lane.TRAIN, task("g0")) as leased_task:
        with pytest.raises(MixedVersionError, match="g0/1/7-0/2 was mixed-version in all 3 attempts"):
            await generator.generate(leased_task.request(1, PROMPT_IDS))
    assert engine.names == [f"g0/1/7-0/2/{attempt}" for attempt in range(MIXED_VERSION_TRIES)]


def _files_on_the_way(task: LeasedTask, visited: list[str]) -> Callable[[FrameType, str, Any], None]:
    """A profiler that notes each of our files in which a call gets the task, its delivery or its message."""
    parts = {id(part) for part in (task, task.delivery, task.message)}
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        ours = file.is_relative_to(ROOT) and not file.is_relative_to(ROOT / "tests")
        # Each function counts where it is met first: a coroutine that continues is called again.
        if event != "call" or not ours or frame.f_code in entered:
            return
        if any(id(value) in parts for value in frame.f_locals.values()):
            entered.add(frame.f_code)
            if visited[-1:] != [file.name]:
                visited.append(file.name)

    return note


async def test_a_task_passes_through_few_files(redis: Any, run_id: str) -> None:
    message = task("g0", samples=1)
    one_version = Generation(np.array([5], np.int32), np.array([-0.5], np.float32), (SPANS[0],), "stop")
    generator = ResponseGenerator(_Engine(one_version), _Tokenizer(), 256)  # type: ignore[arg-type]
    visited: list[str] = []
    async with service_context(redis, run_id, recipe_document("/none"), "rollout") as context:
        transitions = GroupTransitions(redis, context.keys, "rollout")
        consumer = Consumer(redis, context.keys, context.keys.lane(Lane.TRAIN).tasks, "rollout", "me", Task, 30.0, 3)
        await transitions.dispatch(Lane.TRAIN, message, None)
        await consumer.open()
        [delivery] = await consumer.read(1, 5.0)
        leased_task = LeasedTask(context, Lane.TRAIN, consumer, transitions, delivery)
        worker = GroupWorker(generator)
        sys.setprofile(_files_on_the_way(leased_task, visited))
        try:
            await worker.work(leased_task)
        finally:
            sys.setprofile(None)
        assert await missing_samples(redis, context.keys, message) == [], "the sample is published"
    returns = len(visited) - len(set(visited))
    assert "tasks.py" in visited
    assert len(set(visited)) <= 4
    assert returns <= 2, visited
