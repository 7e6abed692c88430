"""The benchmark's figures: right solutions pass, planted faults do not."""

import asyncio

import pytest

from benchmarks.verifier.programs.__main__ import verdict
from benchmarks.verifier.programs.records import RECORDS


async def shares(programs):
    at_once = asyncio.Semaphore(2)
    found = await asyncio.gather(*(verdict(record, program, at_once) for record, program in programs))
    return sum(each.correct for each in found) / len(found)


@pytest.mark.slow
async def test_right_solutions_pass_and_planted_faults_do_not(isolation):
    assert len(RECORDS) >= 40
    assert await shares([(each, each.solution) for each in RECORDS]) >= 0.99
    faulty = [(each, each.solution.replace(*fault, 1)) for each in RECORDS for fault in each.faults]
    assert await shares(faulty) <= 0.01
