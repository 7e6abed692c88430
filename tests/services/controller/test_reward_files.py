"""The controller keeps the user's files in the run's folder before a service starts."""

import json

from services.contracts import Closing, RunState
from services.storage.kept_files import read_kept_files
from services.storage.mirror import NO_MIRROR, run_mirror
from services.streams.keys import RunKeys
from services.streams.state.ended.cleanup import erase
from services.streams.state.ended.closing import close_run
from tests.services.controller.hand_cluster import HandCluster, controlled, events_of, first_event, until, until_state

FILES = {"./rewards.py": "def score(): ...", "./lib/rubric.md": "Is it right?"}


class Witness(HandCluster):
    """Notes what the folder of the run holds when its model is prepared and when its services start."""

    def __init__(self, only, folder):
        super().__init__(only)
        self.folder = folder
        self.seen = []

    async def prepare_model(self, record):
        self.seen.append(read_kept_files(self.folder, NO_MIRROR))
        return await super().prepare_model(record)

    async def start(self, record):
        self.seen.append(read_kept_files(self.folder, NO_MIRROR))
        await super().start(record)


async def test_files_are_kept_before_a_service_starts(redis, run_id, tmp_path):
    cluster = Witness(run_id, tmp_path / run_id)
    async with controlled(redis, run_id, tmp_path, cluster, files=FILES):
        await until(lambda: "start /prepared" in cluster.requests)
        assert cluster.seen == [FILES, FILES]
        [kept] = await events_of(redis, run_id, "reward-files-kept")
        assert [line.split()[0] for line in kept.split(", ")] == ["./lib/rubric.md", "./rewards.py"]
        assert await events_of(redis, run_id, "reward-file-differs") == []


async def test_a_resumed_run_gets_its_own_files_again(redis, run_id, tmp_path):
    folder = tmp_path / run_id
    cluster = Witness(run_id, folder)
    async with controlled(redis, run_id, tmp_path, cluster, files=FILES) as (records, _):
        await until(lambda: "start /prepared" in cluster.requests)
        await records.request_cancel(run_id)
        await until_state(records, run_id, RunState.CANCELLED)
        (folder / "rewards/rewards.py").write_text("def score(): return 1  # edited meanwhile")
        cluster.requests.clear()
        await records.resume(run_id)
        await until(lambda: "start /prepared" in cluster.requests)
        text = await first_event(redis, run_id, "reward-file-differs")
    assert text.startswith(f"{folder}/rewards/rewards.py: is not the file that the run was submitted with (SHA-256 ")
    assert cluster.seen[-1] == FILES
    [aside] = (folder / "differs-rewards").iterdir()
    assert "edited meanwhile" in aside.read_text()


async def test_a_run_whose_files_are_gone_fails_with_their_name(redis, run_id, tmp_path):
    cluster = HandCluster(run_id)
    cluster.short = "no room"
    async with controlled(redis, run_id, tmp_path, cluster, files=FILES) as (records, _):
        await first_event(redis, run_id, "queued")
        await redis.hdel(RunKeys(run_id).reward_files, "./rewards.py")
        cluster.short = None
        record = await until_state(records, run_id, RunState.FAILED)
    assert record.reason == (
        f"run '{run_id}': its file './rewards.py' is no longer in Redis; submit the recipe again, under another id"
    )
    assert not any(request.startswith(("prepare", "start")) for request in cluster.requests)


async def test_the_store_and_folder_outlive_redis(redis, run_id, tmp_path, store):
    cluster = HandCluster(run_id)
    async with controlled(redis, run_id, tmp_path, cluster, files=FILES) as (records, _):
        await until(lambda: "start /prepared" in cluster.requests)
        await records.request_cancel(run_id)
        await until_state(records, run_id, RunState.CANCELLED)
    await close_run(redis, run_id, Closing.EXPIRING)
    assert await erase(redis, RunKeys(run_id), Closing.EXPIRING)
    assert not await redis.exists(RunKeys(run_id).reward_files)
    assert read_kept_files(tmp_path / run_id, NO_MIRROR) == FILES
    assert read_kept_files(tmp_path / "another-node", run_mirror(run_id)) == FILES
    digests = json.loads(run_mirror(run_id).read("rewards/digests.json"))["files"]
    assert digests == dict((await records.get(run_id)).files)


async def test_a_run_without_files_has_no_folder_of_them(redis, run_id, tmp_path):
    cluster = HandCluster(run_id)
    async with controlled(redis, run_id, tmp_path, cluster):
        await until(lambda: "start /prepared" in cluster.requests)
        assert await events_of(redis, run_id, "reward-files-kept") == []
        assert not (tmp_path / run_id / "rewards").exists()
