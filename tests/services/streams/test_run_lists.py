"""Lists of runs: filtered, in pages, by indices that every change keeps in line."""

import itertools

import pytest

from services.contracts import Closing, RunState
from services.settings import parse_recipe
from services.streams.keys import ENDED_RUNS, RUNS, UNCLOSED_RUNS, RunKeys, run_list
from services.streams.runs import lists
from services.streams.runs.lists import Cursor, CursorError, RunFilter, RunLists
from services.streams.state.ended.cleanup import erase
from services.streams.state.ended.closing import close_run, delete_record
from services.streams.state.runs import RunRecords
from tests.harness.small_run import recipe_document

RECIPE = parse_recipe(recipe_document("/model"))


@pytest.fixture
async def redis(own_server):
    return own_server[1]


async def created(redis, run, *states, project="default"):
    records = RunRecords(redis)
    await records.create(run, RECIPE, project=project)
    for state in states:
        await records.transition(run, state, "test")


async def listed(redis, limit=100, **wanted):
    """The ids of all pages, which must be of the stated length."""
    found, after = [], None
    while True:
        page = await RunLists(redis).page(RunFilter(**wanted), limit, after)
        found += [record.id for record in page.records]
        if page.next is None:
            return found
        assert len(page.records) == limit
        after = Cursor.parse(str(page.next))


async def test_each_filter_finds_its_runs_newest_first(redis):
    for number, (project, state) in enumerate(
        itertools.product(("a", "b"), (None, RunState.RUNNING, RunState.FAILED, RunState.SUCCEEDED))
    ):
        await created(redis, f"run-{number}", *([state] if state else []), project=project)
    await close_run(redis, "run-6", Closing.EXPIRING)
    for limit in (1, 2, 3, 100):
        assert await listed(redis, limit) == [f"run-{number}" for number in range(7, -1, -1)]
        assert await listed(redis, limit, projects=frozenset("a")) == ["run-3", "run-2", "run-1", "run-0"]
        assert await listed(redis, limit, states=frozenset({RunState.FAILED})) == ["run-6", "run-2"]
        assert await listed(redis, limit, projects=frozenset("b"), states=frozenset({RunState.FAILED})) == ["run-6"]
        assert await listed(redis, limit, archived=True) == ["run-6"]
        assert await listed(redis, limit, states=frozenset({RunState.FAILED}), archived=False) == ["run-2"]
        assert await listed(redis, limit, projects=frozenset(), states=frozenset()) == []
        assert await listed(redis, limit, name="n-5") == ["run-5"]
        both = frozenset({RunState.RUNNING, RunState.QUEUED})
        assert await listed(redis, limit, states=both) == ["run-5", "run-4", "run-1", "run-0"]
    counts = await RunLists(redis).states()
    assert counts.unlisted == 0
    assert {state.value: number for state, number in counts.states.items() if number} == {
        "queued": 2,
        "running": 2,
        "failed": 2,
        "succeeded": 2,
    }


async def test_runs_of_one_time_are_all_listed_once(redis, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.25)
    for number in range(9):
        await created(redis, f"run-{number}")
    for limit in (1, 2, 4):
        assert await listed(redis, limit) == [f"run-{number}" for number in range(8, -1, -1)]
        assert len(await listed(redis, limit, states=frozenset({RunState.QUEUED}))) == 9


async def test_a_deleted_run_is_in_no_index(redis):
    await created(redis, "kept", RunState.FAILED)
    await created(redis, "gone", RunState.FAILED)
    await close_run(redis, "gone", Closing.DELETING)
    page = await RunLists(redis).page(RunFilter(), 1)
    assert [record.id for record in page.records] == ["gone"]
    assert await erase(redis, RunKeys("gone"), Closing.DELETING)
    assert await delete_record(redis, "gone", files=False)
    for key in (RUNS, ENDED_RUNS, UNCLOSED_RUNS, run_list("default"), run_list(word="failed.closed")):
        assert b"gone" not in await redis.zrange(key, 0, -1)
    assert await listed(redis) == ["kept"]
    rest = await RunLists(redis).page(RunFilter(), 1, page.next)
    assert [record.id for record in rest.records] == ["kept"], "a cursor outlives its run"


async def test_lists_that_are_out_of_line_are_repaired(redis):
    """An earlier release changes the record alone."""
    await created(redis, "a", RunState.RUNNING)
    await created(redis, "lost")
    await redis.hset(RunKeys("a").record, "state", "failed")
    await redis.unlink(RunKeys("lost").record)
    for _ in range(2):
        assert await listed(redis, states=frozenset({RunState.RUNNING, RunState.QUEUED})) == []
    assert await listed(redis, states=frozenset({RunState.FAILED})) == ["a"]
    assert await redis.zrange(run_list(word="queued"), 0, -1) == []


async def test_records_of_an_earlier_release_are_listed_after_a_repair(redis):
    for number in range(3):
        await created(redis, f"old-{number}", RunState.FAILED)
        await redis.hdel(RunKeys(f"old-{number}").record, "listed", "revision")
    for key in await redis.keys("penstock:*"):
        if b"{" not in key and key.decode() != RUNS:
            await redis.unlink(key)
    assert (await RunLists(redis).states()).unlisted == 3
    assert len(await listed(redis)) == 3
    await RunLists(redis).repair()
    assert (await RunLists(redis).states()).unlisted == 0
    assert len(await listed(redis, states=frozenset({RunState.FAILED}))) == 3


async def test_a_rare_name_is_looked_for_page_by_page(redis, monkeypatch):
    monkeypatch.setattr(lists, "SCANNED_AT_MOST", 4)
    monkeypatch.setattr(lists, "NAMED_AT_ONCE", 2)
    for number in range(12):
        await created(redis, "rare" if number == 1 else f"run-{number}")
    pages, after, found = 0, None, []
    while pages == 0 or after:
        page = await RunLists(redis).page(RunFilter(name="rare"), 1, after)
        pages, after, found = pages + 1, page.next, found + [record.id for record in page.records]
    assert found == ["rare"]
    assert 2 <= pages <= 5


@pytest.mark.parametrize(
    "text", ["", "1", "1:", ":a", "x:a", "1.5:A", "1e999e:a", "\uff11:a", "1:a\n", "9" * 40 + ":a"]
)
def test_a_text_that_is_no_cursor_is_refused(text):
    with pytest.raises(CursorError, match=r"^after: .* is not valid: expected the `next` of a page$"):
        Cursor.parse(text)


@pytest.mark.parametrize("past", [10, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_a_page_reads_as_much_beside_any_past(redis, past):
    for start in range(0, past, 500):
        async with redis.pipeline(transaction=False) as pipe:
            for number in range(start, min(past, start + 500)):
                pipe.zadd(RUNS, {f"ended-{number}": 1.0 + number})
                pipe.zadd(run_list(word="failed"), {f"ended-{number}": 1.0 + number})
            await pipe.execute()
    await created(redis, "a")
    await created(redis, "b")
    await redis.config_resetstat()
    page = await RunLists(redis).page(RunFilter(), 1)
    assert [record.id for record in page.records] == ["b"]
    stats = await redis.info("stats")
    assert stats["total_net_output_bytes"] < 30_000
