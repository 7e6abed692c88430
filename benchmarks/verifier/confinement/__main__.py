"""Owns `python -m benchmarks.verifier.confinement`: judgements per second and their ratio, per verifier.

Must not measure anything except whole judgements, from the request to the finding. Takes up to two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import reasoning_gym

from services.contracts import Outcome
from services.settings.rewards.reward import parse_text
from verifier.sandbox.pool import Sandbox
from verifier.verifiers.base import Candidate

PROGRAMS = ("benchmarks.verifier.confinement.unconfined", "verifier.sandbox.server")
CHAIN_SUM = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]

WORK: dict[str, tuple[int, str, dict[str, Any]]] = {
    "pattern": (200, "the answer is 12", {"pattern": r"\b12\b"}),
    "answer-line": (200, "so\nAnswer: 12", {"answer": "12"}),
    "reasoning-gym": (200, f"<answer>{CHAIN_SUM['answer']}</answer>", {"task": "chain_sum", "entry": CHAIN_SUM}),
    "math": (100, r"so \boxed{\frac{2}{4}}", {"answer": "0.5"}),
}
"""By verifier: judgements per round, the response, the reference."""


async def seconds(sandbox: Sandbox, verifier: str) -> float:
    """The duration of one round."""
    count, text, reference = WORK[verifier]
    started = time.perf_counter()
    judging = sandbox.judge_all([(parse_text(verifier), Candidate(text, reference))] * count)
    findings = [finding async for found in judging for _, finding in found]
    assert all(finding.outcome is Outcome.CORRECT for finding in findings), findings[0]
    return time.perf_counter() - started


async def compare(rounds: int) -> None:
    """Alternate rounds with and without confinement, and print the fastest of each.

    Slower rounds measure other load on the machine; timeit also takes the fastest.
    """
    rewards = [parse_text(verifier) for verifier in WORK]
    with Sandbox(1, 20.0, rewards, program=PROGRAMS[0]) as free, Sandbox(1, 20.0, rewards) as confined:
        for sandbox in (free, confined):
            print("confinement gaps:", *await sandbox.start() or ["none"])
        print(f"{'verifier':14} {'unconfined/s':>13} {'confined/s':>11} {'ratio':>6}")
        for verifier, (count, _, _) in WORK.items():
            pairs = [(await seconds(free, verifier), await seconds(confined, verifier)) for _ in range(rounds)]
            without, within = (count / min(times) for times in zip(*pairs, strict=True))
            print(f"{verifier:14} {without:13.0f} {within:11.0f} {within / without:6.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verifier.confinement", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="of each verifier, with and without confinement")
    asyncio.run(compare(parser.parse_args().rounds))
