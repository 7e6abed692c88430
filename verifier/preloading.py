"""Owns which rewards a replica loads before it is ready: the recipe's own, and those that rows of its data may name.

Must not load one; the sandbox does.
"""

from __future__ import annotations

import asyncio
import logging
import time

from services.process.hosting import Context
from services.settings import Recipe
from services.settings.rewards.confined import BUILT_IN
from services.settings.rewards.reward import Reward, parse_text
from services.streams.state.rewards.row_functions import read_row_functions
from verifier.judging import is_confined

log = logging.getLogger(__name__)

PERIOD_S = 0.5
"""How often it is looked whether the sampler has loaded the data."""


async def preloaded(context: Context) -> list[Reward]:
    """The confined single rewards of a run, those that its rows may name included.

    Which functions of `verifier.files` rows name is known once the sampler has loaded the data; this is waited for.
    """
    recipe = context.record.recipe
    found = [single for reward in recipe.rewards for single in reward.singles if is_confined(single)]
    if any(source.rows_name_verifiers for source in recipe.data_sources.values()):
        found += map(parse_text, BUILT_IN)
        if _has_functions(recipe):
            found += [single for single in map(parse_text, await _row_functions(context)) if is_confined(single)]
    return list({single.text: single for single in found}.values())


def _has_functions(recipe: Recipe) -> bool:
    """Whether rows may name functions that the recipe does not."""
    return any(name.endswith(".py") for name in recipe.verifier.files)


async def _row_functions(context: Context) -> tuple[str, ...]:
    """The functions that the rows name.

    None of them when the service is stopped first, or at the deadline: it is the sampler that is late, and a function
    that is not loaded is loaded when a text needs it.
    """
    patience_s = context.record.recipe.limits.startup_timeout_s
    ends = time.monotonic() + patience_s
    with context.waits.on("row-functions", "the sampler to load the data, whose rows name functions", patience_s):
        while not context.stopping.is_set():
            functions = await read_row_functions(context.redis, context.keys)
            if functions is not None:
                return functions
            if time.monotonic() > ends:
                log.warning(
                    "no data was loaded in %g s: functions that rows name are not loaded in advance", patience_s
                )
                break
            await asyncio.sleep(PERIOD_S)
    return ()
