"""The named waits of a replica's start, and its behaviour when a sandbox fails or it is cancelled."""

import asyncio
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from services.contracts import Lane
from services.streams.delivery.consumer import Consumer
from services.streams.keys import RunKeys
from services.waits import cancel_and_wait
from tests.harness.small_run import recipe_document, service_context
from tests.harness.stubs.verifier import StubSandbox
from tests.services.driven import DrivenRun
from verifier import service
from verifier.judging import RewardJudges
from verifier.sandbox.pool import Sandbox
from verifier.service import VerifierService


async def test_the_start_of_the_judging_process_is_a_wait(redis, run_id, monkeypatch):
    document = recipe_document("/nowhere", limits={"startup_timeout_s": 77.0})
    seen = []

    async with service_context(redis, run_id, document, "verifier") as context:

        async def start(*_):
            seen.extend((wait.name, wait.deadline_s) for wait in context.waits.current(time.time() + 5))
            raise TimeoutError("far enough")

        monkeypatch.setattr(Sandbox, "start", start)
        with pytest.raises(TimeoutError, match="far enough"):
            await VerifierService().run(context)
        assert context.waits.current(time.time() + 5) == ()
    assert seen == [("sandbox", 77.0)]


@pytest.mark.parametrize("gaps", [("this platform has no seccomp",), ()])
async def test_gaps_of_the_confinement_are_events(redis, run_id, monkeypatch, gaps):
    closed = []
    async with service_context(redis, run_id, recipe_document("/nowhere"), "verifier") as context:

        async def start(*_):
            context.stopping.set()
            return gaps

        monkeypatch.setattr(Sandbox, "start", start)
        monkeypatch.setattr(service, "deny_inspection", lambda: closed.append(True))
        await VerifierService().run(context)
        events = [(event.phase, event.text) for _, event in await context.event_log.events()]
    assert [text for phase, text in events if phase == "unconfined"] == list(gaps)
    assert len(closed) == len(gaps), "a text that can read /proc must not read the verifier's memory"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has prctl")
def test_a_process_that_denies_inspection_is_not_dumpable():
    code = (
        "import ctypes\nfrom verifier.processes.prctl import deny_inspection\nask = ctypes.CDLL(None).prctl\n"
        "before = ask(3, 0, 0, 0, 0)\ndeny_inspection()\nprint(before, ask(3, 0, 0, 0, 0))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "1 0\n"


async def test_a_judgement_whose_lease_was_lost_has_no_effect(redis, run_id, monkeypatch):
    run = await DrivenRun.open(redis, RunKeys(run_id))
    held = await run.published("g0", 2)
    taken = held[1].lease

    @contextmanager
    def watching(*_):
        yield {taken}

    monkeypatch.setattr(Consumer, "watching", watching)
    async with service_context(redis, run_id, recipe_document("/nowhere"), "verifier") as context:
        judge = service._LaneJudge(context, Lane.TRAIN, RewardJudges(StubSandbox(), {}))
        await judge._judge(held)
    assert [delivery.message.index for delivery in await run.judge().read(2, 0.1)] == [held[0].message.index]
    pending = await redis.xpending_range(run.streams.samples, "verifier", "-", "+", 9)
    assert [entry["message_id"].decode() for entry in pending] == [taken.entry]


async def test_a_lane_whose_cancellation_is_lost_still_ends(redis, run_id, monkeypatch):
    """Up to Python 3.11 `asyncio.wait_for` loses a cancellation that arrives when the wait has finished."""
    reading, lost = asyncio.Semaphore(0), []

    async def start(_):
        return ()

    async def read(*_):
        reading.release()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            if len(lost) == len(Lane):
                raise
            lost.append(True)
        return []

    monkeypatch.setattr(Sandbox, "start", start)
    monkeypatch.setattr(Consumer, "read", read)
    async with service_context(redis, run_id, recipe_document("/nowhere"), "verifier") as context:
        serving = asyncio.create_task(VerifierService().run(context))
        for _ in Lane:
            await reading.acquire()
        serving.cancel()
        _, left = await asyncio.wait([serving], timeout=60)
        await cancel_and_wait(*left)
    assert len(lost) == len(Lane)
    assert not left
    assert serving.cancelled()
