"""A tracker copies the whole log once, whatever the sink, the run or its own process does."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from services.contracts import Event, RunState
from services.process.hosting import host_service
from services.streams.connection.functions import FencedError
from services.streams.state.runs import RunRecords
from services.tracking.rows import RowKind
from services.tracking.service import DRAIN_S, TrackerService
from tests.services.tracking.following import evaluation_of, step_of


class Notebook:
    """A sink that keeps rows in a list, which outlives it, as a tracker's server does."""

    def __init__(self, rows=None, faults=()):
        self.rows = [] if rows is None else rows
        self.faults = list(faults)
        self.endings = []

    def open(self, facts):
        self.facts = facts
        return self.rows[-1].cursor if self.rows else None

    def log(self, rows):
        for row in rows:
            if self.faults and row.kind is RowKind.STEP and row.step == self.faults[0]:
                self.faults.pop(0)
                raise ConnectionError("the server went away\nwith a second line")
            self.rows.append(row)

    def close(self, ending):
        self.endings.append(ending)

    def steps(self):
        return [row.step for row in self.rows if row.kind is RowKind.STEP]


def tracker(sink):
    return TrackerService({"tensorboard": lambda settings: sink})


async def test_the_whole_log_is_copied_in_order(submit):
    run, book = await submit(["tensorboard"]), Notebook()
    await run.append(evaluation_of("before", 0, 0.2), step_of(1), step_of(2))
    async with run.tracked(tracker(book)):
        await run.until(lambda: asyncio.to_thread(lambda: book.steps() == [1, 2]), "two steps")
        await run.append(evaluation_of("step-2", 2, 0.3), step_of(3), evaluation_of("after", 3, 0.4))
        await run.end()
    evaluations = [row for row in book.rows if row.kind is RowKind.EVALUATION]
    assert [(row.step, row.values["evaluation/held-out/accuracy"]) for row in evaluations] == [
        (0, 0.2),
        (2, 0.3),
        (3, 0.4),
    ]
    assert book.steps() == [1, 2, 3]
    third = next(row for row in book.rows if row.kind is RowKind.STEP and row.step == 3)
    assert (third.values["loss"], third.values["policy_version"]) == (0.3, 3)
    assert [row.text for row in book.rows if row.kind is RowKind.STATE] == ["queued: submitted"]
    [ending] = book.endings
    assert (ending.state, ending.reason, ending.export) == (RunState.SUCCEEDED, "done", "/exports/final")
    assert (book.facts.run, book.facts.project) == (run.id, "default")


async def test_many_entries_are_read_in_order_of_time(submit):
    run, book = await submit(["tensorboard"]), Notebook()
    first_ms = int(time.time() * 1000) - 1000  # of streams, Redis orders no two entries of one millisecond
    for step in range(1, 251):
        event = Event(service="learner", phase="checkpoint", text=f"step {step}", at=float(step))
        for place, message in enumerate((step_of(step), event, evaluation_of(f"step-{step}", step, 0.5))):
            await run.append(message, at_ms=first_ms + 3 * step + place)
    own = [Event(service="tracker", phase="tracking-failed", text=f"{count}", at=1.0) for count in range(120)]
    await run.append(*own, step_of(251))
    await run.end()
    async with run.tracked(tracker(book)):
        await run.until(lambda: asyncio.to_thread(lambda: 251 in book.steps()), "the last step")
    kinds = [row.kind.value for row in book.rows if row.kind is not RowKind.STATE]
    assert kinds == ["step", "event", "evaluation"] * 250 + ["step"]
    assert book.steps() == list(range(1, 252))
    assert not any("tracking-failed" in row.text for row in book.rows)


async def test_a_restart_continues_without_gap_or_double(submit):
    run, book = await submit(["tensorboard"]), Notebook()
    await run.append(step_of(1), step_of(2))
    async with run.tracked(tracker(book)):
        await run.until(lambda: asyncio.to_thread(lambda: len(book.steps()) == 2), "two steps")
        await run.append(step_of(3))
    await run.append(step_of(4))
    async with run.tracked(tracker(Notebook(book.rows))):
        await run.append(step_of(5))
    assert book.steps() == [1, 2, 3, 4, 5]
    assert [text.partition(": ")[2] for text in await run.events("tracking-started")] == [
        "starts",
        "continues after rollout step 3",
    ]


async def test_a_sink_that_raises_is_opened_again(submit, monkeypatch):
    monkeypatch.setattr("services.tracking.follower.PAUSE_S", (0.01, 0.02))
    run, book = await submit(["tensorboard"]), Notebook(faults=[2, 2, 4])
    await run.append(*(step_of(step) for step in range(1, 6)))
    async with run.tracked(tracker(book)):
        await run.until(lambda: asyncio.to_thread(lambda: 5 in book.steps()), "the last step")
    assert book.steps() == [1, 2, 3, 4, 5]
    [failed] = await run.events("tracking-failed")
    assert failed.startswith("tensorboard: log failed: ConnectionError: the server went away; the run continues")


async def test_a_sink_that_always_raises_is_left_alone(submit, monkeypatch):
    monkeypatch.setattr("services.tracking.follower.PAUSE_S", (0.001, 0.002))
    monkeypatch.setattr("services.tracking.follower.ATTEMPTS", 3)
    run, book = await submit(["tensorboard"]), Notebook(faults=[1] * 9)
    await run.append(step_of(1))
    async with run.tracked(tracker(book)) as hosting:
        async with asyncio.timeout(30):
            await asyncio.shield(hosting)
    assert len(book.faults) == 6
    assert [text.rpartition("; ")[2] for text in await run.events("tracking-failed")] == [
        "the run continues, and its rows are written when the sink works again",
        "not tried again until the tracker restarts",
    ]


async def test_a_sink_that_hangs_does_not_delay_the_end(submit, monkeypatch):
    released = threading.Event()

    class Hanging(Notebook):
        def log(self, rows):
            released.wait(60)

    run, book, service = await submit(["tensorboard", "wandb"]), Notebook(), None
    service = TrackerService({"tensorboard": lambda _: Hanging(), "wandb": lambda _: book})
    await run.append(step_of(1))
    async with run.tracked(service):
        await run.until(lambda: asyncio.to_thread(lambda: book.steps() == [1]), "the other sink")
        await run.append(step_of(2))
        await run.end()
        started = time.monotonic()
    assert time.monotonic() - started < DRAIN_S + 3
    assert service.hangs
    released.set()
    assert book.steps() == [1, 2]
    assert book.endings[-1].state is RunState.SUCCEEDED
    [failed] = await run.events("tracking-failed")
    assert failed.startswith("tensorboard: not closed within 5 s; its last rows may be missing")


async def test_a_call_has_a_deadline(submit, monkeypatch):
    monkeypatch.setattr("services.tracking.follower.LOG_S", 0.1)
    monkeypatch.setattr("services.tracking.follower.PAUSE_S", (0.05, 0.05))
    released = threading.Event()

    class Slow(Notebook):
        def log(self, rows):
            released.wait(60)
            super().log(rows)

    book = Slow()
    run = await submit(["tensorboard"])
    await run.append(step_of(1))
    async with run.tracked(tracker(book)):
        await run.until(lambda: run.events("tracking-failed"), "the report")
        released.set()
        await run.append(step_of(2))
        await run.until(lambda: asyncio.to_thread(lambda: 2 in book.steps()), "the second step")
    assert book.steps() == [1, 2]
    assert "log has not returned within 0.1 s" in (await run.events("tracking-failed"))[0]


async def test_a_missing_library_is_named_once(submit):
    class Missing(Notebook):
        def open(self, facts):
            raise ModuleNotFoundError("No module named 'mlflow'")

    run = await submit(["tensorboard"])
    async with run.tracked(tracker(Missing())) as hosting:
        async with asyncio.timeout(30):
            await asyncio.shield(hosting)
    [failed] = await run.events("tracking-failed")
    assert "No module named 'mlflow'; not tried again" in failed


@pytest.mark.parametrize("trained", [True, False])
async def test_steps_that_left_the_history_are_copied_again(submit, trained):
    run, book = await submit(["tensorboard"]), Notebook()
    await run.append(*(step_of(step) for step in range(1, 5)))
    async with run.tracked(tracker(book)):
        await run.until(lambda: asyncio.to_thread(lambda: 4 in book.steps()), "four steps")
        await run.rewind(2)
        if not trained:
            await run.until(lambda: asyncio.to_thread(lambda: book.rows[-1].kind is RowKind.REWIND), "the rewind")
        await run.append(step_of(3, 5), step_of(4, 6))
    assert book.steps() == [1, 2, 3, 4, 3, 4]
    [rewind] = [row for row in book.rows if row.kind is RowKind.REWIND]
    assert (rewind.step, rewind.cursor.rewinds) == (2, 1)
    again = [row.values for row in book.rows if row.kind is RowKind.STEP][4:]
    assert [(values["policy_version"], values["rewinds"]) for values in again] == [(5, 1), (6, 1)]


async def test_an_id_that_is_used_again_starts_over(submit, redis, redis_url, run_id):
    run, book = await submit(["tensorboard"]), Notebook()
    await run.append(step_of(1), step_of(2))
    async with run.tracked(tracker(book)):
        await run.until(lambda: asyncio.to_thread(lambda: 2 in book.steps()), "two steps")
    await redis.delete(*[key async for key in redis.scan_iter(match=run.keys.key("*"))])
    run = await submit(["tensorboard"])
    await run.append(step_of(1))
    async with run.tracked(tracker(Notebook(book.rows))):
        await run.until(lambda: asyncio.to_thread(lambda: len(book.steps()) == 3), "the first step again")
    assert book.steps() == [1, 2, 1]
    assert [row.step for row in book.rows if row.kind is RowKind.REWIND] == [0]


async def test_only_the_newest_tracker_of_a_run_writes(submit):
    run, first, second = await submit(["tensorboard"]), Notebook(), Notebook()
    await run.append(step_of(1))
    stopping = asyncio.Event()
    older = asyncio.create_task(host_service(tracker(first), run.id, run.url, stopping))
    await run.until(lambda: asyncio.to_thread(lambda: first.steps() == [1]), "the first step")
    async with run.tracked(tracker(second)):
        await run.until(lambda: asyncio.to_thread(lambda: second.steps() == [1]), "the newer tracker")
        await run.append(step_of(2))
        await run.until(lambda: asyncio.to_thread(lambda: second.steps() == [1, 2]), "the second step")
    with pytest.raises(FencedError, match="a newer tracker follows run"):
        await asyncio.wait_for(older, 30)
    assert first.steps() == [1]


async def test_the_log_of_an_ended_run_is_copied_and_the_tracker_ends(submit, redis):
    run, book = await submit(["tensorboard"]), Notebook()
    await run.append(step_of(1))
    await RunRecords(redis).transition(run.id, RunState.FAILED, "no progress")
    async with run.tracked(tracker(book)) as hosting, asyncio.timeout(30):
        await asyncio.shield(hosting)
    assert (book.steps(), book.endings[0].reason) == ([1], "no progress")
