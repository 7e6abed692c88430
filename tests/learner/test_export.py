"""A learner that was replaced before or during its export leaves the one of its successor alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from learner.coordinator import run_end
from learner.service import LearnerService
from services.process.hosting import ServiceThread
from services.storage import objects
from services.storage.folders import MANIFEST, put_folder
from services.storage.places import StoreAddress, configured_store
from services.streams.connection.client import connect
from services.streams.connection.functions import FencedError
from services.streams.keys import RunKeys
from services.streams.state.ownership import become_owner
from services.streams.state.runs import RunRecords
from tests.harness.servers.s3_server import S3Server
from tests.learner.running import put_batch, put_evaluation, submit

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
SUCCESSORS = "exported by the successor"


async def run_until_replaced(
    redis: Any, redis_url: str, run: str, model: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> BaseException | None:
    """Train a step and end with an error: another learner becomes the owner `before` that function of the export."""
    keys = RunKeys(run)
    await submit(redis, run, model, limits={"rollout_steps": 1})
    await put_batch(redis, keys, 0)
    await put_evaluation(redis, keys)
    real = getattr(run_end, before)

    def replaced(*given: Any) -> Any:
        asyncio.run(replace_owner(redis_url, keys))
        return real(*given)

    monkeypatch.setattr(run_end, before, replaced)
    thread = ServiceThread(LearnerService(), run, redis_url)
    await asyncio.to_thread(thread._thread.join, 240)
    assert (await RunRecords(redis).get(run)).export_path is None
    return thread.error


async def replace_owner(redis_url: str, keys: RunKeys) -> None:
    redis = await connect(redis_url)
    await become_owner(redis, keys, "learner")
    await redis.aclose()


async def test_a_replaced_learner_leaves_the_export_folder_alone(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runs_folder / run_id / "export"
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text(SUCCESSORS)
    error = await run_until_replaced(redis, redis_url, run_id, tiny_model, monkeypatch, "export")
    assert isinstance(error, FencedError)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"evaluation.json": SUCCESSORS}
    assert list(folder.parent.glob(".*")) == [], "its own part is deleted"


async def test_a_replaced_learner_leaves_the_stored_export_alone(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, store: S3Server, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "node"))
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "evaluation.json").write_text(SUCCESSORS)
    at = stored_export(run_id)
    put_folder(at, tmp_path / "made")
    before = objects.listed(at)
    error = await run_until_replaced(redis, redis_url, run_id, tiny_model, monkeypatch, "stored")
    assert isinstance(error, FencedError)
    assert objects.listed(at) == before


def stored_export(run: str) -> StoreAddress:
    at = configured_store()
    assert at is not None
    return at / run / "export"


def test_an_upload_stops_before_the_next_file(store: S3Server, tiny_model: Path) -> None:
    calls: list[None] = []

    def check() -> None:
        calls.append(None)
        if len(calls) == 4:
            raise FencedError("a newer owner")

    at = stored_export("run")
    with pytest.raises(FencedError):
        put_folder(at, tiny_model, check)
    assert len(objects.listed(at)) == 3, f"{MANIFEST}, which says that it is not whole, and two files"
