"""Owns the count of verdicts that a hostile text changes.

Must not run a hostile text outside of the sandbox.
"""

from __future__ import annotations

from services.contracts import Lane, Outcome
from tests.verifier.sandbox.attacks import ATTACKS, FILES, GYM, PROGRAM, as_answer, as_response, later_texts
from verifier.sandbox.pool import Sandbox

WAYS = {"string_insertion": as_answer, "function": as_response}
TIMEOUT_S = 0.5


async def changed(sandbox: Sandbox, lane: Lane, count: int) -> int:
    """How many of the later verdicts in a lane differ."""
    texts = later_texts(count)
    judging = sandbox.judge_all([(reward, candidate) for reward, candidate, _ in texts], lane=lane)
    return sum([found.outcome is not texts[place][2] async for findings in judging for place, found in findings])


async def measure(count: int) -> None:
    """Print for each attack how many of `count` later verdicts differ, in either lane, after it came in either."""
    print(f"{'attack':42} {'through':18} {'itself':8} differ of {count} in training, evaluation")
    total = 0
    with Sandbox(2, TIMEOUT_S, [GYM], files=FILES, program=PROGRAM) as sandbox:
        for name, code in ATTACKS.items():
            for way, text in WAYS.items():
                found = [await sandbox.judge(*text(code), lane=lane) for lane in Lane]
                differ = [await changed(sandbox, lane, count) for lane in Lane]
                total += sum(differ)
                itself = Outcome.CORRECT if any(each.outcome is Outcome.CORRECT for each in found) else found[0].outcome
                print(f"{name:42} {way:18} {itself.value:8} {differ[0]:d}, {differ[1]:d}", flush=True)
    print(f"{len(ATTACKS)} attacks, {total} verdicts differ")
