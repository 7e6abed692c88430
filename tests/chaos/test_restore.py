"""A run whose Redis loses its volume goes on from a backup: the archive of its folder is ahead of Redis then."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.streams.keys import RunKeys
from tests.harness.programs import needed
from tests.harness.servers.release_redis import ReleaseRedis
from tests.harness.stubs.stack import StubStack
from tests.harness.stubs.workload import recipe, write_questions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

STEPS, GROUPS, QUESTIONS = 40, 8, 200
WAIT_S = 150.0
RUN = "restored"


@pytest.fixture
def server(open_path: Path) -> Iterator[ReleaseRedis]:
    needed("redis-cli")
    server = ReleaseRedis(open_path)
    with server.process:
        yield server
        print(server.process.log.read_text()[-20_000:])  # shown if the test fails


def view(stack: StubStack) -> dict[str, Any]:
    ends = time.monotonic() + WAIT_S
    while (answer := stack.api.get(f"/v1/runs/{RUN}")).status_code == 503:  # Redis restarts
        assert time.monotonic() < ends, answer.text
        time.sleep(0.2)
    found: dict[str, Any] = answer.raise_for_status().json()
    return found


def until(holds: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < ends, what
        time.sleep(0.2)


def test_a_run_goes_on_from_a_backup(server: ReleaseRedis, tmp_path: Path):
    document = recipe(
        write_questions(tmp_path / "questions.jsonl", QUESTIONS),
        QUESTIONS - 8,
        rollout_steps=STEPS,
        groups_per_step=GROUPS,
        group_size=4,
        lease_s=2.0,
        checkpoint_every=4,
    )
    arguments = {"rollout": ("--filtered", "0.25", "--delay-s", "0.02"), "learner": ("--train-s", "0.4")}
    with StubStack(tmp_path, server.url, arguments) as stack:
        stack.submit(document, RUN)
        until(lambda: view(stack)["rollout_steps"] >= 6, "the steps before the backup")
        backup = server.command("backup")
        until(lambda: view(stack)["rollout_steps"] >= 15, "the steps after the backup")
        server.lose_volume()
        server.restore(backup)
        assert view(stack)["rollout_steps"] < 15, "what came after the backup is lost"
        until(lambda: view(stack)["state"] != "running", "the end of the run")
        seen = view(stack)
    assert seen["state"] == "succeeded", seen["reason"]
    assert seen["groups"]["reconciled"]
    assert seen["groups"]["trained"] == STEPS * GROUPS
    found = server.process.client(username="penstock", password=server.passwords["penstock"]).xrange(RunKeys(RUN).steps)
    records = [json.loads(fields["m"]) for _, fields in found]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    trained = [group for record in records for group in record["groups"]]
    assert len(set(trained)) == len(trained) == STEPS * GROUPS, "no group is trained twice"
    files = [json.loads(path.read_text()) for path in (tmp_path / RUN / "records").glob("step-*.json")]
    by_step = {record["step"]: record["groups"] for record in files}
    assert by_step == {record["step"]: record["groups"] for record in records}, "the folder has the history of Redis"
