"""A whole run of processes that share only Redis and an S3 store: each process has its own working folder."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from learner.model.source import record_name
from services.settings import parse_recipe
from services.storage.folders import put_folder
from services.storage.mirror import run_mirror
from services.storage.objects import put_file
from services.storage.places import parse_address
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts
from services.streams.state.runs import RunRecords
from tests.harness.process_trees import end_tree
from tests.harness.servers.s3_server import S3Server
from tests.harness.workload import recipe, write_model, write_questions
from tests.learner.running import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

RUN_DEADLINE_S = 300
STEPS = 3
SERVICES = ("services.sampler", "verifier", "rollout", "learner")


def start(service: str, run: str, redis_url: str, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PENSTOCK_HOST": "127.0.0.1",
        "PENSTOCK_RUNS": str(folder),
    }
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", service, "--run", run, "--redis", redis_url],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


async def until_steps(redis: Any, keys: RunKeys, steps: int, tmp_path: Path) -> None:
    ends = time.monotonic() + RUN_DEADLINE_S
    while len(await EventLog(redis, keys, "test").steps()) < steps:
        assert time.monotonic() < ends, logs(tmp_path)
        await asyncio.sleep(0.2)


def logs(tmp_path: Path) -> str:
    return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in tmp_path.glob("node-*/log"))


@pytest.mark.timeout(700)
async def test_a_run_needs_no_shared_folder(
    redis: Any, redis_url: str, run_id: str, store: S3Server, tmp_path: Path
) -> None:
    keys, records, top = RunKeys(run_id), RunRecords(redis), os.environ["PENSTOCK_STORE"]
    put_folder(parse_address(f"{top}/models/tiny", "x"), write_model(tmp_path / "made"))
    put_file(parse_address(f"{top}/data/questions.jsonl", "x"), write_questions(tmp_path / "questions.jsonl"))
    document = recipe(Path("x"), Path("x"), steps=STEPS, replicas=1, ranks=1, staleness=1)
    document["model"]["path"], document["data"]["path"] = f"{top}/models/tiny", f"{top}/data/questions.jsonl"
    document["learner"]["checkpoint_every"] = 1
    wanted = parse_recipe(document)
    await records.create(run_id, wanted)
    await records.set_paths(run_id, model_path=record_name(wanted.model, tmp_path / "controller"))
    with ExitStack() as ending:
        processes = {}
        for name in SERVICES:
            processes[name] = start(name, run_id, redis_url, tmp_path / f"node-{name}")
            ending.callback(end_tree, processes[name])
        await until_steps(redis, keys, 1, tmp_path)
        # The learner's node is lost and replaced.
        end_tree(processes["learner"])
        ending.callback(end_tree, start("learner", run_id, redis_url, tmp_path / "node-another"))
        ends = time.monotonic() + RUN_DEADLINE_S
        while (record := await records.get(run_id)).export_path is None:
            assert time.monotonic() < ends, logs(tmp_path)
            await asyncio.sleep(0.2)
    steps = [step for _, step in await EventLog(redis, keys, "test").steps()]
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    trained = [group for step in steps for group in step.groups]
    assert len(trained) == len(set(trained))
    counts = await group_counts(redis, keys)
    assert counts.reconciled
    assert counts.trained == len(trained)
    assert record.export_path == f"{top}/{run_id}/export"
    stored = run_mirror(run_id).listed()
    assert {"run.json", "export/model.safetensors"} <= stored.keys()
    assert len([name for name in stored if name.startswith("records/step-000003.")]) == 1
    assert not (tmp_path / "node-verifier/models").exists(), "the verifier must not fetch the model"
