"""The named waits of a replica's start; no engine is started."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from rollout.service import RolloutService
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

        monkeypatch.setattr("rollout.service.ChatTokenizer", Tokenizer)
        monkeypatch.setattr("rollout.service.RolloutEngine", Engine)
        prepared = replace(context, record=replace(context.record, model_path="/nowhere"))
        with pytest.raises(Stop):
            await RolloutService().run(prepared)
        assert context.waits.current(time.time() + 5) == ()
    assert seen == [("tokenizer", 77.0), ("engine", 77.0)]
