r"""Owns the speed of the verifier `math`: verdicts per second of CPU time of one core, against math-verify alone.

Each set has up to 100 problems. With --data FOLDER they are the answers of math500.jsonl and gsm8k_test.jsonl, those of
the two that are there; without, generated ones: formulas (fractions, roots, polynomials, intervals, sets) and whole
numbers. Each problem gets 16 responses of 2,240 characters, whose last words give the answer in a box, right for one
problem and that of the next problem for the other, in turns. Three programs judge all of them, in each repeat one after
the other, after a first verdict that loads their libraries:

  math          the verifier in this process, as a judging process runs it: no pipe, no confinement
  sandboxed     the whole sandbox: CPU time of this process and of all below it, confined, 64 texts at a time
  math-verify   `parse` and `verify` of the library on the last 2,000 characters of each response, without its alarms

A rate is verdicts / CPU seconds (user and system), so it is that of one core that does nothing else. The ratios compare
rates of the same repeat. Target: neither the verifier nor the sandbox with all that it adds is slower than the library
alone (ratio at least 1). Correct verdicts are counted beside, because a program that finds nothing would be fast.

Must not count the import of a library or the start of a process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.report.figures import Figure, Target, ratio
from benchmarks.report.picture import Panel, Series
from benchmarks.report.report import Report, options
from benchmarks.verifier.cost import cpu_seconds, judged
from benchmarks.verifier.texts import MATH, formulas, words
from benchmarks.verifier.verdicts.golds import golds, verdict
from verifier.sandbox.pool import Sandbox
from verifier.verifiers.base import Candidate

NAME = "verdicts"
FILES = ("math500.jsonl", "gsm8k_test.jsonl")
RESPONSES = 16  # of each prompt
STEPS = "We compute it step by step, so that the sum is larger. " * 40
PROBLEMS = 100
NOT_SLOWER = Target(least=1.0)
PROGRAMS = ("math", "sandboxed", "math-verify")

Work = list[tuple[str, str]]
"""Responses, each with the reference answer."""


def _alone(response: str, gold: str) -> str:
    """math-verify on the end of a response, as the verifier called it before it read answers itself."""
    from math_verify import parse, verify

    expected = parse(f"${gold}$", parsing_timeout=None)
    found = parse(response[-2000:], parsing_timeout=None)
    return "correct" if verify(expected, found, timeout_seconds=None) else "wrong"


def work_on(answers: Sequence[str]) -> Work:
    """RESPONSES responses to each problem, by its answer; those to every other problem are wrong."""
    return [
        (rf"{STEPS}So \boxed{{{gold if number % 2 else other}}}.", gold)
        for gold, other in zip(answers, [*answers[1:], *answers[:1]], strict=True)
        for number in range(RESPONSES)
    ]


def _warm() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about each call without an alarm
    for judge in (verdict, _alone):
        judge(r"\boxed{\sqrt{x}}", r"\sqrt{y}")


def _rate(judge: Callable[[str, str], str], work: Work) -> tuple[float, int]:
    """Verdicts per CPU second, and how many are correct."""
    started = time.process_time()
    found = [judge(response, gold) for response, gold in work]
    return len(work) / (time.process_time() - started), found.count("correct")


async def _sandboxed(sandbox: Sandbox, work: Work) -> tuple[float, int]:
    started = cpu_seconds()
    correct = await judged(sandbox, [(MATH, Candidate(text, {"answer": gold})) for text, gold in work])
    return len(work) / (cpu_seconds() - started), correct


async def measure(sets: Mapping[str, Work], repeats: int) -> dict[str, dict[str, list[tuple[float, int]]]]:
    """By set and program, and per repeat: verdicts per CPU second, and how many are correct."""
    _warm()
    found: dict[str, dict[str, list[tuple[float, int]]]] = {name: {each: [] for each in PROGRAMS} for name in sets}
    with Sandbox(1, 10.0, [MATH]) as sandbox:
        await sandbox.start()
        for name, work in sets.items():
            await _sandboxed(sandbox, work[:64])
            for _ in range(repeats):
                found[name]["math"].append(_rate(verdict, work))
                found[name]["sandboxed"].append(await _sandboxed(sandbox, work))
                found[name]["math-verify"].append(_rate(_alone, work))
    return found


def sets_of(data: Path | None, problems: int) -> dict[str, Work]:
    """The sets by name. Raises ValueError if none of FILES is in the folder `data`."""
    if data is None:
        made = {"formulas": formulas(problems), "numbers": words(problems)}
        answers = {name: [str(each.reference["answer"]) for _, each in texts] for name, texts in made.items()}
    else:
        answers = {path.stem: golds(path) for name in FILES if (path := data / name).exists()}
        if not answers:
            raise ValueError(f"--data: {data} has none of {', '.join(FILES)}")
    return {name: work_on(found[:problems]) for name, found in answers.items()}


def report(found: Mapping[str, Mapping[str, Sequence[tuple[float, int]]]]) -> Report:
    """The result of `measure`."""
    figures, series = [], []
    for name, programs in found.items():
        rates = {program: [rate for rate, _ in repeats] for program, repeats in programs.items()}
        figures += [
            ratio(f"{program} / math-verify, {name}", rates[program], rates["math-verify"], NOT_SLOWER)
            for program in ("math", "sandboxed")
        ]
        figures += [Figure(f"{each}, {name}", tuple(values), "verdicts/CPU s") for each, values in rates.items()]
        repeats = tuple(map(float, range(1, 1 + len(rates["math"]))))
        series += [Series(f"{each}, {name}", repeats, tuple(values)) for each, values in rates.items()]
    correct = {
        name: {program: sorted({count for _, count in repeats}) for program, repeats in programs.items()}
        for name, programs in found.items()
    }
    notes = [
        f"{name}: correct verdicts: " + ", ".join(f"{program} {counts}" for program, counts in programs.items())
        for name, programs in correct.items()
    ]
    panel = Panel("verdicts per CPU second", "repeat", "1/s", tuple(series), log="y")
    return Report(NAME, figures, [panel], {"correct": correct}, notes)


def main(arguments: Sequence[str]) -> int:
    """`penstock bench verdicts`; the exit status."""
    parser = options(NAME, __doc__)
    parser.add_argument("--data", type=Path, help=f"folder with {' or '.join(FILES)}; default: generated problems")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help=f"of each set ({PROBLEMS})")
    given = parser.parse_args(arguments)
    try:
        sets = sets_of(given.data, given.problems)
    except ValueError as error:
        parser.error(str(error))
    return report(asyncio.run(measure(sets, given.repeats))).finish(given.out)


def table(path: Path) -> Iterator[str]:
    """Lines of the table on one file's golds: half of the responses are correct."""
    _warm()
    work = work_on(golds(path)[:PROBLEMS])
    (ours, _), (theirs, _) = _rate(verdict, work), _rate(_alone, work)
    yield f"{path.stem}: {ours:.0f} verdicts per CPU second; math-verify alone {theirs:.0f}; ratio {ours / theirs:.1f}"
