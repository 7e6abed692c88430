"""Owns the tests of the commands for runs that exist: dead letters, waits, pause and resume, over a real gateway.

Must not train.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_client.cli.terminal import plain
from penstock_client.client import Client
from penstock_client.errors import ApiError
from services.contracts import Cause, Closing, DeadLetter, Lane, ProcessInfo, RunState
from services.controller.ended.closings import Closings
from services.settings import parse_recipe
from services.streams.keys import RunKeys
from services.streams.state.ended.closing import close_run
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.runs import RunRecords
from services.waits import Waits
from tests.deploy.command_line import ROOT, penstock
from tests.harness.small_run import recipe_document
from tests.penstock_client.gateways import running_gateway


@pytest.fixture(scope="module")
def gateway(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a gateway over the test's Redis, in a new process."""
    with running_gateway(redis_url, tmp_path_factory.mktemp("state")) as gateway:
        yield gateway.url


HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]x[/bold red]\u202e\r\n"


async def submitted(redis: Any, run: str, *states: str) -> RunKeys:
    """Create a run that goes through `states`; returns its keys."""
    await RunRecords(redis).create(run, parse_recipe(recipe_document("/model")))
    for state in states:
        await RunRecords(redis).transition(run, RunState(state), "test")
    return RunKeys(run)


async def add_letter(redis: Any, keys: RunKeys, group: str, reason: str) -> str:
    """Add the dead letter of a group's task; returns its entry."""
    letter = DeadLetter(
        stream=keys.lane(Lane.TRAIN).tasks,
        entry="1-0",
        reason=reason,
        deliveries=3,
        cause=Cause.DELIVERIES,
        group=group,
        prompt=HOSTILE,
        body=HOSTILE,
        at=time.time(),
    )
    return (await redis.xadd(keys.dead, {"m": letter.model_dump_json()})).decode()


def harmless(output: str) -> bool:
    """Whether the output contains only printable text and line breaks."""
    return all(char.isprintable() or char == "\n" for char in output)


async def call(*arguments: str) -> tuple[int, str]:
    """Run the command in a thread, so that the test's event loop is not blocked."""
    return await asyncio.to_thread(penstock, *arguments)


async def test_dead_letters_are_listed_as_plain_text(redis: Any, gateway: str, run_id: str) -> None:
    keys = await submitted(redis, run_id, "running")
    assert await call("dead", run_id, "--api", gateway) == (0, f"{run_id}: no dead letters\n")
    entries = [await add_letter(redis, keys, f"g{number}", f"died of {HOSTILE}") for number in range(3)]
    status, output = await call("dead", run_id, "--api", gateway)
    assert (status, harmless(output)) == (0, True), output
    heading, *rows = output.splitlines()
    assert heading.split() == ["entry", "when", "stream", "cause", "group", "reason"]
    assert [row.split()[0] for row in rows] == entries
    for shown in ("tasks", "deliveries", "\\x1b[2J", "[bold red]x[/bold red]", "\\u202e"):
        assert all(shown in row for row in rows)
    assert keys.dead not in output
    status, output = await call("dead", run_id, "--json", "--api", gateway)
    assert [letter["entry"] for letter in json.loads(output)] == entries


async def test_waits_are_a_table(redis: Any, gateway: str, run_id: str) -> None:
    await submitted(redis, run_id, "running")
    assert await call("waits", run_id, "--api", gateway) == (0, f"{run_id}: nothing waits\n")
    began = time.time() - 130
    waits = Waits(lambda: began)
    waits.pending("sync", f"replica {HOSTILE}", 60)
    waits.pending("tasks", "work", 600, idle=True)
    info = ProcessInfo(id="learner-1", service="learner", run=run_id, host="h", pid=1, metrics="h:9")
    async with Heartbeat(redis, info, waits):
        status, output = await call("waits", run_id, "--api", gateway)
    assert (status, harmless(output)) == (0, True), output
    heading, *rows = [re.split(" {2,}", line.strip()) for line in output.splitlines()]
    assert heading == ["duration", "deadline", "kind", "process", "wait", "waits for"]
    assert re.fullmatch(r"[2-9]m\d\ds", rows[0][0]), rows[0][0]
    assert rows[0][1:5] == ["1m00s", "stalled", "learner-1", "sync"]
    assert rows[0][5].startswith("replica \\x1b]0;owned\\x07\\x1b[2J[bold red]x[/bold red]")
    assert rows[1][1:] == ["10m00s", "idle", "learner-1", "tasks", "work"]


async def test_a_run_is_paused_watched_and_resumed(redis: Any, gateway: str, run_id: str) -> None:
    keys, records = await submitted(redis, run_id), RunRecords(redis)
    status, output = await call("pause", run_id, "--api", gateway)
    assert (status, output) == (2, f"penstock: run {run_id!r} is queued; only a running one can be paused\n")
    await records.transition(run_id, RunState.RUNNING, "test")
    assert (await call("pause", run_id, "--api", gateway))[0] == 0
    assert (await records.get(run_id)).pause_requested
    await records.transition(run_id, RunState.PAUSED, "no informative groups")
    await redis.set(keys.starved, "64 groups judged, 0 of 4 kept; correct answers 0:60 4:4")
    # In a new process: the test runner captures the output of one command at a time.
    command = ["-m", "deploy.cli.main", "watch", run_id, "--api", gateway]
    watching = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, stdout=subprocess.PIPE)
    assert watching.stdout is not None
    async with asyncio.timeout(30):
        seen = [(await watching.stdout.readline()).decode() for _ in range(3)]
    await asyncio.sleep(2.5)
    assert watching.returncode is None, "watch must not end while the run is paused"
    assert await call("resume", run_id, "--api", gateway) == (0, f"{run_id}: resuming\n")
    record = await records.get(run_id)
    assert (record.pause_requested, await redis.exists(keys.starved)) == (False, 0)
    await records.transition(run_id, RunState.FAILED, "test")
    rest, _ = await asyncio.wait_for(watching.communicate(), 20)
    lines = [line.split("] ", 1)[1] for line in "".join([*seen, rest.decode()]).splitlines()]
    assert watching.returncode == 1
    assert lines == [
        "run is paused: no informative groups",
        "64 groups judged, 0 of 4 kept; correct answers 0:60 4:4",
        f"`penstock resume {run_id}` resumes it",
        "run is failed: test",
    ]
    status, output = await call("resume", run_id, "--from", "3", "--api", gateway)
    assert (status, output.startswith("penstock: from_step: 3 is not valid")) == (2, True)
    await redis.set(keys.checkpoints, "[3]")
    expected = f"{run_id}: queued, resumed from step 3\n"
    assert await call("resume", run_id, "--from", "3", "--api", gateway) == (0, expected)
    assert (await records.get(run_id)).resume_step == 3


async def test_a_run_is_deleted_after_a_question(redis: Any, gateway: str, run_id: str, tmp_path: Path) -> None:
    await submitted(redis, run_id, "running")
    status, output = await call("delete", run_id, "--yes", "--api", gateway)
    assert (status, output) == (2, f"penstock: run {run_id!r} is running; cancel it first\n")
    await RunRecords(redis).transition(run_id, RunState.FAILED, "test")
    status, output = await call("delete", run_id, "--files", "--api", gateway)
    assert (status, output.startswith(f"Delete run {run_id} from Redis and all of its files? [y/N]")) == (1, True), (
        output
    )
    assert (await RunRecords(redis).get(run_id)).closing is None, "without an answer nothing is deleted"
    await close_run(redis, run_id, Closing.DELETING)
    assert " test (deleting)\n" in (await call("runs", "--api", gateway))[1]
    (tmp_path / run_id).mkdir()
    deleting = asyncio.create_task(call("delete", run_id, "--files", "--yes", "--api", gateway))
    async with asyncio.timeout(60):
        requested = False
        while not requested:
            await asyncio.sleep(0.05)
            requested = (await RunRecords(redis).get(run_id)).delete_files
    await Closings(redis, tmp_path).close(run_id, asyncio.Event())  # as the controller does
    assert await asyncio.wait_for(deleting, 60) == (0, f"{run_id}: deleted\n")
    assert not (tmp_path / run_id).exists()
    status, output = await call("delete", run_id, "--yes", "--api", gateway)
    assert (status, output) == (2, f"penstock: run {run_id!r} does not exist\n")


NO_IDS = ("{run}?files=true&", "nothing/../{run}", "..", "%2e%2e", "", "{run}#", "{run}*", "{run}/cancel?", "{run}\n")


@pytest.mark.parametrize("command", ["show", "watch", "cancel", "pause", "resume", "delete", "dead", "waits"])
async def test_what_is_no_run_id_reaches_no_run(redis: Any, gateway: str, run_id: str, command: str) -> None:
    await submitted(redis, run_id, "failed")
    before = await redis.hgetall(RunKeys(run_id).record)
    for text in NO_IDS:
        given = text.format(run=run_id)
        status, output = await call(command, given, *(["--yes"] if command == "delete" else []), "--api", gateway)
        expected = plain(f"penstock: run id: {given!r} is not valid: expected lower-case letters, digits and dashes")
        assert (status, output.startswith(expected)) == (2, True), output
    assert await redis.hgetall(RunKeys(run_id).record) == before


async def test_the_client_quotes_every_run_id(redis: Any, gateway: str, run_id: str) -> None:
    await submitted(redis, run_id, "failed")
    before = await redis.hgetall(RunKeys(run_id).record)
    with Client(gateway) as api:
        for text in (f"{run_id}?files=true&", f"nothing/../{run_id}", f"{run_id}#"):
            with pytest.raises(ApiError):
                await asyncio.to_thread(api.delete, text, False)
    assert await redis.hgetall(RunKeys(run_id).record) == before
