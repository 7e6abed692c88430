"""The sandbox's guarantees: hostile text is limited in time and memory, and a crash is unknown, not wrong."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from services.contracts import Outcome
from tests.harness.process_trees import alive
from verifier.sandbox.pool import Sandbox

HOSTILE = "tests.verifier.hostile"
BACKTRACKING = {"pattern": "(a+)+$"}


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(1, 20.0, ("math", "reasoning-gym")) as started:
        yield started


@pytest.mark.parametrize(
    ("verifier", "text", "reference", "outcome"),
    [
        ("pattern", "the answer is 12", {"pattern": r"\b12\b"}, Outcome.CORRECT),
        ("pattern", "the answer is 13", {"pattern": r"\b12\b"}, Outcome.WRONG),
        ("math", r"so \boxed{\frac{1}{2}}", {"answer": "0.5"}, Outcome.CORRECT),
        ("math", "no idea", {"answer": "0.5"}, Outcome.WRONG),
        ("pattern", "x", {}, Outcome.UNKNOWN),
        ("missing", "x", {}, Outcome.UNKNOWN),
        ("math", "1", {"answer": ""}, Outcome.UNKNOWN),
    ],
)
async def test_outcomes(sandbox, verifier, text, reference, outcome):
    found = await sandbox.judge(verifier, text, reference)
    assert found.outcome is outcome, found
    assert bool(found.reason) == (outcome is Outcome.UNKNOWN)


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
    found = await sandbox.judge("reasoning-gym", text, {"task": "chain_sum", "entry": entry})
    assert (found.outcome is Outcome.CORRECT) is correct, found
    assert (found.answer == "3") is correct


@pytest.mark.parametrize(
    ("verifier", "text", "reference", "answer"),
    [
        ("pattern", "the answer is 12", {"pattern": r"\b1\d\b"}, "12"),
        ("pattern", "no number", {"pattern": r"\b1\d\b"}, ""),
        # Equal correct answers count together in maj@k, whatever their notation.
        ("math", r"so \boxed{\frac{2}{4}}", {"answer": "0.5"}, "1/2"),
        ("math", r"it is $0.50$", {"answer": r"\frac12"}, "1/2"),
        ("math", r"\boxed{0.25}", {"answer": "0.5"}, "1/4"),
        ("math", r"$\frac{1}{4}$", {"answer": "0.5"}, "1/4"),
        ("math", r"$1 + x$", {"answer": "0.5"}, "x + 1"),
        ("math", "no idea", {"answer": "0.5"}, ""),
        ("pattern", "x", {}, ""),
    ],
)
async def test_the_judged_answer_is_normalised(sandbox, verifier, text, reference, answer):
    found = await sandbox.judge(verifier, text, reference)
    assert found.answer == answer, found


async def test_texts_judged_together_have_their_own_findings(sandbox):
    ten = {"pattern": r"\b1\d\b"}
    texts = [("pattern", "12", ten), ("pattern", "x", {}), ("pattern", "none", ten)]
    placed = [finding async for findings in sandbox.judge_all(texts) for finding in findings]
    assert [place for place, _ in placed] == [0, 1, 2]
    found = [finding for _, finding in placed]
    assert [finding.outcome for finding in found] == [Outcome.CORRECT, Outcome.UNKNOWN, Outcome.WRONG]
    assert [finding.answer for finding in found] == ["12", "", ""]


async def test_long_answers_are_shortened_and_stay_distinct(sandbox):
    reference = {"pattern": "(?s).+"}
    longest = await sandbox.judge("pattern", "a" * 199 + "b", reference)
    assert longest.answer == "a" * 199 + "b"
    first, second = [(await sandbox.judge("pattern", "a" * 5000 + end, reference)).answer for end in "bc"]
    assert len(first) == len(second) == 200
    assert first != second
    assert first == (await sandbox.judge("pattern", "a" * 5000 + "b", reference)).answer


@pytest.mark.conformance(
    formula="a judgement ends by its deadline; unknown is neither correct nor wrong", setting="verifier.timeout_s"
)
async def test_an_endless_judgement_is_killed_and_the_next_succeeds():
    with Sandbox(processes=1, timeout_s=20.0) as sandbox:
        await sandbox.judge("pattern", "", {"pattern": ""})
        sandbox._timeout_s = 2.0  # short only for the judgement that must time out
        found = await sandbox.judge("pattern", "a" * 40 + "b", BACKTRACKING)
        assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "timeout")
        assert "within 2 s" in found.reason
        sandbox._timeout_s = 20.0
        assert (await sandbox.judge("pattern", "a", {"pattern": "a"})).outcome is Outcome.CORRECT


@pytest.mark.parametrize(("verifiers", "loaded"), [(("math", "pattern"), True), ((), False)])
async def test_libraries_load_before_the_first_judgement(verifiers, loaded):
    with Sandbox(1, 20.0, verifiers, program=HOSTILE) as sandbox:
        found = await sandbox.judge("python", "import sys; found = 'math_verify' in sys.modules", {})
        assert found.answer == str(loaded), found


async def test_a_crash_of_a_judging_process_is_unknown():
    before = set(psutil.Process().children())
    with Sandbox(processes=1, timeout_s=20.0) as sandbox:
        await sandbox.judge("pattern", "", {"pattern": ""})
        endless = asyncio.create_task(sandbox.judge("pattern", "a" * 40 + "b", BACKTRACKING))
        await asyncio.sleep(1.0)
        [worker] = [p for p in set(psutil.Process().children()) - before if "verifier.sandbox.child" in p.cmdline()]
        worker.kill()
        found = await endless
        assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "died")
        assert "died with SIGKILL" in found.reason


def test_judging_processes_die_with_their_parent():
    code = (
        "import asyncio, sys\n"
        "from verifier.sandbox.pool import Sandbox\n"
        "if __name__ == '__main__':\n"
        "    sandbox = Sandbox(1, 60.0)\n"
        "    asyncio.run(sandbox.judge('pattern', '', {'pattern': ''}))\n"
        "    print('ready', flush=True)\n"
        "    asyncio.run(sandbox.judge('pattern', 'a' * 60 + 'b', {'pattern': '(a+)+$'}))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        assert children
        os.kill(parent.pid, signal.SIGKILL)
    ends = time.monotonic() + 30
    while left := [child for child in children if alive(child)]:
        assert time.monotonic() < ends, f"still there: {left}"
        time.sleep(0.1)
