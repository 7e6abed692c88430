"""Owns how tests run a real learner: batches as the sampler publishes them, waiting, the rank processes.

Must not be used outside tests.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from learner.service import LearnerService
from services.contracts import (
    AFTER,
    Batch,
    BatchGroup,
    BatchSample,
    EvaluationRecord,
    Lane,
    SamplerState,
    VersionSpan,
)
from services.process.hosting import ServiceThread
from services.settings import HELD_OUT, parse_recipe
from services.streams.delivery.payloads import SamplePayload, pack
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog, append_message
from services.streams.state.runs import RunRecords
from tests.harness.free_ports import free_port
from tests.harness.small_run import recipe_document

ROOT = Path(__file__).parents[2]


async def submit(redis: Any, run: str, folder: Path, /, **sections: dict[str, Any]) -> None:
    records = RunRecords(redis)
    await records.create(run, parse_recipe(recipe_document(folder, **sections)))
    await records.set_paths(run, model_path=str(folder))


def draw_batch(
    keys: RunKeys, version: int, logprob: float = -4.5, replica: str = ""
) -> tuple[Batch, dict[str, SamplePayload]]:
    """Four groups of four responses, and their payloads by key; `logprob` is the behaviour log-prob of every token.

    `replica`: who sampled all of them, with `version`; without it, their versions are unknown.
    """
    draw = np.random.default_rng(version)
    payloads, groups = {}, []
    for name in (f"v{version}g{index}" for index in range(4)):
        samples = []
        prompt = draw.integers(0, 107, 8, dtype=np.int32)
        for index, advantage in enumerate((1.5, -0.5, -0.5, -0.5)):
            tokens = int(draw.integers(2, 9))
            ids = draw.integers(0, 107, tokens, dtype=np.int32)
            key = keys.payload(name, index)
            spans = (VersionSpan(version=version, start=0, end=tokens),) if replica else ()
            payloads[key] = SamplePayload(prompt, ids, np.full(tokens, logprob, np.float32), "", "stop", spans)
            samples.append(
                BatchSample(
                    payload=key,
                    tokens=tokens,
                    advantage=advantage,
                    reward=1.0,
                    correct=index == 0,
                    masked=False,
                    staleness=0,
                    replica=replica,
                )
            )
        groups.append(BatchGroup(group=name, samples=tuple(samples), prompt=f"prompt of {name}"))
    batch = Batch(
        step=version + 1,
        version=version,
        groups=tuple(groups),
        sampler_state=SamplerState(cursor=0, next_group=0),
        sampling_metrics={"accuracy": 0.25},
        generation_started_at=1.0,
        generation_finished_at=2.0,
    )
    return batch, payloads


async def put_batch(
    redis: Any, keys: RunKeys, version: int, logprob: float = -4.5, *, step: int | None = None, replica: str = ""
) -> Batch:
    """Publish a drawn batch as the sampler does: payloads stored, groups batched and pending.

    `step`: publish it for another rollout step than that after `version`. `replica`: see `draw_batch`.
    """
    batch, payloads = draw_batch(keys, version, logprob, replica)
    if step is not None:
        batch = batch.model_copy(update={"step": step, "version": step - 1})
    for key, payload in payloads.items():
        await redis.hset(key, mapping=pack(payload))
    for group in batch.groups:
        await redis.hset(keys.group(group.group), mapping={"state": "batched", "samples": 4, "step": batch.step})
        await redis.sadd(keys.lane(Lane.TRAIN).pending, group.group)
        await redis.hincrby(keys.lane(Lane.TRAIN).counters, "dispatched", 1)
    await redis.xadd(keys.batches, {"m": batch.model_dump_json()})
    return batch


async def put_evaluation(redis: Any, keys: RunKeys, evaluated: str = HELD_OUT, name: str = AFTER) -> EvaluationRecord:
    """Append the evaluation of a set, as the sampler does when it is complete."""
    record = EvaluationRecord(
        name=name,
        set=evaluated,
        version=1,
        prompts=8,
        samples_per_prompt=2,
        accuracy=0.5,
        standard_error=0.1,
        unknown=0,
    )
    await append_message(redis, keys, keys.evaluations, record, 0)
    return record


async def until_step(redis: Any, keys: RunKeys, step: int) -> None:
    ends = time.monotonic() + 240
    while len(await EventLog(redis, keys, "test").steps()) < step:
        assert time.monotonic() < ends, f"no step {step}"
        await asyncio.sleep(0.05)


async def until_event(redis: Any, keys: RunKeys, phase: str, deadline_s: float = 240.0) -> str:
    """The text of the first event of a phase."""
    ends = time.monotonic() + deadline_s
    while True:
        events = [event for _, event in await EventLog(redis, keys, "test").events()]
        found = [event.text for event in events if event.phase == phase]
        if found:
            return found[0]
        assert time.monotonic() < ends, f"no event {phase!r} within {deadline_s} s, but {events}"
        assert not any(event.phase == "service-failed" for event in events), events
        await asyncio.sleep(0.1)


async def stop(thread: ServiceThread) -> None:
    """Drain a healthy learner."""
    assert await asyncio.to_thread(thread.stop, 60.0), "the learner did not drain within 60 s"
    assert thread.error is None, thread.error


async def train_run(redis: Any, redis_url: str, run: str, versions: int) -> None:
    """Run a learner of one rank from the submitted run's model to its export, after `versions` rollout steps."""
    keys = RunKeys(run)
    thread = ServiceThread(LearnerService(), run, redis_url)
    try:
        for version in range(versions):
            await put_batch(redis, keys, version)
        await put_evaluation(redis, keys)
        await until_event(redis, keys, "exported")
    finally:
        await stop(thread)


class Program(subprocess.Popen[bytes]):
    """A process that runs `code` and logs to a file, because tests do not read a pipe while it runs."""

    def __init__(self, code: str, environment: dict[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it stays readable after the process
        weakref.finalize(self, self._log.close)
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        super().__init__(
            [sys.executable, "-c", code],
            env=os.environ | settings | environment,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )

    def output(self) -> str:
        """The log so far, read without moving the file position of the process."""
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")


def start_ranks(run: str, redis_url: str, world: int, nodes: Sequence[Path] = ()) -> list[Program]:
    """Start the ranks of a learner as processes; kill them with `end_ranks`.

    `nodes`: a separate PENSTOCK_RUNS for each rank, as on nodes that share only a store.
    """
    return start_programs(
        "from learner.training.process_group import end_with; from learner.service import LearnerService; "
        "from services.process.hosting import main; "
        "end_with(lambda: main(lambda: LearnerService({rank}, {world}, '127.0.0.1', {port}), "
        f"['--run', '{run}', '--redis', '{redis_url}']))",
        world,
        [{"PENSTOCK_RUNS": str(node)} for node in nodes],
    )


def start_programs(code: str, world: int, environments: Sequence[dict[str, str]] = ()) -> list[Program]:
    """Start `world` processes that run `code`, in which {rank}, {world} and {port} are replaced."""
    port = free_port()
    return [
        Program(code.format(rank=rank, world=world, port=port), environment)
        for rank, environment in zip(range(world), environments or [{}] * world, strict=True)
    ]


async def drain_ranks(processes: list[Program]) -> None:
    """Stop all ranks. Each must exit with 0."""
    for process in processes:
        process.terminate()
    for process in processes:
        assert await asyncio.to_thread(process.wait, 60) == 0, process.output()


def end_ranks(processes: list[Program]) -> None:
    """Kill the processes that still run."""
    for process in processes:
        process.kill()
        process.wait(60)
