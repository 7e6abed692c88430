"""Owns the tests of the client against a real gateway, over a real Redis.

Must not train: the tests write what services would.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_client.client import Client
from penstock_client.errors import ApiError, PlatformUnavailableError, TokenRefusedError
from services.contracts import ProcessInfo, RunState, StepRecord
from services.streams.delivery.process_logs import LogShipping
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.runs import RunRecords
from tests.deploy.command_line import penstock
from tests.harness.servers.redis_servers import embedded_server
from tests.harness.small_run import recipe_document
from tests.penstock_client.gateways import ROOT, LateGateway, running_gateway


@pytest.fixture(scope="module")
def gateway(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LateGateway]:
    """A gateway whose token the client finds."""
    with running_gateway(redis_url, tmp_path_factory.mktemp("state")) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: LateGateway) -> Iterator[Client]:
    """A client of the gateway."""
    with Client(gateway.url) as client:
        yield client


def test_a_token_that_is_missing_or_wrong_says_how_to_give_one(gateway: LateGateway, tmp_path: Path) -> None:
    with Client(gateway.url, token="of-another-platform") as client, pytest.raises(TokenRefusedError) as caught:
        client.show("r")
    assert "of-another-platform" not in str(caught.value)
    status, output = penstock("runs", "--api", gateway.url, "--token", "of-another-platform")
    assert (status, output.count("\n")) == (2, 1)
    assert output.endswith("give a token of this platform: --token-file, --token or PENSTOCK_TOKEN\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(tmp_path))
        assert penstock("runs", "--api", gateway.url)[0] == 2
        patched.setenv("PENSTOCK_TOKEN", gateway.token)
        assert penstock("runs", "--api", gateway.url)[0] == 0


async def test_a_run_is_submitted_read_and_changed(redis: Any, client: Client, run_id: str) -> None:
    def use() -> None:
        submitted = client.submit(recipe_document("/model"), run_id)
        assert (submitted.id, submitted.state, submitted.warnings) == (run_id, "queued", [])
        assert submitted.recipe["name"] == "tiny"
        assert [entry.id for entry in client.runs(name=run_id)] == [run_id]
        assert list(client.runs(name=run_id, state=["failed", "succeeded"])) == []
        assert (client.steps(run_id), client.waits(run_id)) == ([], [])
        assert (list(client.dead(run_id)), list(client.unknown(run_id))) == ([], [])
        with pytest.raises(ApiError, match="only a running one can be paused"):
            client.pause(run_id)
        with pytest.raises(ApiError) as caught:
            client.scale(run_id, 0)
        assert (caught.value.status, caught.value.errors[0]["field"]) == (422, "rollout")
        client.cancel(run_id)
        with pytest.raises(ApiError) as caught:
            client.show("absent")
        assert (caught.value.status, str(caught.value)) == (404, "run 'absent' does not exist")

    await asyncio.to_thread(use)


def test_a_lost_submission_can_be_repeated(client: Client, run_id: str) -> None:
    first = client.submit(recipe_document("/model"), run_id, key=f"key-{run_id}")
    again = client.submit(recipe_document("/model"), run_id, key=f"key-{run_id}")
    assert first.id == again.id == run_id
    with pytest.raises(ApiError, match="expected an id that is not in use"):
        client.submit(recipe_document("/model"), run_id)


def test_a_list_is_read_page_by_page(client: Client, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock_client.calls.reading.PAGE", 2)
    names = [f"{run_id}-{number}" for number in range(5)]
    for name in names:
        client.submit(recipe_document("/model"), name)
    assert [entry.id for entry in client.runs(name=run_id)] == names[::-1]
    status, output = penstock("runs", "--name", run_id, "--limit", "3", "--json", "--api", client.url)
    assert (status, [entry["id"] for entry in json.loads(output)]) == (0, names[:1:-1])
    status, output = penstock("runs", "--name", run_id, "--limit", "3", "--api", client.url)
    heading, *rows = output.splitlines()
    assert heading.split() == ["run", "state", "created", "reason"]
    assert [row.split()[0] for row in rows] == [*names[:1:-1], "and"]


async def test_a_story_is_read_and_followed(redis: Any, client: Client, run_id: str) -> None:
    await asyncio.to_thread(client.submit, recipe_document("/model"), run_id)
    log = EventLog(redis, RunKeys(run_id), "sampler")
    await log.write("data-loaded", "12 prompts \x1b[2J")
    found: list[str] = []
    seen = threading.Event()

    def follow() -> None:
        for happening in client.follow(run_id):
            found.append(happening.data.get("text") or happening.data.get("state") or "")
            if "later" in found:
                seen.set()

    following = asyncio.create_task(asyncio.to_thread(follow))
    await asyncio.sleep(0)
    await log.write("data-loaded", "later")
    assert await asyncio.to_thread(seen.wait, 30), found
    await RunRecords(redis).transition(run_id, RunState.FAILED, "test")
    await asyncio.wait_for(following, 30)
    assert (found[-1], found.count("later")) == ("failed", 1)
    status, output = await asyncio.to_thread(penstock, "events", run_id, "--api", client.url)
    assert (status, "sampler: data-loaded: 12 prompts \\x1b[2J\n" in output) == (0, True)
    assert output.splitlines()[-1].endswith("run is failed: test")
    status, followed = await asyncio.to_thread(penstock, "events", "-f", run_id, "--api", client.url)
    assert (status, sorted(followed.splitlines())) == (0, sorted(output.splitlines()))


def on_terminal(*arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command with a terminal of 80 columns as its output, and the other end of that terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 80))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    command = [sys.executable, "-m", "penstock_client.cli.main", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    return process, ours


def read_terminal(terminal: int) -> str:
    """All that is written to a terminal until no process has it any more."""
    found = bytearray()
    with os.fdopen(terminal, "rb", buffering=0) as file:
        try:
            while part := file.read(65536):
                found += part
        except OSError:  # how Linux reports the end
            pass
    return found.decode()


async def test_watch_is_a_live_view_on_a_terminal(redis: Any, client: Client, run_id: str) -> None:
    await asyncio.to_thread(client.submit, recipe_document("/model"), run_id)
    await EventLog(redis, RunKeys(run_id), "sampler").write("data-loaded", "12 prompts \x1b[31m")
    process, terminal = on_terminal("watch", run_id, "--api", client.url)
    reading = asyncio.create_task(asyncio.to_thread(read_terminal, terminal))
    await RunRecords(redis).transition(run_id, RunState.FAILED, "test")
    assert await asyncio.to_thread(process.wait, 60) == 1
    text = await asyncio.wait_for(reading, 20)
    for part in (run_id, "failed", "waits for", "nothing: it is failed", "sampler: data-loaded: 12 prompts \\x1b[31m"):
        assert part in text, text
    assert "\x1b[?25l" in text, "it is drawn"
    assert text.endswith("\x1b[?25h"), "the cursor is shown again"


async def test_show_is_a_summary_on_a_terminal(redis: Any, client: Client, run_id: str) -> None:
    await asyncio.to_thread(client.submit, recipe_document("/model"), run_id)
    process, terminal = on_terminal("show", run_id, "--api", client.url)
    text = await asyncio.to_thread(read_terminal, terminal)
    assert await asyncio.to_thread(process.wait, 60) == 0
    assert f"{run_id}" in text
    assert "queued: submitted" in text
    assert max(len(line.rstrip("\r")) for line in text.splitlines()) <= 100, "with the marks of bold text"
    shown = json.loads((await asyncio.to_thread(penstock, "show", run_id, "--api", client.url))[1])
    assert (shown["id"], shown["recipe"]["name"]) == (run_id, "tiny")


def edited(run: str, *settings: str, api: str) -> tuple[int, str]:
    """What `penstock edit` exits with and prints."""
    return penstock("edit", run, *settings, "--api", api)


def test_settings_are_edited_in_flight(client: Client, run_id: str) -> None:
    client.submit(recipe_document("/model"), run_id)
    before = client.show(run_id).recipe
    assert before is not None
    rate = before["learner"]["learning_rate"]
    status, output = edited(run_id, "learner.learning_rate=1e-7", "priority=5", api=client.url)
    assert (status, f"learner.learning_rate {rate} -> 1e-07" in output, "priority 0 -> 5" in output) == (0, True, True)
    assert client.show(run_id).priority == 5
    status, output = edited(run_id, "learner.optimizer=sgd", api=client.url)
    assert (status, "learner.optimizer" in output) == (2, True)
    assert edited(run_id, "priority", api=client.url)[1].startswith("penstock: NAME=VALUE: 'priority' is not valid")


def test_a_run_is_cloned_with_other_settings(client: Client, run_id: str) -> None:
    client.submit(recipe_document("/model"), run_id)
    given = ["--set", "learner.learning_rate=1e-7", "--id", f"{run_id}-b", "--priority", "3"]
    assert penstock("clone", run_id, *given, "--api", client.url) == (0, f"{run_id}-b\n")
    copy = client.show(f"{run_id}-b")
    assert copy.recipe is not None
    assert (copy.recipe["learner"]["learning_rate"], copy.priority) == (1e-7, 3)
    status, output = penstock("queue", "--api", client.url)
    rows = [line.split() for line in output.splitlines()]
    assert (status, rows[0][:4]) == (0, ["place", "run", "project", "priority"])
    assert [row[1:4] for row in rows if row[1] == f"{run_id}-b"] == [[f"{run_id}-b", "default", "3"]]


def test_a_recipe_is_checked_without_a_run(client: Client, tmp_path: Path, run_id: str) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(recipe_document(str(tmp_path), name=run_id)))
    faults = client.check(json.loads(recipe.read_text()) | {"absent": 1})
    assert any(fault.startswith("absent: 1 is not valid") for fault in faults)
    assert list(client.runs(name=run_id)) == []


async def test_ended_runs_are_archived(redis: Any, client: Client, run_id: str) -> None:
    names = [f"{run_id}-{number}" for number in range(3)]
    for name in names:
        await asyncio.to_thread(client.submit, recipe_document("/model"), name, project=run_id)
        await RunRecords(redis).transition(name, RunState.FAILED, "test")
    one = await asyncio.to_thread(penstock, "archive", names[0], "--api", client.url)
    assert one == (0, f"{names[0]}: archiving\n")
    status, output = await asyncio.to_thread(penstock, "archive", names[0], "--json", "--api", client.url)
    assert (status, [run["id"] for run in json.loads(output)["runs"]]) == (0, [names[0]])
    many = ["archive", "--older-than", "0s", "--project", run_id, "--api", client.url]
    status, output = await asyncio.to_thread(penstock, *many, "--dry-run")
    assert (status, [line.split()[0] for line in output.splitlines()]) == (0, ["run", *names[1:]])
    status, output = await asyncio.to_thread(penstock, *many)
    assert (status, "Archive these 2 runs? [y/N]" in output) == (1, True)
    said = "penstock: --json: it asks no question: give --yes with it\n"
    assert await asyncio.to_thread(penstock, *many, "--json") == (2, said)
    status, output = await asyncio.to_thread(penstock, *many, "--json", "--dry-run")
    assert (status, [run["id"] for run in json.loads(output)["runs"]]) == (0, names[1:])
    status, output = await asyncio.to_thread(penstock, *many, "--yes")
    assert (status, output.splitlines()[-1]) == (0, "2 runs: archiving; the controller continues")
    closed = await asyncio.to_thread(lambda: [entry.closing for entry in client.runs(name=run_id)])
    assert closed == ["archiving"] * 3
    for arguments, said in (
        ([], "RUN, --older-than: give exactly one of them"),
        (["--older-than", "soon"], "--older-than: 'soon' is not valid"),
    ):
        status, output = await asyncio.to_thread(penstock, "archive", *arguments, "--api", client.url)
        assert (status, said in output) == (2, True)


async def test_a_process_log_is_read_and_followed(redis: Any, redis_url: str, client: Client, run_id: str) -> None:
    await asyncio.to_thread(client.submit, recipe_document("/model"), run_id)
    assert await asyncio.to_thread(penstock, "logs", run_id, "--api", client.url) == (0, f"{run_id}: no logs\n")
    info = ProcessInfo(id="sampler-1", service="sampler", run=run_id, host="h", pid=1, metrics="h:9", started_at=1.0)
    async with LogShipping(redis, RunKeys(run_id), info, redis_url):
        logging.getLogger("services.sampler").warning("three groups [bold]left[/bold]")
    status, output = await asyncio.to_thread(penstock, "logs", run_id, "--api", client.url)
    assert (status, [line.split()[:4] for line in output.splitlines()][1]) == (0, ["sampler-1", "sampler", "h", "no"])
    status, output = await asyncio.to_thread(penstock, "logs", run_id, "sampler-1", "--api", client.url)
    assert (status, output.endswith("WARNING  services.sampler: three groups [bold]left[/bold]\n")) == (0, True)
    following = asyncio.create_task(asyncio.to_thread(lambda: list(client.follow_log(run_id, "sampler-1"))))
    await RunRecords(redis).transition(run_id, RunState.FAILED, "test")
    [line] = await asyncio.wait_for(following, 30)
    assert (line.level, "three groups" in line.text) == ("WARNING", True)
    with pytest.raises(ApiError, match=r"process 'a/b' of run '.*' has no log|no route"):
        await asyncio.to_thread(lambda: list(client.log(run_id, "a/b")))


def written_step(number: int, accuracy: float) -> str:
    """A step record as a learner writes it."""
    times = {"generation_started_at": 1.0, "generation_finished_at": 2.0, "learning_started_at": 2.0}
    known = {"step": number, "version": number, "optimizer_steps": 1, "groups": (), "learning_finished_at": 3.0}
    return StepRecord.model_validate({**known, **times, "metrics": {"accuracy": accuracy}}).model_dump_json()


async def test_runs_are_compared(redis: Any, client: Client, run_id: str) -> None:
    names = [f"{run_id}-a", f"{run_id}-b"]
    for name, rate in zip(names, (1e-6, 1e-7), strict=True):
        document = recipe_document("/model", learner={"learning_rate": rate})
        await asyncio.to_thread(client.submit, document, name)
        for number in (1, 2):
            await redis.xadd(RunKeys(name).steps, {"m": written_step(number, number * rate)})
    status, output = await asyncio.to_thread(penstock, "compare", *names, "--api", client.url)
    rows = [line.split() for line in output.splitlines()]
    assert (status, rows[:2]) == (0, [["setting", *names], ["learner.learning_rate", "1e-06", "1e-07"]])
    assert [row[:3] for row in rows[4:6]] == [["accuracy", names[0], "2e-06"], ["accuracy", names[1], "2e-07"]]
    assert penstock("compare", names[0], "../x", "--api", client.url)[0] == 2


async def test_checkpoints_are_listed(gateway: LateGateway, client: Client, run_id: str) -> None:
    await asyncio.to_thread(client.submit, recipe_document("/model"), run_id)
    status, output = await asyncio.to_thread(penstock, "checkpoints", run_id, "--api", client.url)
    assert (status, output) == (0, f"{run_id}: no checkpoints\n")
    folder = gateway.runs / run_id / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(3 << 20))
    (folder / "checkpoint.json").write_text(json.dumps({"step": 3, "version": 4}))
    status, output = await asyncio.to_thread(penstock, "checkpoints", run_id, "--api", client.url)
    assert [line.split() for line in output.splitlines()] == [
        ["step", "version", "files", "size", "name"],
        ["3", "4", "2", "3.0", "MiB", "step-000003"],
    ]
    assert await asyncio.to_thread(penstock, "export", run_id, "--api", client.url) == (0, f"{run_id}: no export\n")
    status, output = await asyncio.to_thread(penstock, "adopt", f"{run_id}-gone", "--api", client.url)
    assert (status, output.count("\n")) == (2, 1), output


def test_who_asks_and_its_projects_are_shown(gateway: LateGateway, client: Client) -> None:
    assert (client.whoami().name, client.whoami().roles) == ("local", {"*": "admin"})
    status, output = penstock("projects", "--api", gateway.url)
    assert (status, output.splitlines()[0].split()[:2]) == (0, ["project", "role"])
    assert penstock("whoami", "--api", gateway.url)[1].startswith("local\n")


async def test_changes_are_in_the_audit_log(gateway: LateGateway, client: Client, run_id: str) -> None:
    await asyncio.to_thread(client.submit, recipe_document("/model"), run_id)
    await asyncio.to_thread(client.cancel, run_id)
    status, output = await asyncio.to_thread(penstock, "audit", "--run", run_id, "--json", "--api", gateway.url)
    assert (status, json.loads(output)[0]["path"]) == (0, f"/v1/runs/{run_id}/cancel")
    status, output = await asyncio.to_thread(penstock, "audit", "--run", run_id, "--api", gateway.url)
    assert (status, "local" in output, gateway.token in output) == (0, True, False)


def test_a_redis_that_hangs_says_what_is_wrong(tmp_path: Path) -> None:
    with (
        embedded_server() as server,
        running_gateway(f"redis://127.0.0.1:{server.port}/0", tmp_path) as gateway,
        Client(gateway.url) as client,
    ):
        os.kill(server._process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(PlatformUnavailableError) as caught:
                client.cancel("r")
            status, output = penstock("runs", "--api", gateway.url)
        finally:
            os.kill(server._process.pid, signal.SIGCONT)
    assert (status, output.count("\n"), "Redis at redis://127.0.0.1:" in output) == (2, 1, True), output
    assert (caught.value.status, "Redis" in str(caught.value)) == (503, True)


def test_routes_without_a_method_are_reached(client: Client) -> None:
    assert client.call("GET", "/healthz") == {"status": "ok"}
    with pytest.raises(ApiError, match="has no route /v1/absent: it may be of an older release"):
        client.call("GET", "/v1/absent")
