"""A judging process in which a text runs code can send one reply, in time, to its own request, and no other."""

import os
import pickle
import subprocess
import sys

import psutil
import pytest

from services.contracts import Outcome
from tests.harness.process_trees import alive
from tests.verifier.sandbox.judged import (
    EVALUATED,
    HOSTILE,
    PROGRAM,
    SLEEPING,
    found_in,
    matching,
    pid_of,
    ran,
    until,
)
from verifier.sandbox.idle import KEPT_BYTES
from verifier.sandbox.lane import WALL_FACTOR
from verifier.sandbox.pool import Sandbox
from verifier.sandbox.process import JudgingProcess, ProcessFailedError, request_of
from verifier.verifiers.base import Candidate

FORGER = "tests.verifier.sandbox.forger"
RIGHT = '{"to": "MARK", "correct": true, "score": 0.5, "answer": "x"}'


@pytest.fixture(scope="module")
def hostile():
    """A sandbox whose processes run code."""
    with Sandbox(1, 20.0, program=PROGRAM) as sandbox:
        yield sandbox


@pytest.fixture
def forger():
    """A process that sends the lines that the test gives it."""
    their_requests, requests = os.pipe()
    replies, their_replies = os.pipe()
    with subprocess.Popen([sys.executable, "-m", FORGER], stdin=their_requests, stdout=their_replies) as program:
        os.close(their_requests)
        os.close(their_replies)
        process = JudgingProcess(
            "", psutil.Process(program.pid), program.pid, os.pidfd_open(program.pid), requests, replies
        )
        yield process
        process.close()


def reply_to(process, says):
    process.ask(request_of("", {}, Candidate("", {"says": says})), 20.0, 20.0)
    return process.reply()


async def stopped(process):
    await until(lambda: process.status() == psutil.STATUS_STOPPED, "a process without a text is stopped")


def test_a_valid_reply_is_accepted(forger):
    for says in (RIGHT, RIGHT.replace("0.5", "1").replace('"x"', f'"{"x" * 200}"'), '{"to": "MARK", "reason": "none"}'):
        assert reply_to(forger, says).to
    assert forger.alive


@pytest.mark.parametrize(
    "says",
    [
        RIGHT.replace("0.5", "7"),
        RIGHT.replace("0.5", "-0.5"),
        RIGHT.replace("0.5", "NaN"),
        RIGHT.replace("0.5", "Infinity"),
        RIGHT.replace('"x"', f'"{"x" * 300}"'),
        RIGHT.replace("}", f', "reason": "{"x" * 600}"}}'),
        RIGHT.replace("true", '"perhaps"'),
        f"{RIGHT}\n{RIGHT}",
        RIGHT.replace('"to": "MARK", ', ""),
    ],
)
def test_an_invalid_reply_with_the_right_mark_is_rejected(forger, says):
    reply_to(forger, RIGHT)
    with pytest.raises(ProcessFailedError, match="it sent an invalid reply"):
        reply_to(forger, says)
    assert not forger.alive


@pytest.mark.conformance(
    formula="a verdict counts only for the text in its request", setting="verifier/sandbox/process.py: Reply.to"
)
@pytest.mark.parametrize("mark", ["0123456789abcdef", "LAST", ""])
def test_a_reply_with_another_mark_is_rejected(forger, mark):
    reply_to(forger, RIGHT)
    with pytest.raises(ProcessFailedError, match="it answered another request"):
        reply_to(forger, RIGHT.replace("MARK", mark))
    assert not forger.alive


def test_a_line_sent_in_advance_is_no_reply_to_the_next(forger):
    reply_to(forger, RIGHT)
    with pytest.raises(ProcessFailedError, match=r"an invalid reply|another request|without a request"):
        reply_to(forger, f"{RIGHT}\n{RIGHT.replace('MARK', 'LAST')}")
    assert not forger.alive


REACHES = """
import os
for descriptor in range(3, 64):
    try:
        os.write(descriptor, bytes.fromhex(sent))
    except OSError:
        pass
"""

FORGES = """
import json, os, sys, time
frame = sys._getframe()
while "replies" not in frame.f_locals:
    frame = frame.f_back
mark, requests, replies = (frame.f_locals[name] for name in ("mark", "requests", "replies"))
replies.write(json.dumps({"to": mark, "correct": True, "score": 1.0, "answer": "forged"}).encode() + b"\\n")
"""
LISTENS = """
replies.write(json.dumps({"to": json.loads(requests.readline())[0]}).encode() + b"\\n")
"""
KEEPS_RUNNING = "while True: pass\n"
LINGERS = "while True: time.sleep(0.1)\n"
"""Keeps running as well, without load on the machine."""


class Bomb:
    """Unpickled, it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("by", [HOSTILE, EVALUATED], ids=["shared", "own process"])
@pytest.mark.parametrize(
    "sent",
    [b'{"correct": true, "score": 1.0, "answer": "forged"}\n', b"[" * 10_000 + b"\n", b"\xff\n", b"x" * 100_000],
)
async def test_a_forged_line_is_unknown_and_kills_the_process(hostile, sent, by):
    found = await found_in(hostile, REACHES, by, sent=sent.hex())
    assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "died"), found
    assert "the judging process failed" in found.reason
    assert (await hostile.judge(*matching("b"))).outcome is Outcome.WRONG


async def test_a_text_that_forges_its_reply_and_ends_has_no_judgement(hostile):
    """The process's real reply follows the forged one."""
    found = await found_in(hostile, FORGES, EVALUATED)
    assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "died"), found
    assert (await hostile.judge(*matching("b"))).outcome is Outcome.WRONG


async def test_nothing_is_unpickled(hostile, tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "burst"))
    sent = len(bomb).to_bytes(4, "big") + bomb
    found = await found_in(hostile, REACHES, EVALUATED, sent=sent.hex() + b"\n".hex())
    assert found.outcome is Outcome.UNKNOWN
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("by", [HOSTILE, EVALUATED], ids=["shared", "own process"])
async def test_a_process_that_does_not_answer_is_killed_in_time(by):
    with Sandbox(1, 0.1, program=PROGRAM) as sandbox:
        for code in (SLEEPING, REACHES + SLEEPING):  # the second has sent half a line
            found = await found_in(sandbox, code, by, sent=b'{"corr'.hex())
            assert (found.reason, found.fault) == (f"no judgement within {0.1 * WALL_FACTOR:g} s", "timeout")
        assert await ran(sandbox, "found = 1", by) == "1"


@pytest.mark.parametrize(
    "after", [LINGERS, pytest.param(KEEPS_RUNNING, marks=pytest.mark.slow)], ids=["waiting", "busy"]
)
async def test_a_text_that_forges_its_reply_and_runs_on_times_out(after):
    with Sandbox(1, 0.2, program=PROGRAM) as sandbox:
        found = await found_in(sandbox, FORGES + after, EVALUATED)
        assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "timeout"), found
        assert found.reason.endswith(": the judged text kept running after its reply")
        assert (await sandbox.judge(*matching("b"))).outcome is Outcome.WRONG


@pytest.mark.parametrize(
    ("between", "fault"),
    [(FORGES, "died"), (FORGES + LINGERS, "timeout"), (REACHES, "died"), ("import time\n" + LINGERS, "timeout")],
)
async def test_texts_judged_with_a_hostile_one_are_judged(between, fault):
    texts = [matching("a"), (EVALUATED, Candidate(between, {"sent": "5b0a"})), matching("b")]
    with Sandbox(1, 0.2, program=PROGRAM) as sandbox:
        placed = [finding async for findings in sandbox.judge_all(texts) for finding in findings]
    assert sorted(place for place, _ in placed) == [0, 1, 2]
    first, hostile, last = [finding for _, finding in sorted(placed, key=lambda each: each[0])]
    assert (first.outcome, hostile.fault, last.outcome) == (Outcome.CORRECT, fault, Outcome.WRONG)


async def test_nothing_runs_between_two_judgements():
    with Sandbox(1, 20.0, program=PROGRAM) as sandbox:
        process = psutil.Process(await pid_of(sandbox))
        await stopped(process)
        # The strongest attack of a text on those after it: it takes over the process and imitates it.
        assert (await found_in(sandbox, FORGES + LISTENS + KEEPS_RUNNING)).answer == "forged"
        await stopped(process)
        before = process.cpu_times()
        assert (await sandbox.judge(*matching("b"))).outcome is Outcome.WRONG  # some time passes
        assert process.cpu_times() == before


async def test_a_process_whose_texts_cannot_run_code_is_kept(hostile):
    first = await pid_of(hostile)
    assert await pid_of(hostile) == first
    await found_in(hostile, "import os; os._exit(0)")
    second = await pid_of(hostile)
    assert second != first
    assert await pid_of(hostile) == second


@pytest.mark.parametrize(("megabytes", "renewed"), [(2, False), ((KEPT_BYTES >> 20) + 50, True)])
async def test_memory_that_a_text_leaves_behind_kills_the_process(hostile, megabytes, renewed):
    await found_in(hostile, "import os; os._exit(0)")
    before = psutil.Process(await pid_of(hostile))
    keeps = "import builtins; builtins.kept = b'x' * (megabytes << 20)"
    assert (await found_in(hostile, keeps, megabytes=megabytes)).outcome is Outcome.CORRECT
    assert await ran(hostile, "import builtins; found = hasattr(builtins, 'kept')") == str(not renewed)
    if renewed:
        await until(lambda: not alive(before), "the process has ended")
    assert alive(before) is not renewed
