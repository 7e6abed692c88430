"""Owns the rollout service: one replica that turns tasks into samples and follows weight syncs.

Reads the lanes' tasks (evaluation first) and the run's weight plans; writes samples with their payloads, weight acks
and its heartbeat: starting -> joining (engine up) -> ready (holds a published version) -> draining, or poisoned.
In a run that only evaluates, the weights in the model's folder are policy version 0.
When a replica dies, its leases expire, other replicas take over its tasks and generate only what is missing: they go on
from the tokens that it kept about once a second (rollout/half_drawn.py). The learner re-forms the broadcast group
without it; its engine's processes end with it.
Must not decide anything about a group, or import Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from rollout.engine import RolloutEngine
from rollout.generation import ResponseGenerator
from rollout.processes.environment import load_libraries
from rollout.prompts import ChatTokenizer
from rollout.tasks import GroupWorker, LeasedTask
from rollout.weight_sync import WeightFollower
from services.contracts import Lane, Task
from services.process.hosting import Context, collect_garbage_rarely
from services.storage.models import local_model, models_folder
from services.streams.delivery.consumer import Consumer
from services.streams.state.group_state import GroupTransitions
from services.streams.state.rewards.reward_files import read_reward_files
from services.waits import cancel_and_wait

log = logging.getLogger(__name__)

CONSUMER_GROUP = "rollout"
READ_WAIT_S = 0.2
# Below what the host grants before it kills the process (deploy.hosting.fleet.SHUTDOWN_S).
DRAIN_S = 8.0
TASKS, GENERATION = "tasks", "generation"
"""A replica's waits. Others: `libraries`, `prepared`, `model`, `tokenizer` and `engine` while it starts, `weights`
before its first version, `redis-memory`."""


class Parts:
    """The seconds of each part of a start, in order; the text names them."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add the time of the body to a part."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items())


def slots(max_sequences: int, group_size: int) -> int:
    """The number of samples below which a replica leases another task.

    Only unfinished samples count: a group whose other samples have ended would hold their sequences idle until its
    longest response ends. One group beyond the sequences waits while the next task is leased. Not more: another replica
    may be free.
    """
    return (-(-max_sequences // group_size) + 1) * group_size


class RolloutService:
    """One vLLM replica of a run.

    Drain order: announce `draining`; stop reading tasks and plans; keep what was drawn of the responses in flight, and
    return their tasks, which other replicas take at once; finish the weight sync in flight. What takes longer than
    DRAIN_S seconds is abandoned: its leases expire. Stop the engine. Raises when the engine dies or weights were
    applied in part, so that the host replaces the replica.
    """

    name = "rollout"

    async def run(self, context: Context) -> None:
        """Work until `context.stopping` is set, then drain."""
        recipe, heartbeat = context.record.recipe, context.heartbeat
        heartbeat.info = heartbeat.info.model_copy(update={"workers": recipe.rollout.tensor_parallel})
        parts = Parts()
        with context.waits.on("libraries", "vLLM to be imported", recipe.limits.startup_timeout_s), parts.of("imports"):
            await asyncio.to_thread(load_libraries, recipe)
        with parts.of("model"):
            named = await context.model()
        if named is None:
            return
        engine, tokenizer = await self._load(context, named, parts)
        try:
            await heartbeat.update(state="joining")
            await context.event_log.write("rollout-joining", f"{heartbeat.info.id}: engine is up ({parts})")
            generator = ResponseGenerator(engine, tokenizer, recipe.model.max_model_len, context.record.id)
            await Replica(context, engine, GroupWorker(generator)).run()
        finally:
            await engine.stop()

    async def _load(self, context: Context, named: str, parts: Parts) -> tuple[RolloutEngine, ChatTokenizer]:
        """The engine and the tokenizer of the model by its name in the record."""
        recipe, startup_s = context.record.recipe, context.record.recipe.limits.startup_timeout_s
        with context.waits.on("model", "the model to be copied to this node", startup_s), parts.of("model"):
            model_path = str(await asyncio.to_thread(local_model, named, models_folder()))
        with context.waits.on("tokenizer", "the tokenizer to load", startup_s), parts.of("tokenizer"):
            files = await read_reward_files(context.redis, context.record)
            tokenizer = await asyncio.to_thread(
                ChatTokenizer, model_path, recipe.max_prompt_tokens, recipe.model.chat_template, files
            )
        with context.waits.on("engine", "the engine to load the model and answer", startup_s), parts.of("engine"):
            engine = await RolloutEngine.start(recipe, model_path, tokenizer.stop_ids, context.heartbeat.info.id)
        return engine, tokenizer


class Replica:
    """The loops around a started engine."""

    def __init__(self, context: Context, engine: RolloutEngine, worker: GroupWorker) -> None:
        collect_garbage_rarely()
        self._context = context
        self._engine = engine
        self._worker = worker
        self._follower = WeightFollower(context, engine)
        self._groups: dict[asyncio.Task[None], LeasedTask] = {}
        self._next_look = 0.0
        self._transitions = GroupTransitions(context.redis, context.keys, RolloutService.name)
        limits, rollout = context.record.recipe.limits, context.record.recipe.rollout
        self._slots = slots(rollout.max_sequences, context.record.recipe.algorithm.group_size)
        self._consumers = {
            lane: Consumer(
                context.redis,
                context.keys,
                context.keys.lane(lane).tasks,
                CONSUMER_GROUP,
                context.heartbeat.info.id,
                Task,
                limits.lease_s,
                limits.max_deliveries,
            )
            for lane in Lane
        }

    async def run(self) -> None:
        """Follow weights and work on tasks until stopping, then drain. Raises the first failure of any part."""
        for consumer in self._consumers.values():
            await consumer.open()
        limits = self._context.record.recipe.limits
        if limits.rollout_steps == 0:
            with self._context.waits.on("weights", "the model folder's weights to be served", limits.startup_timeout_s):
                await self._follower.serve_folder()
        follower = asyncio.create_task(self._follower.run())
        pull = asyncio.create_task(self._pull())
        keeper = asyncio.create_task(self._worker.keep())
        beside = [keeper, *self._thread_looks()]
        try:
            await _first_of(follower, pull, *beside, self._context.stopping.wait())
            self._worker.end()
            await self._context.heartbeat.update(state="draining")
            await self._drain(follower, pull)
        finally:
            await cancel_and_wait(follower, pull, *beside, *self._groups)

    def _thread_looks(self) -> list[asyncio.Task[None]]:
        rollout = self._context.record.recipe.rollout
        if rollout.max_threads is None:
            return []
        return [asyncio.create_task(self._engine.use_spare_cores(rollout.threads, rollout.max_threads))]

    async def _drain(self, follower: asyncio.Task[None], pull: asyncio.Task[None]) -> None:
        self._follower.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_S):  # one deadline for all: the host kills what takes longer
                await asyncio.wait([pull])  # it may be leasing a last task
                await asyncio.wait([follower, *self._groups])
        parts = [pull, follower, *self._groups]
        for part in parts:
            if part.done():
                part.result()
        if late := sum(not part.done() for part in parts):
            log.warning("%d groups or syncs are abandoned after %g s; other replicas take over", late, DRAIN_S)

    async def _pull(self) -> None:
        # No work before a published version: the weights in the model's folder may be older than the policy.
        waits, patience = self._context.waits, self._context.record.recipe.limits.stall_timeout_s
        with waits.on("weights", "a policy version published by the learner", patience):
            while not self._follower.ready.is_set() and not self._context.stopping.is_set():
                self._engine.check()
                await _either(self._follower.ready.wait(), READ_WAIT_S)
        while not self._context.stopping.is_set():
            self._engine.check()
            for group in [group for group in self._groups if group.done()]:
                del self._groups[group]
                group.result()
                waits.done(GENERATION)
            if self._groups:
                waits.done(TASKS)
                waits.pending(GENERATION, f"{len(self._groups)} groups in the engine", patience)
            else:
                waits.pending(TASKS, "tasks of the sampler", patience, idle=True)
            self._worker.progressed.clear()
            if sum(map(self._worker.unfinished, self._groups.values())) >= self._slots:
                await _either(self._worker.progressed.wait(), READ_WAIT_S)
                continue
            if (task := await self._read()) and not self._works_on(task):
                self._groups[asyncio.create_task(self._worker.work(task))] = task

    def _works_on(self, task: LeasedTask) -> bool:
        """Whether this replica took over its own lapsed lease: the work in flight goes on under the new one."""
        return any(
            other.delivery.lease == task.delivery.lease for work, other in self._groups.items() if not work.done()
        )

    async def _read(self) -> LeasedTask | None:
        """Lease one task: of the evaluation lane when it has one. One at a time, so that replicas share evenly.

        An empty evaluation lane is looked at every READ_WAIT_S seconds.
        """
        if time.monotonic() >= self._next_look:
            if task := await self._read_lane(Lane.EVALUATION, 0.0):
                return task
            self._next_look = time.monotonic() + READ_WAIT_S
        return await self._read_lane(Lane.TRAIN, READ_WAIT_S)

    async def _read_lane(self, lane: Lane, wait_s: float) -> LeasedTask | None:
        consumer = self._consumers[lane]
        for delivery in await consumer.read(1, wait_s):
            return LeasedTask(self._context, lane, consumer, self._transitions, delivery)
        return None


async def _either(waited: Coroutine[Any, Any, Any], deadline_s: float) -> None:
    try:
        await asyncio.wait_for(waited, deadline_s)
    except TimeoutError:
        return


async def _first_of(*parts: asyncio.Task[None] | Coroutine[Any, Any, Any]) -> None:
    """Wait until one part ends; raises its error."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_and_wait(*(task for task in tasks if task not in parts and not task.done()))
    for task in done:
        task.result()
