"""What a sample says about its response; no engine is started."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.generation import GroupWorker
from services.contracts import VersionSpan
from services.streams.delivery.payloads import SamplePayload
from tests.harness.small_run import recipe_document, service_context
from tests.rollout.hand_sampler import task


@pytest.mark.parametrize(("finish_reason", "truncated"), [("stop", False), ("length", True)])
async def test_the_facts_of_a_response_of_two_versions(
    redis: Any, run_id: str, finish_reason: str, truncated: bool
) -> None:
    body = SamplePayload(
        prompt_ids=np.array([2, 4, 9], np.int32),
        response_ids=np.array([5, 6], np.int32),
        behaviour_logprobs=np.array([-0.5, -1.5], np.float32),
        text="ab",
        finish_reason=finish_reason,
        spans=(VersionSpan(version=4, start=0, end=1), VersionSpan(version=6, start=1, end=2)),
    )
    async with service_context(redis, run_id, recipe_document("/none"), "rollout") as context:
        worker = GroupWorker(context, None, None)  # type: ignore[arg-type]
        facts = worker._facts(task("g0"), 1, body, 7.0)
    assert (facts.oldest_version, facts.newest_version) == (4, 6)
    assert (facts.prompt_tokens, facts.response_tokens, facts.truncated) == (3, 2, truncated)
    assert (facts.payload, facts.mean_logprob) == (context.keys.payload("g0", 1), -1.0)
    assert facts.started_at == 7.0 < facts.finished_at
