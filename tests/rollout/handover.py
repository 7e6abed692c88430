"""Owns a group that one replica starts and another finishes, on one real engine.

Must not be used outside tests.
"""

from __future__ import annotations

import asyncio

from rollout.engine import Generation
from rollout.generation import ResponseGenerator
from rollout.prompts import ChatTokenizer
from rollout.tasks import GroupWorker, LeasedTask
from services.contracts import Lane, Sampling, Task
from services.streams.delivery.consumer import Consumer
from services.streams.delivery.nucleus import Nuclei
from services.streams.delivery.payloads import SamplePayload, fetch
from services.streams.state.group_state import GroupTransitions
from tests.rollout.hand_sampler import task
from tests.rollout.replica import Replica
from tests.rollout.waiting import until

SAMPLES, KEPT_TOKENS = 2, 20


async def handed_over(
    replica: Replica, group: str, sampling: Sampling
) -> tuple[list[int], list[tuple[list[int], Generation]]]:
    """How many tokens of each sample the first replica kept before it ended; then (prompt's ids, response) of each."""
    context = replica.context
    redis, keys, model = context.redis, context.keys, context.record.recipe.model
    assert model.path is not None
    tokenizer = ChatTokenizer(model.path, context.record.recipe.max_prompt_tokens)
    tokenizer.stop_ids = []  # as the engine, or a kept part that ends with one by chance is a whole response
    sampler = await GroupTransitions.fenced(redis, keys, "sampler")
    wanted = task(group, SAMPLES).model_copy(update={"sampling": sampling})
    transitions, kept = GroupTransitions(redis, keys, "rollout"), []
    for name in ("first", "second"):
        consumer = Consumer(redis, keys, keys.lane(Lane.TRAIN).tasks, "rollout", f"{group}-{name}", Task, 30.0, 3)
        await consumer.open()
        if name == "first":
            assert await sampler.dispatch(Lane.TRAIN, [wanted], None)
        [delivery] = await consumer.read(1, 20.0)
        worker = GroupWorker(ResponseGenerator(replica.engine, tokenizer, model.max_model_len))
        working = asyncio.create_task(
            worker.work(LeasedTask(context, Lane.TRAIN, consumer, transitions, delivery)), name=f"{name} replica"
        )
        if name == "first":

            async def half_drawn(worker: GroupWorker = worker) -> bool:
                halves = list(worker._generator.half_drawn.values())
                drawn = [half.unsaved(KEPT_TOKENS) for half in halves]
                return len(drawn) == SAMPLES and all(drawn)

            await until(half_drawn, 60)
            worker.end()
        await working
        if name == "first":
            fields = await redis.hgetall(keys.partials(group))
            kept = [int(fields[f"tokens:{at}".encode()]) for at in range(SAMPLES)]
    whole, damaged = await fetch(redis, [keys.payload(group, index) for index in range(SAMPLES)])
    assert damaged == {}
    return kept, [(payload.prompt_ids.tolist(), _generation(payload)) for payload in whole.values()]


def _generation(payload: SamplePayload) -> Generation:
    nuclei = payload.nuclei and Nuclei(payload.nuclei.ids.copy(), payload.nuclei.offsets)  # torch wants it writable
    tokens = payload.response_ids, payload.behaviour_logprobs, payload.spans
    return Generation(*tokens, payload.finish_reason, nuclei)
