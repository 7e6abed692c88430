"""Owns the rollout tests' replica: a started engine that follows the weight plans of its own run.

Must not be used outside tests.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout.engine import RolloutEngine
from rollout.weight_sync import WeightFollower
from services.process.hosting import Context
from services.streams.connection.client import connect
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.sender import Sender

TOP_K = 20
"""The largest top-k that a test may request of the engine."""


@dataclass
class Replica:
    """A replica for tests. `following` is the follower's run()."""

    context: Context
    engine: RolloutEngine
    follower: WeightFollower
    following: asyncio.Task[None]
    sender: Sender


def _forget_stop_tokens(model: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(fields | {"eos_token_id": None}))


@asynccontextmanager
async def started_replica(
    redis_url: str, model: Path, /, staging: str = "device", **sections: dict[str, Any]
) -> AsyncIterator[Replica]:
    """A replica of a strictly on-policy run without stop tokens: lengths are known. `sections`: of its recipe."""
    _forget_stop_tokens(model)
    redis = await connect(redis_url)
    document = recipe_document(
        model,
        **sections
        | {
            "model": {"max_model_len": 1024} | sections.get("model", {}),
            "rollout": {"top_k": TOP_K},
            "limits": {"max_staleness": 0},
            "weights": {"timeout_s": 20.0, "staging": staging},
        },
    )
    async with service_context(redis, f"weights-{uuid.uuid4().hex[:8]}", document, "rollout") as context:
        engine = await RolloutEngine.start(context.record.recipe, str(model), [], context.heartbeat.info.id)
        try:
            await context.heartbeat.update(state="joining")
            follower = WeightFollower(context, engine)
            following = asyncio.create_task(follower.run())
            yield Replica(context, engine, follower, following, Sender(context, context.heartbeat.info.id))
            follower.close()
            await asyncio.wait([following], timeout=10)
        finally:
            await engine.stop()
    await redis.aclose()
