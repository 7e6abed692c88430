"""Owns the choice of the next prompt: a table of strategies over the walk of the training prompts.

Must not do I/O, know the form of a group, or decide how many prompts are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from services.contracts import Prompt
from services.sampler.data import PromptCursor
from services.sampler.selection.posterior import PassRates, mixed

TOLERANCE = 0.1
"""How far a prompt's chance of a mixed group may be below the best possible chance, as a share of it.

For 16 samples this is a band of pass rates from 0.13 to 0.87. Prompts inside the band keep the order of the walk, so
that the middle of the band is not preferred.
"""


@dataclass(frozen=True)
class Rule:
    """How `boundary` draws. `exploration`: the share of its draws, above 0, that continue the uniform walk.

    `candidates`: the most prompts that one draw examines.
    """

    group_size: int
    exploration: float = 0.1
    candidates: int = 64

    def explores(self, draw: int) -> bool:
        """Whether the draw with this number, from 0, explores.

        Exploring draws are spread evenly, not at random: any n draws in a row contain at least n * `exploration` of
        them, rounded down.
        """
        share = Fraction(str(self.exploration))
        return (draw + 1) * share // 1 > draw * share // 1


class Place(NamedTuple):
    """The state of the selection, apart from the pass rates. Both together determine all further draws.

    `cursor`: position of the uniform walk; `scan`: position of the separate walk of `boundary`; `draws`: the number of
    draws by `boundary`.
    """

    cursor: int = 0
    scan: int = 0
    draws: int = 0


START = Place()


class Selection:
    """The training prompts, two walks over them, and their pass rates. Strategies may alternate.

    The same seed, place, pass rates, dropped prompts and prompts in flight always give the same draw.
    """

    def __init__(
        self, prompts: tuple[Prompt, ...], seed: int, rates: PassRates, rule: Rule, place: Place = START
    ) -> None:
        self.rates = rates
        self.rule = rule
        self.walk = PromptCursor(prompts, seed, place.cursor)
        self.scan = PromptCursor(prompts, f"{seed}:boundary", place.scan)
        self._seed = seed
        self._draws = place.draws

    @property
    def place(self) -> Place:
        """The state from which a successor continues, together with the pass rates and the dropped prompts."""
        return Place(self.walk.position, self.scan.position, self._draws)

    def next(self, strategy: str, step: int, in_flight: Container[str]) -> Prompt:
        """The prompt that `strategy`, an entry of STRATEGIES, draws for the policy of rollout step `step`.

        `in_flight`: ids of the prompts whose group is not judged yet. Raises PromptsExhaustedError if every prompt was
        dropped.
        """
        return STRATEGIES[strategy].draw(self, step, in_flight)

    def begin_draw(self) -> tuple[bool, random.Random]:
        """Count a draw of `boundary`. Returns whether it explores, and its random generator."""
        draw = self._draws
        self._draws += 1
        return self.rule.explores(draw), random.Random(f"{self._seed}:draw:{draw}")

    def drop(self, prompt: str, cause: str) -> bool:
        """Never draw prompt id `prompt` again. False if it was dropped before or is not a training prompt."""
        self.scan.drop(prompt, cause)
        return self.walk.drop(prompt, cause)


def uniform(selection: Selection, step: int, in_flight: Container[str]) -> Prompt:
    """The next prompt of the walk, which has each prompt once per epoch, as in the paper."""
    return selection.walk.next()


def boundary(selection: Selection, step: int, in_flight: Container[str]) -> Prompt:
    """The next prompt of a separate walk that is likely to give a mixed group; exploring draws use the uniform walk.

    Thompson sampling: each examined prompt draws a pass rate from its posterior. The first prompt whose chance of a
    mixed group is within TOLERANCE of the best possible chance is taken; after `candidates` prompts, the best one of
    them. Skipped prompts wait for the next epoch. So no epoch draws a prompt twice, and a draw costs at most
    `candidates` Beta variates (0.2 ms for 64), however many prompts there are. Posterior sampling per prompt is from
    MoPPS (arXiv 2507.04632), skipping prompts by their history from GRESO (arXiv 2506.02177). prime-rl's
    DifficultyPoolSampler uses the last reward instead.
    """
    explores, rng = selection.begin_draw()
    if explores:
        return _not_in_flight(selection.walk, in_flight)
    size = selection.rule.group_size
    wanted = (1.0 - TOLERANCE) * mixed(0.5, size)
    best: tuple[float, Prompt] | None = None
    for _ in range(selection.rule.candidates):
        prompt = selection.scan.next()
        if prompt.id in in_flight:
            continue
        chance = mixed(selection.rates.of(prompt.id, step).draw(rng), size)
        if chance >= wanted:
            return prompt
        if best is None or chance > best[0]:
            best = chance, prompt
    return best[1] if best else _not_in_flight(selection.walk, in_flight)


def _not_in_flight(walk: PromptCursor, in_flight: Container[str]) -> Prompt:
    """The next prompt of the walk that is not in flight; the very next one if all are."""
    end = walk.position + 2 * len(walk)  # two epochs contain every prompt, wherever the walk starts
    while walk.position < end:
        if (prompt := walk.next()).id not in in_flight:
            return prompt
    return walk.next()


class Strategy(NamedTuple):
    """How prompts are drawn. `screens`: whether a group's first samples are judged before the others are generated."""

    draw: Callable[[Selection, int, Container[str]], Prompt]
    screens: bool


STRATEGIES: Mapping[str, Strategy] = {
    "uniform": Strategy(uniform, screens=False),
    "boundary": Strategy(boundary, screens=False),
    "screen": Strategy(uniform, screens=True),
}
"""By setting."""
