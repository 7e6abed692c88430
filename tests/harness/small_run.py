"""Owns the smallest valid run: its recipe, and the service context of a run that exists only in Redis.

Must not start a service.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.contracts import ProcessInfo
from services.process.hosting import Context
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.runs import RunRecords
from services.waits import Waits


def recipe_document(folder: Path | str, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """A small valid recipe; `sections` are merged into it."""
    document: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(folder), "max_model_len": 256},
        "data": {
            "task": "chain_sum",
            "train": 32,
            "held_out": 8,
            "options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        },
        "algorithm": {"group_size": 4},
        "rollout": {"max_new_tokens": 16, "max_sequences": 32, "kv_cache_mib": 64},
        "learner": {"mini_batch_groups": 2, "learning_rate": 1e-3, "warmup_rollout_steps": 0},
        "limits": {"rollout_steps": 3, "groups_per_step": 4, "lease_s": 5.0, "max_inflight_groups": 32},
        "evaluation": {"samples": 2},
    }
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values} if isinstance(values, dict) else values
    return document


@asynccontextmanager
async def service_context(redis: Any, run: str, document: dict[str, Any], service: str) -> AsyncIterator[Context]:
    """A service's context, for a run that exists only in Redis."""
    records = RunRecords(redis)
    try:
        record = await records.get(run)
    except LookupError:
        record = await records.create(run, parse_recipe(document))
    info = ProcessInfo(
        id=f"{service}-{uuid.uuid4().hex[:6]}", service=service, run=run, host="127.0.0.1", pid=0, metrics="127.0.0.1:0"
    )
    keys = RunKeys(run)
    event_log, waits = EventLog(redis, keys, service), Waits()
    async with Heartbeat(redis, info, waits, event_log) as heartbeat:
        yield Context(redis, keys, record, heartbeat, event_log, asyncio.Event(), "127.0.0.1", waits)
