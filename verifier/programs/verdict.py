"""Owns the verdict on a program: `judge` runs its tests in a jail and gives the share that passed.

Must not run anything of a response or a record in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from verifier.programs.extraction import NoProgramError, digest, extracted
from verifier.programs.isolation import Isolation, IsolationChoice, IsolationError, find_isolation
from verifier.programs.jail import Jail, JailError
from verifier.programs.limits import ProgramLimits
from verifier.programs.records.readers import task_of
from verifier.programs.records.tasks import ProgramTask, ProgramTest, TestOutcome, UnusableTestError
from verifier.verifiers.base import Judgement, UndecidedError

__all__ = ["Isolation", "IsolationChoice", "IsolationError", "check_reference", "find_isolation", "judge"]

REASON_CHARACTERS = 300
SPENT = ("cpu", "wall")
"""Limits of all tests together: once one is reached, no further test runs."""


async def judge(
    text: str, reference: Mapping[str, Any], options: Mapping[str, Any], limits: ProgramLimits
) -> Judgement:
    """Run a response's program against the tests of a record (verifier.programs.records.readers); correct iff all pass.

    The score is the share of tests passed, or with the option `partial: false` 0 or 1. Several can run at once: each
    has its own jail, of which nothing is left when this returns, raises or is cancelled. Takes at most `limits.wall_s`
    and half a minute. Raises ValueError for an unusable reference or option, UndecidedError when no jail can be had.
    """
    partial = _partial(options)
    task = task_of(reference)
    try:
        program = extracted(text)
    except NoProgramError as error:
        return Judgement(correct=False, score=0.0, reason=str(error)[:REASON_CHARACTERS])
    try:
        choice = await asyncio.to_thread(find_isolation)
        outcomes = await _outcomes(choice, task, task.program(program), limits, all_tests=partial)
    except (IsolationError, JailError) as error:
        raise UndecidedError(str(error)[:REASON_CHARACTERS]) from None
    except UnusableTestError as error:
        raise ValueError(f"reference: a test that does this is not valid: {error}: expected plain data") from None
    passed = sum(outcome.passed for outcome in outcomes)
    correct = passed == task.count
    score = passed / task.count if partial else float(correct)
    return Judgement(correct, score, digest(program), _reason(outcomes, passed, task.count))


def check_reference(reference: Mapping[str, Any]) -> None:
    """Raise ValueError, which names the field, its value and what is accepted, for a record that cannot be used."""
    task_of(reference)


def _partial(options: Mapping[str, Any]) -> bool:
    known = {"partial", *(field.name for field in fields(ProgramLimits))}
    for name in options:
        if name not in known:
            raise ValueError(f"option: {name!r} is not valid: expected {', '.join(sorted(known))}")
    partial = options.get("partial", True)
    if not isinstance(partial, bool):
        raise ValueError(f"partial: {partial!r} is not valid: expected true or false")
    return partial


async def _outcomes(
    choice: IsolationChoice, task: ProgramTask, program: str, limits: ProgramLimits, all_tests: bool
) -> list[TestOutcome]:
    """The outcomes in turn, up to the first failure unless all are wanted."""
    found: list[TestOutcome] = []
    async with Jail(choice, program, task.before, limits) as jail:
        for test in task.tests:
            frame = await jail.run(test.case(), test.unseen())
            found += _read(test, frame, limits)
            if frame["limit"] in SPENT or not (all_tests or all(outcome.passed for outcome in found)):
                break
    return found


def _read(test: ProgramTest, frame: Mapping[str, Any], limits: ProgramLimits) -> list[TestOutcome]:
    if not frame["limit"]:
        return test.outcomes(frame)
    exceeded = {
        "cpu": f"{limits.cpu_s:g} s of CPU time",
        "wall": f"{limits.wall_s:g} s",
        "memory": f"{limits.memory_mib} MiB of memory",
        "processes": f"{limits.processes} processes",
        "output": f"{limits.output_kib} KiB of output",
        "tmp": f"{limits.tmp_mib} MiB of files",
    }
    return [TestOutcome(False, f"exceeded {exceeded[frame['limit']]}")] * test.count


def _reason(outcomes: list[TestOutcome], passed: int, count: int) -> str:
    first = next((number for number, outcome in enumerate(outcomes, 1) if not outcome.passed), None)
    summary = f"{passed} of {count} tests passed"
    if first is None:
        return summary
    why = outcomes[first - 1].why or "the assertion is false"
    return f"{summary}; first failure: test {first}: {why}"[:REASON_CHARACTERS]
