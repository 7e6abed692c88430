"""Owns `python -m benchmarks.verifier.programs`: the pass rates of right and of faulty programs.

Must not count anything but whole verdicts. Takes about half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from benchmarks.verifier.programs.records import RECORDS, PlantedRecord
from verifier.programs.limits import ProgramLimits
from verifier.programs.verdict import find_isolation, judge
from verifier.verifiers.base import Judgement


async def verdict(record: PlantedRecord, program: str, at_once: asyncio.Semaphore) -> Judgement:
    """The verdict on a response with that program."""
    async with at_once:
        response = f"```python\n{program}```\n"
        return await judge(response, {"test_list": list(record.tests)}, {}, ProgramLimits(cpu_s=2, wall_s=10))


async def measure(concurrent: int) -> None:
    """Judge every solution, and every solution with each of its faults, and print the shares that pass."""
    print(f"isolation: {find_isolation()}")
    at_once = asyncio.Semaphore(concurrent)
    right = [(record, record.solution) for record in RECORDS]
    faulty = [(each, each.solution.replace(*fault, 1)) for each in RECORDS for fault in each.faults]
    for name, programs in (("right solutions", right), ("planted faults", faulty)):
        started = time.perf_counter()
        found = await asyncio.gather(*(verdict(record, program, at_once) for record, program in programs))
        seconds = time.perf_counter() - started
        correct = sum(each.correct for each in found)
        share, score = correct / len(found), sum(each.score for each in found) / len(found)
        print(
            f"{name:16} {correct:4} of {len(found):4} correct ({share:.1%}), mean score {score:.2f}, "
            f"{len(found) / seconds:.1f} verdicts/s"
        )
        for (_, program), each in zip(programs, found, strict=True):
            if each.correct is (name == "planted faults"):
                print(f"  unexpected: {each.reason}\n{program}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verifier.programs", description=__doc__)
    parser.add_argument("--concurrent", type=int, default=2, help="programs that are judged at once")
    asyncio.run(measure(parser.parse_args().concurrent))
