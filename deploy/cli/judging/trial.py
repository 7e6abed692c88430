"""Owns `penstock reward try`: a reward judges the rows of a file, and a table shows what it makes of each.

Must not judge; deploy.cli.judging.local_judging does.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import aclosing
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from deploy.cli.common import reported_errors
from penstock_client.cli.reporting import EXIT_FAILED, fail
from penstock_client.cli.terminal import cell, console, plain, print_line

if TYPE_CHECKING:
    from deploy.cli.judging.local_judging import Asked, JudgedHere
    from deploy.cli.judging.verify_input import VerifyRows
    from services.sampler.data.rows import Row
    from services.settings import Recipe
    from verifier.judging import JudgedText

QUESTIONS = ("prompt", "question", "messages")
ARGUMENT = "REWARD"
IN_FILE = re.compile(r"(?P<file>[^{\[\s][^{\[]*\.py):(?P<function>\w+)")
WITHOUT_FUNCTION = re.compile(r"[^{\[\s][^{\[:]*\.py:?")
ANSWERED = {"math": "Answer: {}", "answer-line": "Answer: {}"}
"""How an answer is written as a response, by the kind of reward that needs more than the answer itself."""
OWN, OTHER = "its own answer", "the next answer"


class Tried(NamedTuple):
    """A response of a row: its number, and what stands for the response if the row has none."""

    row: int
    response: str


def try_reward(
    reward: Annotated[
        str, typer.Argument(metavar=ARGUMENT, help="FILE:FUNCTION, or any reward as a recipe writes it.")
    ],
    data: Annotated[Path, typer.Option("--data", help="JSON lines with question, answer and, if any, response.")],
    rows: Annotated[int, typer.Option("--rows", min=1, max=10_000, help="Judge the first N rows.")] = 20,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="CPU seconds of one judgement.")] = 10.0,
) -> None:
    """Judge rows by a reward, confined as in a run: outcome, score, reason and time of each; exit status 1 if unknown.

    A row without a response is judged twice: with its own answer as the response, and with that of the next row.
    """
    from deploy.cli.judging.local_judging import LocalJudgingError
    from services.sampler.data import DataError

    try:
        with reported_errors():
            recipe, files = _reward_in(reward)
            asked = list(islice(_asked(recipe, files, data), 2 * rows))
            if not asked:
                fail(f"--data: {str(data)!r} is not valid: expected at least one row")
            judged = asyncio.run(_judged(recipe, files, asked, timeout))
    except (DataError, LocalJudgingError) as error:
        fail(str(error))
    _show(judged)
    if any(found.finding.outcome.value == "unknown" for found in judged):
        raise typer.Exit(EXIT_FAILED)


def _reward_in(text: str) -> tuple[Recipe, dict[str, str]]:
    """The reward with its files. A file may be anywhere: its folder is that of the recipe. Raises RecipeError."""
    from deploy.cli.judging.rewards_here import NO_RUN, with_reward
    from services.settings import RecipeError
    from services.settings.faults import invalid

    given = text.removeprefix("python:")
    if WITHOUT_FUNCTION.fullmatch(given):
        raise RecipeError(invalid(ARGUMENT, text, "FILE:FUNCTION, such as rewards.py:score"))
    if named := IN_FILE.fullmatch(given):
        path = Path(named["file"])
        return with_reward(NO_RUN, f"python:./{path.name}:{named['function']}", path.parent, ARGUMENT)
    return with_reward(NO_RUN, text, Path.cwd(), ARGUMENT)


def _asked(recipe: Recipe, files: dict[str, str], data: Path) -> Iterator[Asked[Tried]]:
    """The responses to judge, in the order of the rows. Raises DataError."""
    from deploy.cli.judging.local_judging import Asked
    from deploy.cli.judging.verify_input import VerifyRows, rows_of
    from services.sampler.data import DataError

    reader = VerifyRows(recipe, files)
    kinds = [single.kind for reward in recipe.rewards for single in reward.singles]
    written = next((ANSWERED[kind] for kind in kinds if kind in ANSWERED), "{}")
    try:
        with data.open("rb") as file:
            for row, following in pairwise(chain(rows_of(file, str(data)), [None])):
                assert row is not None, "only the last of all is"
                for tried, given in _responses(row, following):
                    response = given if not tried.response else written.format(given)
                    yield Asked(tried, _read(reader, row, response))
    except OSError as error:
        raise DataError(f"--data: {str(data)!r} cannot be read: {error.strerror}") from None


def _responses(row: Row, following: Row | None) -> Iterable[tuple[Tried, str]]:
    given = row.find("response")
    if given is not None:
        return [(Tried(row.number, ""), given)]
    own = [(Tried(row.number, OWN), str(row.get("answer")))]
    other = following and following.find("answer")
    return own if other in (None, row.get("answer")) else [*own, (Tried(row.number, OTHER), str(other))]


def _read(reader: VerifyRows, row: Row, response: str) -> JudgedText:
    """The text of a row under the names that `penstock verify` reads."""
    question = next((row.find(name) for name in QUESTIONS if row.find(name) is not None), None)
    values = {**row.values, "response": response} | ({} if question is None else {"prompt": question})
    return reader.read(type(row)(row.file, row.number, values))[1]


async def _judged(
    recipe: Recipe, files: dict[str, str], asked: list[Asked[Tried]], timeout_s: float
) -> list[JudgedHere[Tried]]:
    from deploy.cli.judging.local_judging import local_judges

    async with local_judges(recipe.rewards, files, timeout_s=timeout_s) as here:
        for gap in here.gaps:
            print_line(f"warning: judged texts are not fully confined: {plain(gap)}")
        async with aclosing(here.judge(asked, together=1)) as judging:
            return [found async for found in judging]


def _show(judged: list[JudgedHere[Tried]]) -> None:
    from rich import box
    from rich.table import Table

    stood_in = any(found.of.response for found in judged)
    table = Table("row", *(["response"] if stood_in else []), "outcome", "score", "ms", "reason", box=box.SIMPLE)
    for found in judged:
        finding, response = found.finding, [cell(found.of.response or "its own")] if stood_in else []
        texts = (finding.outcome.value, f"{finding.score:g}", f"{found.seconds * 1000:.0f}", finding.reason)
        table.add_row(str(found.of.row), *response, *map(cell, texts))
    console().print(table)
    counts = Counter(found.finding.outcome.value for found in judged)
    outcomes = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("correct", "wrong", "unknown"))
    print_line(f"{len(judged)} responses: {outcomes}")
