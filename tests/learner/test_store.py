"""A run whose files are in a store: another node resumes it with the same bits, and damaged files are skipped."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner import storage_retry
from learner.archive import ArchiveError, RunArchive, RunFacts
from learner.archive.names import facts_name
from learner.checkpoint import reports
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import CheckpointError
from learner.recovery.replay import ReplayError, open_run, plan_replay, replay
from learner.recovery.start import archived_payloads, find_start_point
from learner.service import LearnerService
from learner.storage_retry import retry_storage
from services.contracts import Fence
from services.process.hosting import ServiceThread
from services.settings import parse_recipe
from services.storage.errors import StoreOutageError
from services.storage.folders import local_copy
from services.storage.mirror import run_mirror
from services.storage.removal import delete_run_files
from services.streams.keys import RunKeys
from services.streams.state.events import EventLog
from services.streams.state.runs import RunRecords
from services.waits import Waits
from tests.harness.servers.s3_server import S3Server
from tests.harness.small_run import recipe_document
from tests.learner.checkpointing import NEVER, bits, block_of, header, records_of, save
from tests.learner.committed import WRITER
from tests.learner.running import (
    drain_ranks,
    draw_batch,
    end_ranks,
    put_batch,
    put_evaluation,
    start_ranks,
    stop,
    submit,
    train_run,
    until_event,
    until_step,
)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|deepspeed)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|deepspeed)"),
]
STEPS = 4
LEARNER = {"warmup_rollout_steps": 8, "checkpoint_every": 2, "checkpoints_kept": 2}


def node(folder: Path, run: str = "run") -> tuple[RunArchive, Checkpoints]:
    """A run's files as rank 0 of a new learner finds them on a node with this scratch folder."""
    archive = RunArchive(folder / run, run_mirror(run))
    archive.clear_scratch()
    archive.sync_with_store()
    checkpoints = Checkpoints(archive)
    checkpoints.stored.fetch_manifests()
    archive.prepare()
    return archive, checkpoints


def fill(archive: RunArchive, steps: int) -> None:
    for version in range(steps):
        batch, payloads = draw_batch(RunKeys("run"), version)
        archive.write_share(batch, 0, payloads, WRITER)
        archive.write_batch(batch, WRITER)
    archive.mirror.put_bytes("run.json", b"{}")


def test_a_node_finds_the_files_of_another_node(store: S3Server, tmp_path: Path) -> None:
    archive, checkpoints = node(tmp_path / "a")
    fill(archive, STEPS)
    first = save(checkpoints, header(2), block_of(100), block_of(5 << 20, 1), sampler="{}")
    last = save(checkpoints, header(3), block_of(100, 2))
    shutil.rmtree(tmp_path / "a")
    archive, checkpoints = node(tmp_path / "b")
    assert list(archive.trained()) == [1, 2, 3, 4]
    assert checkpoints.complete() == [first, last]
    assert list(archive.checkpoints.glob("*/*.safetensors")) == [], "files must be fetched only when they are needed"
    point = find_start_point(archive, checkpoints, STEPS, records_of(STEPS))
    assert (point.checkpoint, point.steps) == (last, (4,))
    assert find_start_point(archive, checkpoints, 2, records_of(2)).checkpoint == first
    assert checkpoints.sampler(first) == "{}"
    assert (
        archived_payloads(archive, archive.batch(4, WRITER), WRITER).keys() == draw_batch(RunKeys("run"), 3)[1].keys()
    )
    # A node finds no files that another node deleted or did not finish.
    archive.delete_after(3, WRITER, {})
    checkpoints.partial.start(4, WRITER)
    checkpoints.partial.write(checkpoints.partial.start(4, WRITER), 0, block_of(10), NEVER)
    archive, checkpoints = node(tmp_path / "c")
    assert list(archive.trained()) == [1, 2, 3]
    assert len(checkpoints.clear_interrupted(WRITER)) == 1
    assert len({name.split("/")[1] for name in run_mirror("run").listed("checkpoints")}) == 2
    checkpoints.prune(1, STEPS, WRITER)
    archive, checkpoints = node(tmp_path / "d")
    assert (list(archive.trained()), checkpoints.complete()) == ([], [last])
    assert checkpoints.delete_after(0, WRITER) == [last.name]
    assert run_mirror("run").listed("checkpoints") == {}


def test_damage_in_the_store_is_skipped_on_a_node_refetched(store: S3Server, tmp_path: Path) -> None:
    archive, checkpoints = node(tmp_path / "a")
    fill(archive, STEPS)
    first, second, third = (save(checkpoints, header(step), block_of(100, step), sampler="{}") for step in (1, 2, 3))
    file = checkpoints.path(third) / "rank-0000.safetensors"
    whole = file.read_bytes()
    file.write_bytes(bytes(len(whole)))
    assert checkpoints.newest_intact(STEPS) == (third, {})
    assert file.read_bytes() == whole
    under = os.environ["PENSTOCK_STORE"].partition("penstock-test/")[2] + "/run/checkpoints"
    store.damaged(f"{under}/{third.name}/rank-0000.safetensors", bytes(len(whole)))
    store.damaged(f"{under}/{second.name}/rank-0000.safetensors", whole[:-1])
    archive, checkpoints = node(tmp_path / "b")
    point = find_start_point(archive, checkpoints, STEPS, records_of(STEPS))
    assert (point.checkpoint, point.steps) == (first, (2, 3, 4))
    assert "does not match" in point.skipped[third.name]
    assert "damaged (it has" in point.skipped[second.name]
    checkpoints.set_aside(point.skipped, WRITER)
    left = [path for path in (tmp_path / "b").rglob("*.safetensors*") if path.parent.name != first.name]
    assert left == [], "scratch space must hold one checkpoint only"
    _, again = node(tmp_path / "c")
    assert again.complete() == [first]
    assert again.clear_interrupted(WRITER) == [], "damaged checkpoints must be kept for inspection"
    kept = archive.mirror.listed("checkpoints")
    again.prune(1, STEPS, WRITER)
    assert archive.mirror.listed("checkpoints") == kept, "damaged checkpoints must be kept as long as earlier ones"
    store.damaged(f"{under}/{first.name}/rank-0000.safetensors", None)
    start, skipped = node(tmp_path / "d")[1].newest_intact(STEPS)
    assert start is None
    assert skipped[first.name].endswith("rank-0000.safetensors: missing")
    # Another node than the one that set them aside deletes them.
    archive, checkpoints = node(tmp_path / "e")
    last = save(checkpoints, header(4), block_of(100))
    checkpoints.prune(1, STEPS, WRITER)
    assert {name.split("/")[1] for name in archive.mirror.listed("checkpoints")} == {last.name}


def test_a_brief_outage_of_the_store_fails_no_checkpoint(
    store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "RETRY_EVERY_S", 0.05)
    archive, checkpoints = node(tmp_path / "a")
    fill(archive, 1)
    name = checkpoints.partial.start(1, WRITER)
    checkpoints.partial.write(name, 0, block_of(10), NEVER)
    done, tried = (archive.mirror.put, archive.mirror.delete), list[Any]()

    def failing_once(do: Any) -> Any:
        def request(*given: Any) -> None:
            tried.append(given[0])
            if tried.count(given[0]) == 1:
                raise StoreOutageError("the store does not answer")
            do(*given)

        return request

    for name_of_call, do in zip(("put", "delete"), done, strict=True):
        monkeypatch.setattr(archive.mirror, name_of_call, failing_once(do))
    found = checkpoints.commit(name, header(1), NEVER, sampler="{}")
    assert len(tried) == 6, "the ranks' reports, sampler.json and the manifest"
    assert node(tmp_path / "b")[1].newest_intact(1) == (found, {})


def test_ranks_of_several_nodes_write_one_checkpoint(store: S3Server, tmp_path: Path) -> None:
    archive, checkpoints = node(tmp_path / "a")
    fill(archive, 1)
    _, other = node(tmp_path / "b")
    before = save(checkpoints, header(1), block_of(10))
    other.stored.fetch(before.name)
    name = checkpoints.partial.start(1, WRITER)
    assert (checkpoints.partial.started_on_other_node(name), other.partial.started_on_other_node(name)) == (False, True)
    checkpoints.partial.write(name, 0, block_of(10, 1), NEVER)
    writing = threading.Timer(0.5, lambda: other.partial.write(name, 1, block_of(10, 2), NEVER, on_other_node=True))
    writing.start()
    found = checkpoints.commit(name, header(1, ranks=2), NEVER, deadline_s=20)
    writing.join()
    assert sorted(found.files) == ["rank-0000.safetensors", "rank-0001.safetensors"]
    left = [path for path in (tmp_path / "b").rglob("*") if path.is_file() and "checkpoints" in path.parts]
    assert left == [], "rank 1 must clean its own node"
    other.stored.fetch(found.name)
    other.check(found)
    # A rank that fails is reported long before the deadline; a silent rank, at the deadline.
    name = checkpoints.partial.start(1, WRITER)
    checkpoints.partial.write(name, 0, block_of(10), NEVER)
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(CheckpointError):
        other.partial.write(name, 1, block_of(10), stopped, on_other_node=True)
    with pytest.raises(CheckpointError, match="the learner is stopping"):
        checkpoints.commit(name, header(1, ranks=2), NEVER, deadline_s=60)
    name = checkpoints.partial.start(1, WRITER)
    checkpoints.partial.write(name, 0, block_of(10), NEVER)
    with pytest.raises(CheckpointError, match=r"ranks \[1\] did not write their files within 0\.1 s"):
        checkpoints.commit(name, header(1, ranks=2), NEVER, deadline_s=0.1)
    assert {name.split("/")[1] for name in run_mirror("run").listed("checkpoints")} == {before.name, found.name}


def test_a_run_that_started_without_a_store_is_uploaded(store: S3Server, tmp_path: Path) -> None:
    local = RunArchive(tmp_path / "run")
    local.prepare()
    fill_local = Checkpoints(local)
    batch, payloads = draw_batch(RunKeys("run"), 0)
    local.write_share(batch, 0, payloads, WRITER)
    local.write_batch(batch, WRITER)
    kept = save(fill_local, header(1), block_of(10))
    (tmp_path / "run/run.json").write_text("{}")
    node(tmp_path)
    archive, checkpoints = node(tmp_path / "other")
    assert (list(archive.trained()), checkpoints.newest_intact(1)) == ([1], (kept, {}))


async def test_an_unreachable_store_is_a_named_wait(
    own_store: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_retry, "RETRY_S", 0.2)
    archive, waits = RunArchive(tmp_path / "run", run_mirror("run")), Waits()
    archive.prepare()
    own_store.kill()
    batch, payloads = draw_batch(RunKeys("run"), 0)
    task = asyncio.create_task(
        retry_storage(lambda: archive.write_share(batch, 0, payloads, WRITER), "the batch", waits, 60.0)
    )
    ends = time.monotonic() + 120  # the store's own retries come first
    while not (waiting := waits.current(time.time() + 60)):
        assert time.monotonic() < ends
        await asyncio.sleep(0.05)
    [wait] = waiting
    assert (wait.name, wait.waits_for[:24]) == ("store", "the store for the batch:")
    own_store.start()
    await asyncio.wait_for(task, 120.0)
    assert list(run_mirror("run").listed()) == ["batches/step-000001.e0002-learner-1a2b3c4d.rank-0.parquet"]
    own_store.kill()
    with pytest.raises(StoreOutageError):
        await retry_storage(lambda: archive.write_batch(batch, WRITER), "the batch", waits, 0.5)
    # Rank 0 detects its own failed write immediately and retries later, as with a full disk.
    checkpoints = Checkpoints(archive)
    name = checkpoints.partial.start(1, WRITER)
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoints.partial.write(name, 0, block_of(10), NEVER)
    checkpoints.partial.abandon(name)
    assert list(archive.checkpoints.iterdir()) == []


async def steps_of(redis: Any, keys: RunKeys) -> list[Any]:
    return [step for _, step in await EventLog(redis, keys, "test").steps()]


@pytest.mark.parametrize(("earlier", "uploaded"), [(5.0, False), (6.0, True), (None, True)])
def test_a_deleted_run_is_not_uploaded_for_the_next(
    store: S3Server, tmp_path: Path, run_id: str, earlier: float | None, uploaded: bool
) -> None:
    """Its files stay on the nodes of learners. A run.json of an earlier release does not say of which run it is."""
    recipe = parse_recipe(recipe_document("/model"))
    facts = RunFacts(run=run_id, recipe=recipe, model_path="m", ranks=1, device="cpu", versions={}, created_at=earlier)
    archive = RunArchive(tmp_path / run_id, run_mirror(run_id))
    archive.start(facts, WRITER)
    delete_run_files(tmp_path / "head", run_id)
    archive.clear_scratch()
    if uploaded:
        archive.sync_with_store(6.0)
    else:
        with pytest.raises(ArchiveError, match=f"{run_id}: holds files of an earlier run with this id"):
            archive.sync_with_store(6.0)
    assert sorted(run_mirror(run_id).listed()) == (["run.e0002-learner-1a2b3c4d.json", "run.json"] if uploaded else [])


def test_facts_reach_the_store_after_an_outage(
    store: S3Server, tmp_path: Path, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = RunFacts(
        run=run_id, recipe=parse_recipe(recipe_document("/model")), model_path="m", ranks=1, device="cpu", versions={}
    )
    archive = RunArchive(tmp_path / run_id, run_mirror(run_id))

    def refuse(*_: object) -> None:
        raise StoreOutageError("away")

    for resumed in (False, True):
        fence = Fence(1 + resumed, "learner-1a2b3c4d")
        with monkeypatch.context() as away:
            away.setattr(archive.mirror, "put", refuse)
            with pytest.raises(StoreOutageError):
                archive.start(facts, fence, resumed=resumed)
        archive.start(facts, fence, resumed=resumed)
        assert {"run.json", facts_name(fence)} <= set(run_mirror(run_id).listed())


@pytest.mark.slow
async def test_a_run_resumed_on_another_node_ends_with_the_same_bits(
    redis: Any,
    redis_url: str,
    run_id: str,
    tiny_model: Path,
    store: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undisturbed, killed = RunKeys(f"{run_id}-a"), RunKeys(f"{run_id}-b")
    for keys in (undisturbed, killed):
        await submit(redis, keys.run, tiny_model, limits={"rollout_steps": STEPS}, learner=LEARNER)
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "node-a"))
    await train_run(redis, redis_url, undisturbed.run, STEPS)
    # After the checkpoint of step 2, with step 3 only in the archive, the process and its disk are lost.
    first = start_ranks(killed.run, redis_url, 1)
    try:
        for version in range(3):
            await put_batch(redis, killed, version)
        await until_step(redis, killed, 3)
        await until_event(redis, killed, "checkpoint")
        first[0].send_signal(signal.SIGKILL)
    finally:
        end_ranks(first)
    shutil.rmtree(tmp_path / "node-a")
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "node-b"))
    await put_batch(redis, killed, 3)
    await put_evaluation(redis, killed)
    thread = ServiceThread(LearnerService(), killed.run, redis_url)
    try:
        await until_event(redis, killed, "exported")
    finally:
        await stop(thread)
    events = [event.text for _, event in await EventLog(redis, killed, "test").events() if event.phase == "ready"]
    assert "at step 3, from the checkpoint of step 2 and 1 archived batches" in events[-1]
    assert "(bit-identical to the committed one)" in events[-1]
    assert [record.weights for record in await steps_of(redis, killed)] == [
        record.weights for record in await steps_of(redis, undisturbed)
    ]
    exports = []
    for keys in (undisturbed, killed):
        path = str((await RunRecords(redis).get(keys.run)).export_path)
        assert path == f"{os.environ['PENSTOCK_STORE']}/{keys.run}/export"
        exports.append(AutoModelForCausalLM.from_pretrained(local_copy(path, "MODEL", tmp_path / "eval")).state_dict())
    assert all(torch.equal(bits(tensor), bits(exports[1][name])) for name, tensor in exports[0].items())
    monkeypatch.setenv("PENSTOCK_RUNS", str(tmp_path / "node-c"))
    folder, mirror = open_run(tmp_path / "node-c", killed.run)
    rows = await asyncio.to_thread(lambda: replay(folder, plan_replay(folder, 4, mirror), 300.0, lambda _: None))
    assert rows
    assert all(row.equal for row in rows)
    with pytest.raises(ReplayError, match=r"RUN: 'none' is not valid: expected a run with an archive in s3://"):
        open_run(tmp_path / "node-c", "none")


@pytest.mark.slow
async def test_two_ranks_on_two_nodes_and_the_model_in_the_store(
    redis: Any, redis_url: str, run_id: str, tiny_model: Path, store: S3Server, tmp_path: Path
) -> None:
    from learner.model.source import record_name
    from services.settings import ModelSettings
    from services.storage.folders import put_folder
    from services.storage.places import parse_address

    url = f"{os.environ['PENSTOCK_STORE']}/models/tiny"
    put_folder(parse_address(url, "x"), tiny_model)
    name = await asyncio.to_thread(record_name, ModelSettings(path=url), tmp_path / "controller")
    keys = RunKeys(run_id)
    await submit(redis, run_id, tiny_model, limits={"rollout_steps": 3}, learner=LEARNER | {"ranks": 2})
    await RunRecords(redis).set_paths(run_id, model_path=name)
    for version in range(3):
        await put_batch(redis, keys, version)
    lives = [("a", "b"), ("c", "d")]
    for number, nodes in enumerate(lives):
        ranks = start_ranks(run_id, redis_url, 2, [tmp_path / node for node in nodes])
        try:
            if number == 0:
                await until_step(redis, keys, 3)
                await until_event(redis, keys, "checkpoint")
                for rank in ranks:
                    rank.kill()
                assert list((tmp_path / f"b/{run_id}/batches").iterdir()) == [], (
                    "only this node must clean its scratch space"
                )
            else:
                await put_evaluation(redis, keys)
                await until_event(redis, keys, "exported")
                await drain_ranks(ranks)
        finally:
            end_ranks(ranks)
    ready = [event.text for _, event in await EventLog(redis, keys, "test").events() if event.phase == "ready"]
    assert "at step 3, from the checkpoint of step 2 and 1 archived batches" in ready[-1]
    assert "(bit-identical to the committed one)" in ready[-1]
    assert len(list((tmp_path / f"d/{run_id}/batches").glob("step-000003.*.rank-0.parquet"))) == 1, (
        "the share of the other node must be fetched"
    )
    for node in "abcd":
        assert len(list((tmp_path / node / "models").glob("s3-*/tiny/config.json"))) == 1
    with pytest.raises(ArchiveError):
        RunArchive(tmp_path / "d" / run_id).facts()


def test_a_stored_model_is_checked_before_it_is_fetched(store: S3Server, tmp_path: Path) -> None:
    from learner.model.source import ModelSourceError, record_name
    from services.settings import ModelSettings
    from services.storage.objects import put_bytes
    from services.storage.places import parse_address

    url = f"{os.environ['PENSTOCK_STORE']}/models/half"
    with pytest.raises(ModelSourceError, match=r"^model\.path: 's3://.*/half' is not valid: expected .*, found none"):
        record_name(ModelSettings(path=url), tmp_path)
    put_bytes(parse_address(f"{url}/config.json", "x"), b"{}")
    with pytest.raises(
        ModelSourceError, match=r"^model\.path: 's3://.*/half' is not valid: expected .*; it has no weights"
    ):
        record_name(ModelSettings(path=url), tmp_path)
