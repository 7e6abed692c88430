"""Owns the trial load of a recipe's confined functions, and of those that rows name: does each load as in a run?

Must not judge; nor load a function in this process: the sandbox does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from itertools import chain

from deploy.cli.judging.local_judging import LocalJudgingError, local_judges
from services.sampler.data import ReadSources
from services.sampler.data.gathering import Gathered
from services.sampler.data.rows import RowPlace
from services.settings import Recipe
from services.settings.faults import invalid
from services.settings.rewards.confined import confined_functions
from services.settings.rewards.reward import Reward, parse_text
from verifier.sandbox.pool import default_processes

Use = tuple[str | RowPlace, Reward]
"""A single reward behind the setting, or the row, that names it."""

IN_LAYOUT = "verifier"
"""The field of a row's reward in the layout that does not map it."""


def load_faults(recipe: Recipe, sources: ReadSources, files: Mapping[str, str]) -> list[str]:
    """The functions that cannot be loaded on this machine, one line each: the setting or the row, and why.

    `files`: the user's, texts by name. Blocks while each function is loaded in a sandbox of its own.
    """
    used: dict[str, Use] = {}
    for where, single in chain(_in_recipe(recipe), *map(_in_rows, sources.all)):
        used.setdefault(single.text, (where, single))
    singles = [single for _, single in used.values()]
    causes = asyncio.run(_causes(singles, files, recipe.verifier.timeout_s))
    return [_fault(where, single.text, causes[single.text]) for where, single in used.values() if causes[single.text]]


def _in_recipe(recipe: Recipe) -> Iterator[Use]:
    stated = recipe.stated_rewards.items()
    return ((setting, single) for setting, reward in stated for single in confined_functions([reward]))


def _in_rows(source: Gathered) -> Iterator[Use]:
    """The functions that rewards of rows use, each with the place of the first row's reward."""
    seen = set[str]()
    for rows in (rows for known in source.questions.values() for rows in known.values()):
        if rows.item.place is not None and rows.item.verifier not in seen:
            seen.add(rows.item.verifier)
            place = rows.item.place._replace(field=source.source.fields.verifier or IN_LAYOUT)
            yield from ((place, single) for single in confined_functions([parse_text(rows.item.verifier)]))


async def _causes(singles: list[Reward], files: Mapping[str, str], timeout_s: float) -> dict[str, str]:
    """Why each function cannot be loaded, by its reward's text; "" if it can."""
    at_once = asyncio.Semaphore(default_processes())

    async def cause(single: Reward) -> str:
        async with at_once:
            try:
                async with local_judges([single], files, timeout_s=timeout_s, processes=1):
                    return ""
            except LocalJudgingError as error:
                return str(error)

    return dict(zip((each.text for each in singles), await asyncio.gather(*map(cause, singles)), strict=True))


def _fault(where: str | RowPlace, text: str, cause: str) -> str:
    expected = f"a function that can be loaded here ({cause.rpartition(f'{text}: ')[2]})"
    if isinstance(where, str):
        return invalid(where, text, expected)
    return str(where.fault(f"{text!r} is not valid: expected {expected}"))
