"""Owns how many confined rewards a run may have: each verifier holds all of them loaded, one process for each.

Must not load one; the verifier's sandbox does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from services.settings.faults import invalid
from services.settings.rewards.kinds import PythonReward
from services.settings.rewards.reward import Reward

BUILT_IN = ("answer-line", "math", "pattern", "reasoning-gym")
"""The rewards that every row may use, because they run no code and send no request of the row's choice."""

MOST_CONFINED = 32
"""How many confined rewards a verifier holds loaded: those of BUILT_IN, and functions without `needs`."""
MOST_FUNCTIONS = MOST_CONFINED - len(BUILT_IN)
"""How many different functions without `needs` a run may have: those of its recipe, and those that its rows name."""
MOST_ROW_FUNCTIONS = 24
"""How many of them only rows may name."""


def confined_functions(rewards: Iterable[Reward]) -> Iterator[Reward]:
    """The single rewards that are functions without `needs`."""
    for reward in rewards:
        for single in reward.singles:
            if isinstance(single.options, PythonReward) and not single.options.needs:
                yield single


def function_faults(stated: Mapping[str, Reward]) -> list[str]:
    """What is wrong with the number of a recipe's functions, in one line. `stated`: its rewards, by setting."""
    found: dict[str, str] = {}
    for setting, reward in stated.items():
        for single in confined_functions([reward]):
            found.setdefault(single.text, setting)
    if len(found) <= MOST_FUNCTIONS:
        return []
    text, setting = list(found.items())[MOST_FUNCTIONS]
    expected = f"at most {MOST_FUNCTIONS} different functions without `needs` in a recipe, which has {len(found)}"
    return [invalid(setting, text, expected)]
