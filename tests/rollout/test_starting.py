"""The named waits of a replica's start, and its wait for the model; no engine is started."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from rollout.service import RolloutService
from services.process.hosting import Context
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document, service_context


class Stop(Exception):  # noqa: N818 - it ends the start and is not an error
    """Far enough."""


async def test_waits_of_a_start(redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = recipe_document("/nowhere", limits={"startup_timeout_s": 77.0})
    seen: list[tuple[str, float]] = []

    async with service_context(redis, run_id, document, "rollout") as context:

        def look() -> None:
            seen.extend((wait.name, wait.deadline_s) for wait in context.waits.current(time.time() + 5))

        class Tokenizer:
            stop_ids = ()

            def __init__(self, *_: Any) -> None:
                look()

        class Engine:
            @classmethod
            async def start(cls, *_: Any) -> None:
                look()
                raise Stop

        monkeypatch.setattr("rollout.service.load_libraries", lambda _: look())
        monkeypatch.setattr("rollout.service.ChatTokenizer", Tokenizer)
        monkeypatch.setattr("rollout.service.RolloutEngine", Engine)
        prepared = replace(context, record=replace(context.record, model_path="/nowhere"))
        with pytest.raises(Stop):
            await RolloutService().run(prepared)
        assert context.waits.current(time.time() + 5) == ()
    assert seen == [("libraries", 77.0), ("tokenizer", 77.0), ("engine", 77.0)]


async def test_a_replica_waits_for_the_model_s_name(redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its libraries are loaded before."""
    loaded: list[str] = []

    def load(name: str, _: Any) -> None:
        loaded.append(name)
        raise Stop

    monkeypatch.setattr("rollout.service.load_libraries", lambda _: loaded.append("libraries"))
    monkeypatch.setattr("rollout.service.local_model", load)
    async with service_context(redis, run_id, recipe_document("/nowhere"), "rollout") as context:
        service = asyncio.create_task(RolloutService().run(context))
        await until_waiting(context, service)
        assert loaded == ["libraries"]
        await RunRecords(redis).set_paths(run_id, model_path="package:made")
        with pytest.raises(Stop):
            await service
    assert loaded == ["libraries", "package:made"]


async def test_a_replica_that_waits_for_the_model_can_be_stopped(
    redis: Any, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.service.load_libraries", lambda _: None)
    async with service_context(redis, run_id, recipe_document("/nowhere"), "rollout") as context:
        service = asyncio.create_task(RolloutService().run(context))
        await until_waiting(context, service)
        context.stopping.set()
        await service


async def until_waiting(context: Context, service: asyncio.Task[None]) -> None:
    ends = time.monotonic() + 60
    while not context.waits.is_open("prepared"):
        assert not service.done(), service.exception()
        assert time.monotonic() < ends
        await asyncio.sleep(0.01)
