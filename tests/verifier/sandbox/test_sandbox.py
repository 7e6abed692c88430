"""The sandbox's guarantees: hostile text is limited in time and memory, and a crash is unknown, not wrong."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from services.contracts import Outcome
from services.settings.rewards.reward import Reward
from tests.harness.process_trees import alive
from tests.verifier.sandbox.judged import (
    BACKTRACKING,
    GYM,
    MATH,
    PATTERN,
    PROGRAM,
    found_in,
    judging_processes,
    matching,
    pid_of,
    until,
)
from verifier.sandbox.pool import Sandbox
from verifier.verifiers.base import Candidate


def nested(levels):
    found = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(1, 20.0, [MATH, GYM]) as started:
        yield started


@pytest.mark.parametrize(
    ("verifier", "text", "reference", "outcome"),
    [
        (PATTERN, "the answer is 12", {"pattern": r"\b12\b"}, Outcome.CORRECT),
        (PATTERN, "the answer is 13", {"pattern": r"\b12\b"}, Outcome.WRONG),
        (MATH, r"so \boxed{\frac{1}{2}}", {"answer": "0.5"}, Outcome.CORRECT),
        (MATH, "no idea", {"answer": "0.5"}, Outcome.WRONG),
        (PATTERN, "x", {}, Outcome.UNKNOWN),
        (Reward("missing"), "x", {}, Outcome.UNKNOWN),
        (MATH, "1", {"answer": ""}, Outcome.UNKNOWN),
    ],
)
async def test_outcomes(sandbox, verifier, text, reference, outcome):
    found = await sandbox.judge(verifier, Candidate(text, reference))
    assert found.outcome is outcome, found
    assert found.reason


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("4 - 1 = 3", True),
        ("The answer is 3.", True),
        ("<answer>3</answer> or 5", True),
        ("3 or 4", False),
        ("", False),
    ],
)
async def test_reasoning_gym_judges_the_final_answer(sandbox, text, correct):
    entry = {"question": "4 - 1 =", "answer": "3", "metadata": {}}
    found = await sandbox.judge(GYM, Candidate(text, {"task": "chain_sum", "entry": entry}))
    assert (found.outcome is Outcome.CORRECT) is correct, found
    assert (found.answer == "3") is correct


@pytest.mark.parametrize(
    ("verifier", "text", "reference", "answer"),
    [
        (PATTERN, "the answer is 12", {"pattern": r"\b1\d\b"}, "12"),
        (PATTERN, "no number", {"pattern": r"\b1\d\b"}, ""),
        # Equal correct answers count together in maj@k, whatever their notation.
        (MATH, r"so \boxed{\frac{2}{4}}", {"answer": "0.5"}, "1/2"),
        (MATH, r"it is \boxed{0.50}", {"answer": r"\frac12"}, "1/2"),
        (MATH, r"\boxed{0.25}", {"answer": "0.5"}, "1/4"),
        (MATH, r"\boxed{\frac{1}{4}}", {"answer": "0.5"}, "1/4"),
        (MATH, r"\boxed{1 + x}", {"answer": "0.5"}, "1+x"),
        (MATH, "no idea", {"answer": "0.5"}, ""),
        (PATTERN, "x", {}, ""),
    ],
)
async def test_the_judged_answer_is_normalised(sandbox, verifier, text, reference, answer):
    found = await sandbox.judge(verifier, Candidate(text, reference))
    assert found.answer == answer, found


async def test_texts_judged_together_have_their_own_findings(sandbox):
    texts = [matching("12", r"\b1\d\b"), (PATTERN, Candidate("x", {})), matching("none", r"\b1\d\b")]
    placed = [finding async for findings in sandbox.judge_all(texts) for finding in findings]
    assert sorted(place for place, _ in placed) == [0, 1, 2]
    found = [finding for _, finding in sorted(placed, key=lambda each: each[0])]
    assert [finding.outcome for finding in found] == [Outcome.CORRECT, Outcome.UNKNOWN, Outcome.WRONG]
    assert [finding.answer for finding in found] == ["12", "", ""]


async def test_no_texts_have_no_findings(sandbox):
    assert [findings async for findings in sandbox.judge_all([])] == []


async def test_long_answers_are_shortened_and_stay_distinct(sandbox):
    everything = "(?s).+"
    longest = await sandbox.judge(*matching("a" * 199 + "b", everything))
    assert longest.answer == "a" * 199 + "b"
    first, second = [(await sandbox.judge(*matching("a" * 5000 + end, everything))).answer for end in "bc"]
    assert len(first) == len(second) == 200
    assert first != second
    assert first == (await sandbox.judge(*matching("a" * 5000 + "b", everything))).answer


UNUSABLE = {
    "a list as the task": (GYM, {"task": [], "entry": {}}),
    "an unknown task": (GYM, {"task": "no such task", "entry": {"answer": "1"}}),
    "no entry": (GYM, {"task": "chain_sum"}),
    "an object as the pattern": (PATTERN, {"pattern": {}}),
    "not JSON": (PATTERN, {"pattern": b"a"}),
    "nested too deeply": (PATTERN, {"pattern": nested(100_000)}),
    "no answer": (MATH, {}),
}


@pytest.mark.parametrize("name", UNUSABLE)
async def test_an_unusable_reference_is_unknown(sandbox, name):
    """The text next to it, in the same turn of a thread, is judged."""
    verifier, reference = UNUSABLE[name]
    texts = [matching("a"), (verifier, Candidate("x", reference)), matching("b")]
    async with asyncio.timeout(60):
        placed = dict([finding async for findings in sandbox.judge_all(texts) for finding in findings])
    assert [placed[n].outcome for n in range(3)] == [Outcome.CORRECT, Outcome.UNKNOWN, Outcome.WRONG]
    assert placed[1].fault == "error", placed[1]


@pytest.mark.conformance(
    formula="a judgement ends by its deadline; unknown is neither correct nor wrong", setting="verifier.timeout_s"
)
async def test_an_endless_judgement_is_killed_and_the_next_succeeds():
    with Sandbox(processes=1, timeout_s=1.0) as sandbox:
        found = await sandbox.judge(PATTERN, BACKTRACKING)
        assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "timeout")
        assert found.reason == "no judgement within 1 s of CPU time"
        assert (await sandbox.judge(*matching("a"))).outcome is Outcome.CORRECT


@pytest.mark.parametrize(("kind", "library"), [("math", "math_verify"), ("reasoning-gym", "reasoning_gym")])
def test_libraries_load_before_the_first_judgement(kind, library):
    """The time of a judgement is limited, and their import takes seconds."""
    code = (
        "import sys\nfrom verifier.verifiers.loading import preload\n"
        f"before = {library!r} in sys.modules\npreload({kind!r})\nprint(before, {library!r} in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "False True\n"


async def test_a_crash_of_a_judging_process_is_unknown():
    others = judging_processes()
    with Sandbox(1, 60.0, [PATTERN]) as sandbox:
        await sandbox.start()  # until then its warm parent has helpers of other kinds
        endless = asyncio.create_task(sandbox.judge(PATTERN, BACKTRACKING))
        async with asyncio.timeout(40):
            while not endless.done():  # the text is judged once more, and has a spare beside it
                for worker in set(judging_processes()) - set(others):
                    with suppress(ProcessLookupError):
                        os.kill(worker, signal.SIGKILL)
                await asyncio.sleep(0.05)
        found = endless.result()
        assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "died")
        assert (await sandbox.judge(*matching("a"))).outcome is Outcome.CORRECT


async def test_a_text_outlives_the_kill_of_its_process():
    """The kernel kills judging processes first when memory runs out."""
    others = judging_processes()
    with Sandbox(processes=1, timeout_s=60.0, program=PROGRAM) as sandbox:
        await pid_of(sandbox)
        text = asyncio.create_task(found_in(sandbox, "import time; time.sleep(2); found = 'done'"))
        await until(lambda: len(set(judging_processes()) - set(others)) > 1, "the text has a process and a spare")
        for worker in set(judging_processes()) - set(others):
            os.kill(worker, signal.SIGKILL)
        assert (await text).answer == "done"


def test_judging_processes_die_with_their_parent():
    code = (
        "import asyncio\n"
        "from tests.verifier.sandbox.judged import BACKTRACKING, PATTERN, matching\n"
        "from verifier.sandbox.pool import Sandbox\n"
        "if __name__ == '__main__':\n"
        "    sandbox = Sandbox(1, 60.0)\n"
        "    asyncio.run(sandbox.judge(*matching('a')))\n"
        "    print('ready', flush=True)\n"
        "    asyncio.run(sandbox.judge(PATTERN, BACKTRACKING))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert len(children) >= 2, "a warm parent and a judging process"
        os.kill(parent.pid, signal.SIGKILL)
    ends = time.monotonic() + 30
    while left := [child for child in children if alive(child)]:
        assert time.monotonic() < ends, f"still there: {left}"
        time.sleep(0.1)
