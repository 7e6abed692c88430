"""An untied model under weight syncs, and an incomplete policy, after which the replica reports that it is poisoned."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollout.engine import PoisonedError
from services.contracts import Sampling
from tests.rollout.reference import Policy, assert_written_by
from tests.rollout.replica import Replica, started_replica

# A separate engine: an engine's head is tied or untied from its start.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]

PROMPT = [2, 4, *(7 + (31 * i) % 90 for i in range(98))]
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=40)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("untied")


@pytest.fixture(scope="module")
def policies(root: Path) -> dict[int, Policy]:
    return {version: Policy(root / str(version), tied=False, seed=version) for version in range(3)}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def replica(redis_url: str, root: Path, policies: dict[int, Policy]) -> AsyncIterator[Replica]:
    async with started_replica(redis_url, root / "0", staging="host") as started:
        yield started


async def test_log_probs_follow_consecutive_versions(replica: Replica, policies: dict[int, Policy]) -> None:
    assert "lm_head.weight" in policies[1].weights
    for version in (1, 2):
        ack = await replica.sender.send(replica.sender.plan(version, version), policies[version].weights)
        assert ack.phase == "applied", ack.detail
        for repeat in range(2):
            generation = await replica.engine.generate(PROMPT, SAMPLING, f"{version}-{repeat}")
            assert [(s.version, s.start, s.end) for s in generation.spans] == [(version, 0, 40)]
            assert_written_by(policies, PROMPT, generation)


async def test_an_incomplete_policy_poisons_the_replica(replica: Replica, policies: dict[int, Policy]) -> None:
    incomplete = {name: tensor for name, tensor in policies[0].weights.items() if name != "lm_head.weight"}
    ack = await replica.sender.send(replica.sender.plan(3, 3), incomplete)
    assert ack.phase == "failed"
    assert "lm_head.weight" in ack.detail
    assert replica.context.heartbeat.info.state == "poisoned"
    with pytest.raises(PoisonedError, match="applying version 3 failed"):
        await asyncio.wait_for(replica.following, 60)
