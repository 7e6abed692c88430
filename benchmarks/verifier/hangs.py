"""Owns what texts that hang cost the others.

Must not wait for the end of a hang.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing

from benchmarks.verifier.texts import HANG, PATTERN, formulas, words
from services.settings import parse_recipe
from services.settings.rewards.reward import Reward
from tests.harness.small_run import recipe_document
from verifier.sandbox.pool import Sandbox, default_processes
from verifier.verifiers.base import Candidate

PROCESSES = default_processes()
TIMEOUT_S = parse_recipe(recipe_document("/none")).verifier.timeout_s
"""The default of recipes."""

Text = tuple[Reward, Candidate]


async def seconds(texts: Sequence[Text]) -> float:
    """The time until all texts but the hangs have their findings, from warm processes on."""
    healthy = sum(text is not HANG for text in texts)
    with Sandbox(PROCESSES, TIMEOUT_S, [texts[1][0], PATTERN]) as sandbox:
        await sandbox.start()
        warm = [text for text in texts if text is not HANG][: 32 * PROCESSES]
        async with aclosing(sandbox.judge_all(warm)) as judging:
            async for _ in judging:
                pass
        started = time.perf_counter()
        async with aclosing(sandbox.judge_all(texts)) as judging:
            async for findings in judging:
                healthy -= sum(texts[place] is not HANG for place, _ in findings)
                if not healthy:
                    return time.perf_counter() - started
    raise AssertionError("a healthy text has no finding")


async def one_among_64() -> None:
    """Print the time of the other 63 texts with and without a hang."""
    texts = words(64)
    without = await seconds(texts[1:])
    within = await seconds([*texts[:20], HANG, *texts[21:]])
    print(f"one hang among 64 texts: the other 63 take {within:.2f} s, without the hang {without:.2f} s")


async def one_in_a_hundred(count: int) -> None:
    """Print the throughput of healthy texts with 1 % hangs and without."""
    for name, made in (("like GSM8K", words), ("like MATH", formulas)):
        texts: list[Text] = list(made(count))
        without = count / await seconds(texts)
        for place in range(50, count, 100):
            texts[place] = HANG
        within = count * 0.99 / await seconds(texts)
        print(f"1 % hangs, {name}: {within:.0f} texts/s, without {without:.0f}, ratio {within / without:.2f}")
