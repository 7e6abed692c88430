"""Which texts share a process, and what a warm parent is: it reads no text, survives its children, and is replaced."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from services.contracts import Lane, Outcome
from tests.harness.process_trees import alive
from tests.verifier.sandbox.attacks import FILES, GYM, PLAIN, as_answer
from tests.verifier.sandbox.judged import (
    EVALUATED,
    HOSTILE,
    PATTERN,
    PROGRAM,
    found_in,
    judging_processes,
    matching,
    pid_of,
    ran,
    until,
    warm_parents,
)
from verifier.sandbox.pool import Sandbox, SandboxError
from verifier.sandbox.warm_parent import MOST_DEATHS
from verifier.verifiers.base import Candidate

PID = "import os; found = os.getpid()"


@pytest.fixture
def others():
    """The warm parents of other tests."""
    return {each.pid for each in warm_parents()}


async def answers(sandbox, texts, lane=Lane.TRAIN):
    placed = [found async for findings in sandbox.judge_all(texts, lane=lane) for _, found in findings]
    assert len(placed) == len(texts)
    return [found.answer for found in placed]


async def test_no_process_judges_for_two_lanes_or_two_verifiers():
    with Sandbox(2, 20.0, program=PROGRAM) as sandbox:
        texts = [(HOSTILE, Candidate(PID, {})), matching("a")] * 40
        train, evaluation = await asyncio.gather(*(answers(sandbox, texts, lane) for lane in Lane))
    train, evaluation = set(train) - {"a"}, set(evaluation) - {"a"}
    assert 1 <= len(train) < 20, "most texts share a process; on a busy machine some that take long have a spare's"
    assert 1 <= len(evaluation) < 20
    assert not train & evaluation


async def test_texts_that_their_scorer_evaluates_get_a_process_each():
    with Sandbox(2, 20.0, program=PROGRAM) as sandbox:
        texts = [(EVALUATED, Candidate(PID, {}))] * 30
        pids = await answers(sandbox, texts) + await answers(sandbox, texts, Lane.EVALUATION)
        assert len(set(pids)) == 60
        await until(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids), "the processes have ended")


async def test_a_function_of_the_users_gets_a_process_per_text():
    files = {"./rewards.py": "import os\ndef pid(m, t, r, d): return {'score': 1, 'answer': str(os.getpid())}\n"}
    from services.settings.rewards.reward import parse_text

    with Sandbox(2, 20.0, files=files) as sandbox:
        pids = await answers(sandbox, [(parse_text("python:./rewards.py:pid"), Candidate("", {"answer": 1}))] * 30)
    assert len(set(pids)) == 30


async def test_a_scorer_that_evaluates_and_one_that_does_not(others):
    """Tasks of reasoning-gym whose scorers evaluate a text share no process with the others."""
    before = set(judging_processes())
    entry = {"question": "4 - 1 =", "answer": "3", "metadata": {}}
    plain = GYM, Candidate("3", {"task": "chain_sum", "entry": entry})
    with Sandbox(1, 20.0, [GYM]) as sandbox:
        await sandbox.start()
        await answers(sandbox, [plain] * 20)
        shared = set(judging_processes()) - before
        assert 1 <= len(shared) < 10, "one, and spares for texts that take long"
        await answers(sandbox, [plain, as_answer("1"), plain, as_answer("2")] * 5)
        assert shared & set(judging_processes()), "a process with texts that were not evaluated is kept"


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux has /proc")
async def test_a_warm_parent_never_reads_a_text(others):
    marker = "a" + "marker".join(str(n) for n in range(40))
    with Sandbox(1, 20.0, files=FILES) as sandbox:
        for reward, candidate in (matching(marker), (PLAIN, Candidate(marker, {"answer": 1}))):
            await sandbox.judge(reward, candidate)
        parents = [each for each in warm_parents() if each.pid not in others]
        assert len(parents) == 2
        for parent in parents:
            assert not holds(parent.pid, marker.encode())
        assert holds(os.getpid(), marker.encode()), "otherwise this test would prove nothing"


def holds(pid, wanted):
    """Whether a process's memory holds these bytes."""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            where, rights, *_ = line.split()
            if not rights.startswith("rw"):
                continue
            start, end = (int(part, 16) for part in where.split("-"))
            memory.seek(start)
            try:
                if wanted in memory.read(end - start):
                    return True
            except OSError:
                continue  # a mapping without pages
    return False


@pytest.mark.parametrize("code", ["import os; os.abort()", "import ctypes; ctypes.string_at(0)", "bytearray(9 << 30)"])
async def test_a_warm_parent_survives_its_children(code, others):
    with Sandbox(1, 20.0, program=PROGRAM) as sandbox:
        await ran(sandbox, "found = 1", EVALUATED)
        [parent] = [each for each in warm_parents() if each.pid not in others]
        for _ in range(5):
            await found_in(sandbox, code, EVALUATED)
        assert await ran(sandbox, "found = 1", EVALUATED) == "1"
        assert [each.pid for each in warm_parents() if each.pid not in others] == [parent.pid]


async def test_a_dead_warm_parent_is_started_again(others):
    with Sandbox(1, 20.0, program=PROGRAM) as sandbox:
        seen = set()
        for _ in range(MOST_DEATHS + 3):  # each has judged, so that none counts
            assert await ran(sandbox, "found = 1", EVALUATED) == "1"
            [parent] = [each for each in warm_parents() if each.pid not in others]
            seen.add(parent.pid)
            parent.kill()
            await until(lambda parent=parent: not alive(parent), "it is dead")
            # Its spare process died with it: a text can be lost, but none is wrong.
            assert (await found_in(sandbox, "found = 1", EVALUATED)).outcome in (Outcome.CORRECT, Outcome.UNKNOWN)
        assert len(seen) == MOST_DEATHS + 3


DYING = """
import os, sys
from tests.verifier.sandbox.hostile import server
starts = sys.argv[0] and {log!r}
with open(starts, "a") as log: log.write("x")
server._serve = lambda *_: os._exit(7)
server.main(sys.argv[1:])
"""


async def test_a_warm_parent_that_always_dies_is_not_restarted(tmp_path, monkeypatch):
    log = tmp_path / "starts"
    (tmp_path / "dying_judging.py").write_text(DYING.format(log=str(log)))
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sandbox(2, 20.0, program="dying_judging") as sandbox:
        for _ in range(3):
            placed = [each async for found in sandbox.judge_all([matching("a")] * 8) for _, each in found]
            assert {(each.outcome, each.fault) for each in placed} == {(Outcome.UNKNOWN, "died")}
    assert len(log.read_text()) == 1 + MOST_DEATHS


async def test_a_process_that_cannot_be_forked_is_unknown(tmp_path, monkeypatch, others):
    """In a container without room for more processes; the warm parent survives."""
    (tmp_path / "full_judging.py").write_text(
        "import os, sys\nfrom tests.verifier.sandbox.hostile import server\ncount = 0\nfork = os.fork\n"
        "def full():\n    global count\n    count += 1\n    if count == 1: raise BlockingIOError(11, 'full')\n"
        "    return fork()\nos.fork = full\nserver.main(sys.argv[1:])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sandbox(1, 20.0, [PATTERN], program="full_judging") as sandbox:
        await sandbox.start()
        found = await sandbox.judge(*matching("a"))
        assert (found.fault, "it cannot fork" in found.reason) == ("died", True), found
        [parent] = [each for each in warm_parents() if each.pid not in others]
        assert (await sandbox.judge(*matching("a"))).outcome is Outcome.CORRECT
        assert [each.pid for each in warm_parents() if each.pid not in others] == [parent.pid]


async def test_a_judging_process_that_is_killed_takes_no_other_along():
    before = set(judging_processes())
    with Sandbox(1, 20.0, program=PROGRAM) as sandbox:
        first, second = await pid_of(sandbox), await pid_of(sandbox, HOSTILE, Lane.EVALUATION)
        assert set(judging_processes()) - before >= {first, second}
        os.kill(first, signal.SIGKILL)
        assert await pid_of(sandbox) not in (first, second)
        assert await pid_of(sandbox, HOSTILE, Lane.EVALUATION) == second


async def test_a_run_has_a_most_number_of_warm_parents(monkeypatch):
    monkeypatch.setattr("verifier.sandbox.parents.MOST_CONFINED", 1)
    with Sandbox(1, 20.0, [PATTERN, HOSTILE], program=PROGRAM) as sandbox:
        with pytest.raises(SandboxError, match="at most 1 different"):
            await sandbox.start()
        found = await found_in(sandbox, "found = 1")
        assert found.reason == "no judging process: a run may have at most 1 different confined rewards"
