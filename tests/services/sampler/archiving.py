"""Owns an evaluation beside which its groups are archived, as the sampler's process does.

Must not be used outside tests.
"""

from __future__ import annotations

from services.process.hosting import Context
from services.sampler.archive.archivist import Archivist
from services.sampler.evaluation.evaluator import Evaluator, HeldOut
from services.sampler.watches.memory import RedisMemory
from services.streams.state.group_state import GroupTransitions
from tests.harness.hand_fleet import running


async def evaluate(
    context: Context,
    transitions: GroupTransitions,
    sets: tuple[HeldOut, ...],
    memory: RedisMemory | None = None,
    name: str = "before",
    **others: bool,
) -> bool:
    """Evaluate; False if stopped. `others`: of Evaluator.run."""
    memory = memory or RedisMemory(context)
    archivist = Archivist(context, memory)
    archivist.open(transitions)
    async with running(archivist.run()):
        return await Evaluator(context, transitions, sets, memory, archivist.drain).run(name, **others)
