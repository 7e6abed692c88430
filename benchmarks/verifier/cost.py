"""Owns the CPU time of a verdict: the sandbox's, with all its processes, against math-verify's own in one process.

Must not count the start of a process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import aclosing

import psutil

from benchmarks.verifier.texts import formulas, words
from services.contracts import Outcome
from services.settings.rewards.reward import Reward, parse_text
from verifier.sandbox.pool import Sandbox
from verifier.verifiers.base import Candidate

Text = tuple[Reward, Candidate]
TOGETHER = 64
ROUNDS = 3
FILES = {"./rewards.py": "def score(messages, response, reference, metadata):\n    return response == reference\n"}
FUNCTION = parse_text("python:./rewards.py:score")


def cpu_seconds() -> float:
    """Of this process and all below it."""
    found = time.process_time()
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        found += times.user + times.system
    return found


async def judged(sandbox: Sandbox, texts: Sequence[Text]) -> int:
    """Judge texts as a replica gets them; returns how many are correct."""
    correct = 0
    for start in range(0, len(texts), TOGETHER):
        async with aclosing(sandbox.judge_all(texts[start : start + TOGETHER])) as judging:
            async for findings in judging:
                correct += sum(found.outcome is Outcome.CORRECT for _, found in findings)
    return correct


def by_library(texts: Sequence[Text]) -> int:
    """Parse and verify with math-verify's defaults, but without its alarms; returns how many are correct."""
    from math_verify import parse, verify

    correct = 0
    for _, candidate in texts:
        gold = parse(f"${candidate.reference['answer']}$", parsing_timeout=None)
        correct += bool(verify(gold, parse(candidate.text, parsing_timeout=None), timeout_seconds=None))
    return correct


async def verdicts(count: int) -> None:
    """Print verdicts per CPU second, the best of some rounds."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about each call without an alarm
    for name, made, number in (("like GSM8K", words, count), ("like MATH", formulas, count // 8)):
        texts = made(number)
        with Sandbox(1, 10.0, [texts[0][0]]) as sandbox:
            await sandbox.start()
            await judged(sandbox, texts[:TOGETHER])
            by_library(texts[:TOGETHER])
            ours, theirs = [], []
            for _ in range(ROUNDS):
                before = cpu_seconds()
                ours_correct = await judged(sandbox, texts)
                ours.append(cpu_seconds() - before)
                before = time.process_time()
                theirs_correct = by_library(texts)
                theirs.append(time.process_time() - before)
        ratio = min(theirs) / min(ours)
        print(
            f"math, {name}: {number / min(ours):.0f} verdicts per CPU second ({ours_correct} correct), "
            f"math-verify {number / min(theirs):.0f} ({theirs_correct} correct), ratio {ratio:.2f}"
        )


async def functions(count: int) -> None:
    """Print how many texts per second a function of the user's judges, each in a process of its own."""
    with Sandbox(2, 10.0, [FUNCTION], files=FILES) as sandbox:
        await sandbox.start()
        texts = [(FUNCTION, Candidate("x", {"answer": "x"}))] * count
        await judged(sandbox, texts[:TOGETHER])
        started = time.perf_counter()
        assert await judged(sandbox, texts) == count
        print(f"a function of the user's: {count / (time.perf_counter() - started):.0f} texts/s")
