"""Owns `penstock verify`: responses in, verdicts with reasons out, and a confusion table of labelled ones.

Must not judge; deploy.cli.judging.local_judging does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from deploy.cli.common import reported_errors
from deploy.cli.judging.options import OutputOption, ProcessesOption, TimeoutOption
from deploy.cli.judging.progress import shown_count
from penstock_client.cli.reporting import EXIT_FAILED, EXIT_INTERRUPTED, fail
from penstock_client.cli.terminal import plain

if TYPE_CHECKING:
    from deploy.cli.judging.confusion import ConfusionTable
    from deploy.cli.judging.local_judging import Asked, JudgedHere, LocalJudges
    from deploy.cli.judging.verify_input import Labelled, VerifyRows
    from services.sampler.data.rows import Row
    from services.settings import Recipe

STANDARD_INPUT = "-"

VerifierOption = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        metavar="REWARD",
        help="The reward of rows that name none, as a recipe writes it, such as math or python:./rewards.py:score, "
        "with files of this folder or beside the recipe; default: the recipe's, else math.",
    ),
]
RewardRecipeOption = Annotated[
    Path | None,
    typer.Option("--recipe", help="Take the reward, named rewards and their files from this recipe."),
]


def verify(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON lines; - for standard input.")] = STANDARD_INPUT,
    verifier: VerifierOption = None,
    recipe: RewardRecipeOption = None,
    processes: ProcessesOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    """Judge responses: one JSON line {response, answer} in, one line with the outcome and its reason out.

    A line may also have reference (in place of answer), verifier, prompt, metadata, id, and correct: with such labels,
    a confusion table is printed on standard error. A reference that cannot be read is unknown; a line that is not valid
    is an error, before anything is judged unless it comes from standard input.
    """
    from deploy.cli.judging.confusion import ConfusionTable
    from deploy.cli.judging.local_judging import LocalJudgingError
    from deploy.cli.judging.rewards_here import rewards_here
    from deploy.cli.judging.verify_input import VerifyRows
    from services.sampler.data import DataError

    try:
        with reported_errors():
            loaded, files = rewards_here(verifier, recipe)
            rows = VerifyRows(loaded, files)
            table = ConfusionTable()
            with _source(file, rows) as source, _target(output) as target:
                judges = _judges(loaded, files, timeout, processes)
                asyncio.run(_judge_all(judges, map(_asked(rows), source), target, table))
            if table.labelled:
                print("\n".join(map(plain, table.lines())), file=sys.stderr)
    except BrokenPipeError:  # the reader of the lines has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILED) from None
    except (DataError, LocalJudgingError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


@contextmanager
def _source(file: str, rows: VerifyRows) -> Iterator[Iterator[Row]]:
    """The rows to judge; those of a file that can be read twice are all valid."""
    from deploy.cli.judging.verify_input import rows_of

    if file == STANDARD_INPUT:
        yield rows_of(sys.stdin.buffer, "standard input")
        return
    with Path(file).open("rb") as source:
        if source.seekable():
            for row in rows_of(source, file):
                rows.read(row)
            source.seek(0)
        yield rows_of(source, file)


def _asked(rows: VerifyRows) -> Callable[[Row], Asked[Labelled]]:
    from deploy.cli.judging.local_judging import Asked

    return lambda row: Asked(*rows.read(row))


def _judges(
    recipe: Recipe, files: dict[str, str], timeout: float | None, processes: int | None
) -> AbstractAsyncContextManager[LocalJudges]:
    from deploy.cli.judging.local_judging import local_judges

    timeout_s = timeout or recipe.verifier.timeout_s
    return local_judges(recipe.rewards, files, timeout_s=timeout_s, processes=processes or recipe.verifier.processes)


@contextmanager
def _target(output: Path | None) -> Iterator[TextIO]:
    """Where the lines go: standard output, or a file that is there once it is whole."""
    from learner.archive.files import atomic_file

    if output is None:
        yield sys.stdout
        return
    with atomic_file(output) as partial, partial.open("w") as target:
        yield target


async def _judge_all(
    judges: AbstractAsyncContextManager[LocalJudges],
    asked: Iterable[Asked[Labelled]],
    target: TextIO,
    table: ConfusionTable,
) -> None:
    async with judges as here:
        for gap in here.gaps:
            print(f"penstock: warning: judged texts are not fully confined: {plain(gap)}", file=sys.stderr)
        with shown_count("judged", target) as judged:
            async with aclosing(here.judge(asked)) as judging:
                async for found in judging:
                    print(json.dumps(_line(found)), file=target, flush=target is sys.stdout)
                    judged()
                    if found.of.correct is not None:
                        table.add(found.of.where, found.of.correct, found.finding)


def _line(found: JudgedHere[Labelled]) -> dict[str, Any]:
    finding = found.finding
    line = found.of.place | {
        "outcome": finding.outcome.value,
        "score": finding.score,
        "answer": finding.answer,
        "reason": finding.reason,
    }
    return line | ({"rewards": finding.rewards} if finding.rewards else {})
