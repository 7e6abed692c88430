"""A judging process in which a text runs code can send one reply, in time, to its own request, and no other."""

import asyncio
import pickle

import psutil
import pytest

from services.contracts import Outcome
from verifier.sandbox.pool import KEPT_BYTES, Sandbox
from verifier.sandbox.process import JudgingProcess, ProcessFailedError, request_of

HOSTILE = "tests.verifier.hostile"
FORGER = "tests.verifier.forger"
RIGHT = '{"to": "MARK", "correct": true, "score": 0.5, "answer": "x"}'


@pytest.fixture(scope="module")
def hostile():
    """A sandbox whose processes run code."""
    with Sandbox(1, 20.0, program=HOSTILE) as sandbox:
        yield sandbox


@pytest.fixture
def forger():
    """A process that sends the lines that the test gives it."""
    process = JudgingProcess((), FORGER)
    process.ready(20.0)
    yield process
    process.close()


def reply_to(process, says):
    [reply] = process.judge([request_of("", "", {"says": says})], 20.0)
    return reply


async def judging_process(sandbox, **how):
    found = await sandbox.judge("python", "import os; found = os.getpid()", {}, **how)
    return psutil.Process(int(found.answer))


async def stopped(process):
    """Whether the process stops: a signal is delivered with a delay."""
    for _ in range(600):
        if process.status() == psutil.STATUS_STOPPED:
            return True
        await asyncio.sleep(0.05)
    return False


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


@pytest.mark.parametrize(
    "sent",
    [b'{"correct": true, "score": 1.0, "answer": "forged"}\n', b"[" * 10_000 + b"\n", b"\xff\n", b"x" * 100_000],
)
async def test_a_forged_line_is_unknown_and_kills_the_process(hostile, sent):
    found = await hostile.judge("python", REACHES, {"sent": sent.hex()})
    assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "died"), found
    assert "the judging process failed" in found.reason
    assert (await hostile.judge("pattern", "b", {"pattern": "a"})).outcome is Outcome.WRONG


async def test_a_text_that_forges_its_reply_and_ends_has_no_judgement(hostile):
    """The process's real reply follows the forged one."""
    found = await hostile.judge("python", FORGES, {})
    assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "died"), found
    assert (await hostile.judge("pattern", "b", {"pattern": "a"})).outcome is Outcome.WRONG


async def test_nothing_is_unpickled(hostile, tmp_path):
    bomb = pickle.dumps(Bomb(tmp_path / "burst"))
    sent = len(bomb).to_bytes(4, "big") + bomb
    assert (await hostile.judge("python", REACHES, {"sent": sent.hex() + b"\n".hex()})).outcome is Outcome.UNKNOWN
    assert not list(tmp_path.iterdir())


async def test_a_process_that_does_not_answer_is_killed_in_time():
    with Sandbox(1, 1.0, program=HOSTILE) as sandbox:
        await sandbox.start()
        found = await sandbox.judge("python", "import time\nwhile True: time.sleep(1)", {})
        assert (found.reason, found.fault) == ("no judgement within 1 s", "timeout")
        half = REACHES + "import time\nwhile True: time.sleep(1)"
        assert (await sandbox.judge("python", half, {"sent": b'{"corr'.hex()})).reason == "no judgement within 1 s"
        sandbox._timeout_s = 20.0  # this judgement must not time out
        assert (await sandbox.judge("python", "found = 1", {})).answer == "1"


@pytest.mark.parametrize(
    "after", [LINGERS, pytest.param(KEEPS_RUNNING, marks=pytest.mark.slow)], ids=["waiting", "busy"]
)
async def test_a_text_that_forges_its_reply_and_runs_on_times_out(after):
    with Sandbox(1, 5.0, program=HOSTILE) as sandbox:
        await sandbox.start()
        found = await sandbox.judge("python", FORGES + after, {})
        assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "timeout"), found
        assert found.reason == "no judgement within 5 s: the judged text kept running after its reply"
        sandbox._timeout_s = 20.0  # this judgement must not time out
        assert (await sandbox.judge("pattern", "b", {"pattern": "a"})).outcome is Outcome.WRONG


@pytest.mark.parametrize(
    ("between", "fault"),
    [(FORGES, "died"), (FORGES + LINGERS, "timeout"), (REACHES, "died"), ("import time\n" + LINGERS, "timeout")],
)
async def test_texts_judged_with_a_hostile_one_are_judged(between, fault):
    texts = [
        ("pattern", "a", {"pattern": "a"}),
        ("python", between, {"sent": "5b0a"}),
        ("pattern", "b", {"pattern": "a"}),
    ]
    with Sandbox(1, 5.0, program=HOSTILE) as sandbox:
        await sandbox.start()
        placed = [finding async for findings in sandbox.judge_all(texts) for finding in findings]
    assert [place for place, _ in placed] == [0, 1, 2]
    first, hostile, last = [finding for _, finding in placed]
    assert (first.outcome, hostile.fault, last.outcome) == (Outcome.CORRECT, fault, Outcome.WRONG)


async def test_nothing_runs_between_two_judgements():
    with Sandbox(1, 20.0, program=HOSTILE) as sandbox:
        await sandbox.start()
        process = await judging_process(sandbox)
        assert await stopped(process)
        # The strongest attack of a text: it takes over the whole process and imitates it.
        assert (await sandbox.judge("python", FORGES + LISTENS + KEEPS_RUNNING, {})).answer == "forged"
        assert await stopped(process)
        before = process.cpu_times()
        await asyncio.sleep(0.5)
        assert process.cpu_times() == before
        # Another text may be judged by this process once, but never in a fresh process.
        assert (await sandbox.judge("pattern", "b", {"pattern": "a"}, fresh=True)).outcome is Outcome.WRONG
        assert not process.is_running()


async def test_a_process_is_kept_unless_a_fresh_one_is_requested(hostile):
    first = await judging_process(hostile)
    assert await judging_process(hostile) == first
    second = await judging_process(hostile, fresh=True)
    assert second != first
    assert await judging_process(hostile) == second


@pytest.mark.parametrize(("megabytes", "renewed"), [(50, False), ((KEPT_BYTES >> 20) + 50, True)])
async def test_memory_that_a_text_leaves_behind_kills_the_process(hostile, megabytes, renewed):
    before = await judging_process(hostile, fresh=True)
    keeps = "import builtins; builtins.kept = b'x' * (megabytes << 20)"
    assert (await hostile.judge("python", keeps, {"megabytes": megabytes})).outcome is Outcome.CORRECT
    assert before.is_running() is not renewed
    found = await hostile.judge("python", "import builtins; found = hasattr(builtins, 'kept')", {})
    assert found.answer == str(not renewed)
