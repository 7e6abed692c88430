"""A text that takes long delays no other, is answered once, and costs no healthy process."""

import asyncio
import multiprocessing
import threading
import time

import psutil
import pytest

from services.contracts import Lane, Outcome
from tests.harness.process_trees import alive
from tests.verifier.sandbox.judged import (
    BACKTRACKING,
    EVALUATED,
    HOSTILE,
    PATTERN,
    PROGRAM,
    SLEEPING,
    found_in,
    judging_processes,
    matching,
    pid_of,
    ran,
    until,
)
from verifier.sandbox import lane
from verifier.sandbox.background import MOST_SLOW
from verifier.sandbox.deadline import MOST_SLOW_S
from verifier.sandbox.lane import WALL_FACTOR
from verifier.sandbox.pool import Sandbox
from verifier.verifiers.base import Candidate

HANG = PATTERN, BACKTRACKING
BUSY = "import time\nends = time.process_time() + seconds\nwhile time.process_time() < ends: pass\nfound = 'done'"


async def order(sandbox, texts):
    """The places of texts in the order of their findings, and the findings by place."""
    placed = [finding async for findings in sandbox.judge_all(texts) for finding in findings]
    return [place for place, _ in placed], dict(placed)


@pytest.mark.parametrize("at", [0, 20, 63])
async def test_one_hang_among_64_texts_delays_none_of_the_others(at):
    texts = [matching("a" if n % 2 else "b") for n in range(64)]
    texts[at] = HANG
    with Sandbox(2, 2.0, [PATTERN]) as sandbox:
        await sandbox.start()
        places, found = await order(sandbox, texts)
    assert sorted(places) == list(range(64)), "each text has one finding"
    assert places[-1] == at
    assert found[at].fault == "timeout"
    for place in set(range(64)) - {at}:
        assert found[place].outcome is (Outcome.CORRECT if place % 2 else Outcome.WRONG)


@pytest.mark.parametrize("by", [HOSTILE, EVALUATED], ids=["shared", "own process"])
async def test_a_hang_costs_one_process(by):
    before = judging_processes()
    with Sandbox(1, 1.0, program=PROGRAM) as sandbox:
        other = await pid_of(sandbox, HOSTILE, Lane.EVALUATION)
        healthy = await pid_of(sandbox, HOSTILE)
        await pid_of(sandbox, by)
        spares = 3 if by is EVALUATED else 2
        await until(lambda: len(set(judging_processes()) - set(before)) >= 2 + spares, "each verifier has a spare")
        held = set(judging_processes()) - set(before)
        found = await found_in(sandbox, "while True: pass", by)
        assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "timeout")
        again = await pid_of(sandbox, HOSTILE)
        assert await pid_of(sandbox, HOSTILE, Lane.EVALUATION) == other
        assert (again == healthy) is (by is EVALUATED), "only the process of the hang itself is replaced"
        if by is HOSTILE:
            # On a busy machine the next text takes long on the clock, and its process goes with it.
            assert {healthy} <= held - set(judging_processes()) <= {healthy, again}, "no other process has ended"
        started = set(judging_processes()) - set(before) - held
        assert len(started) <= 1 + 3, "the next spare; on a busy machine one for each of the three texts, too"


@pytest.mark.parametrize("by", [HOSTILE, EVALUATED], ids=["shared", "own process"])
async def test_a_text_that_takes_long_but_ends_is_right(by):
    with Sandbox(1, 20.0, program=PROGRAM) as sandbox:
        await asyncio.gather(sandbox.judge(*matching("a")), ran(sandbox, "found = 1", by))
        texts = [(by, Candidate(BUSY, {"seconds": 8 * MOST_SLOW_S})), *(matching("a") for _ in range(20))]
        places, found = await order(sandbox, texts)
        assert places[-1] == 0
        assert (found[0].outcome, found[0].answer) == (Outcome.CORRECT, "done")
        sleeps = await ran(sandbox, "import time; time.sleep(0.5); found = 1", by)
        assert sleeps == "1"


async def test_a_text_that_takes_long_ends_before_hangs():
    hangs = [HANG] * 2
    with Sandbox(1, 1.0, program=PROGRAM) as sandbox:
        places, found = await order(sandbox, [*hangs, (HOSTILE, Candidate(BUSY, {"seconds": 0.15})), *hangs])
        assert places[0] == 2
        assert found[2].answer == "done"


async def test_a_sleeping_text_ends_at_the_bound_on_the_clock():
    with Sandbox(1, 0.05, program=PROGRAM) as sandbox:
        await ran(sandbox, "found = 1")
        started = time.monotonic()
        found = await found_in(sandbox, SLEEPING)
        assert time.monotonic() - started >= 0.05 * WALL_FACTOR
        assert found.reason == f"no judgement within {0.05 * WALL_FACTOR:g} s"


@pytest.mark.slow
async def test_more_hangs_than_may_be_beside_the_others():
    hangs = [(EVALUATED, Candidate(SLEEPING, {}))] * (MOST_SLOW + 4)
    with Sandbox(2, 0.2, program=PROGRAM) as sandbox:
        places, found = await order(sandbox, [*hangs, *(matching("a") for _ in range(20))])
        assert sorted(places) == list(range(len(hangs) + 20))
        assert {found[n].fault for n in range(len(hangs))} == {"timeout"}
        assert {found[n].outcome for n in range(len(hangs), len(hangs) + 20)} == {Outcome.CORRECT}
        assert {each.outcome for each in (await order(sandbox, [matching("b")] * 40))[1].values()} == {Outcome.WRONG}


async def test_texts_that_waited_for_room_are_judged():
    """What takes long is learned meanwhile: a text that waited for room may need none."""
    quick, longer = Candidate(BUSY, {"seconds": 0.0}), Candidate(BUSY, {"seconds": 0.015})
    with Sandbox(2, 20.0, program=PROGRAM) as sandbox:
        await order(sandbox, [(HOSTILE, quick)] * 40)
        _, found = await order(sandbox, [(HOSTILE, longer)] * (3 * MOST_SLOW))
    assert {each.answer for each in found.values()} == {"done"}


@pytest.mark.slow
async def test_being_stopped_for_others_costs_no_time(monkeypatch):
    monkeypatch.setattr(lane, "WALL_FACTOR", 4.0)
    texts = [(HOSTILE, Candidate(BUSY, {"seconds": 0.3}))] * 20
    with Sandbox(1, 1.0, program=PROGRAM) as sandbox:  # 6 s of work, and 4 s on the clock for each text
        _, found = await order(sandbox, texts)
    assert {each.answer for each in found.values()} == {"done"}, found


async def test_one_lanes_hangs_do_not_delay_the_other():
    with Sandbox(1, 60.0, program=PROGRAM) as sandbox:
        hangs = sandbox.judge_all([(HOSTILE, Candidate(SLEEPING, {}))] * (MOST_SLOW + 2))
        hanging = asyncio.ensure_future(anext(hangs))
        try:
            async with asyncio.timeout(30):
                assert (await sandbox.judge(*matching("a"), lane=Lane.EVALUATION)).outcome is Outcome.CORRECT
            assert not hanging.done()
        finally:
            hanging.cancel()


async def test_a_text_whose_shared_process_dies_is_judged_once_more():
    """An earlier text may have caused it; a fresh process tells them apart."""
    with Sandbox(1, 20.0, program=PROGRAM) as sandbox:
        first = await pid_of(sandbox)
        found = await found_in(sandbox, f"import os\nif os.getpid() == {first}: os._exit(1)\nfound = 'fresh'")
        assert found.answer == "fresh"
        found = await found_in(sandbox, "import os; os._exit(1)")
        assert (found.fault, found.reason) == ("died", "no judgement: the judging process failed: it has ended")


async def test_cancelled_texts_are_not_judged():
    with Sandbox(1, 60.0, program=PROGRAM) as sandbox:
        pid = await pid_of(sandbox)
        judging = sandbox.judge_all([(HOSTILE, Candidate("import time; time.sleep(0.2)", {}))] * 100)
        first = await anext(judging)
        await judging.aclose()
        async with asyncio.timeout(10):  # 100 of them would take 20 s
            assert await pid_of(sandbox) == pid
        assert len(first) < 50


async def test_closing_while_texts_hang_leaves_nothing():
    processes = {each.pid for each in psutil.Process().children(recursive=True) if alive(each)}
    threads = set(threading.enumerate())
    with Sandbox(2, 600.0, program=PROGRAM) as sandbox:
        hanging = []
        for lane in Lane:
            for by in (HOSTILE, EVALUATED):
                texts = [(by, Candidate(SLEEPING, {}))] * (MOST_SLOW // 2 + 3)
                hanging.append(asyncio.ensure_future(anext(sandbox.judge_all(texts, lane=lane))))
        await until(lambda: len(set(judging_processes()) - processes) > MOST_SLOW, "many texts are judged")
        started = time.monotonic()
    assert time.monotonic() - started < 20, "closing waits for no text"
    for each in hanging:
        each.cancel()
    left = [each for each in psutil.Process().children(recursive=True) if alive(each) and each.pid not in processes]
    assert left == []
    await until(lambda: set(threading.enumerate()) <= threads | asyncio_threads(), "no thread is left")


def asyncio_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("asyncio")}


async def test_closing_while_a_verifier_loads_does_not_wait(tmp_path, monkeypatch):
    (tmp_path / "slow_loading.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sandbox(1, 20.0, [PATTERN], program="slow_loading") as sandbox:
        judging = asyncio.ensure_future(sandbox.judge(*matching("a")))
        starting = asyncio.ensure_future(sandbox.start())
        await asyncio.wait([judging], timeout=0.2)
        started = time.monotonic()
    assert time.monotonic() - started < 20
    judging.cancel()
    await asyncio.wait([starting], timeout=20)
    assert starting.exception() is not None


def _spin():
    while True:
        pass


@pytest.mark.slow
async def test_a_busy_machine_does_not_make_a_text_late():
    spinning = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(8)]
    for process in spinning:
        process.start()
    try:
        with Sandbox(2, 2.0, program=PROGRAM) as sandbox:
            texts = [(HOSTILE, Candidate(BUSY, {"seconds": 0.6}))] * 4
            _, found = await order(sandbox, texts)
        assert {each.answer for each in found.values()} == {"done"}, found
    finally:
        for process in spinning:
            process.kill()
