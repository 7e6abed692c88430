"""Owns which prompt is drawn next: a table of strategies over the walk of the training prompts.

Must not do I/O, know what a group looks like, or decide how many are drawn.
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
"""How far below the best possible one a prompt's chance of a mixed group may be: for 16 samples, rates of 0.13 to 0.87.

Inside that band prompts are equals and keep the order of the walk, so that the band's middle is not favoured.
"""


@dataclass(frozen=True)
class Rule:
    """How `boundary` draws. `exploration`: the share of its draws, above 0, that go on with the uniform walk.

    `candidates`: how many prompts one draw looks at, at most.
    """

    group_size: int
    exploration: float = 0.1
    candidates: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.exploration <= 1:
            raise ValueError(f"exploration: {self.exploration} is not valid: expected more than 0 and at most 1")
        if self.candidates < 1:
            raise ValueError(f"candidates: {self.candidates} is not valid: expected 1 or more")

    def explores(self, draw: int) -> bool:
        """Whether the draw with this number, from 0, is an exploring one.

        They are spread evenly rather than at random: any n draws in a row hold the share of them, rounded down.
        """
        share = Fraction(str(self.exploration))
        return (draw + 1) * share // 1 > draw * share // 1


class Place(NamedTuple):
    """Where selection stands, beside the posteriors: together they decide every further draw.

    `cursor`: prompts that the uniform walk has passed; `scan`: those that `boundary` has passed in a walk of its own;
    `draws`: how often `boundary` has drawn.
    """

    cursor: int = 0
    scan: int = 0
    draws: int = 0


START = Place()


class Selection:
    """The training prompts, two walks over them, and what is known of each. Any strategy may draw at any time.

    The same seed, place, pass rates, dropped prompts and prompts under way always give the same draw.
    """

    def __init__(
        self, prompts: tuple[Prompt, ...], seed: int, rates: PassRates, rule: Rule, place: Place = START
    ) -> None:  # fmt: skip
        self.rates = rates
        self.rule = rule
        self.walk = PromptCursor(prompts, seed, place.cursor)
        self.scan = PromptCursor(prompts, f"{seed}:boundary", place.scan)
        self._seed = seed
        self._draws = place.draws

    @property
    def place(self) -> Place:
        """Enough for a successor to go on, with the pass rates and what was dropped."""
        return Place(self.walk.position, self.scan.position, self._draws)

    def next(self, strategy: str, version: int, under_way: Container[str]) -> Prompt:
        """The prompt that `strategy`, an entry of STRATEGIES, draws at policy `version`.

        `under_way`: ids of prompts that have a group which is not judged yet. Raises PromptsExhaustedError when every
        prompt was dropped.
        """
        return STRATEGIES[strategy].draw(self, version, under_way)

    def begin_draw(self) -> tuple[bool, random.Random]:
        """Count a draw of `boundary`: whether it explores, and its randomness."""
        draw = self._draws
        self._draws += 1
        return self.rule.explores(draw), random.Random(f"{self._seed}:draw:{draw}")

    def drop(self, prompt: str, cause: str) -> bool:
        """Never draw prompt id `prompt` again. False if it was dropped before or is no training prompt."""
        self.scan.drop(prompt, cause)
        return self.walk.drop(prompt, cause)


def uniform(selection: Selection, version: int, under_way: Container[str]) -> Prompt:
    """The next prompt of the walk: each once a pass, as the paper draws."""
    return selection.walk.next()


def boundary(selection: Selection, version: int, under_way: Container[str]) -> Prompt:
    """The next prompt, on a walk of its own, that is likely to give a mixed group; now and then the uniform walk's.

    Thompson sampling: a pass rate is drawn from the prompt's posterior, and the first prompt is taken whose rate comes
    within TOLERANCE of the best chance of a mixed group; after `candidates` of them, the best one seen. What is passed
    over waits for the next pass: no pass draws a prompt twice, and a draw costs at most `candidates` Beta variates (0.2
    ms for 64), however many prompts there are. Posterior sampling per prompt is MoPPS's (arXiv 2507.04632), passing
    over prompts by their history GRESO's (arXiv 2506.02177); prime-rl's DifficultyPoolSampler goes by the last reward.
    """
    explores, rng = selection.begin_draw()
    if explores:
        return _fresh(selection.walk, under_way)
    size = selection.rule.group_size
    wanted = (1.0 - TOLERANCE) * mixed(0.5, size)
    best: tuple[float, Prompt] | None = None
    for _ in range(selection.rule.candidates):
        prompt = selection.scan.next()
        if prompt.id in under_way:
            continue
        chance = mixed(selection.rates.of(prompt.id, version).draw(rng), size)
        if chance >= wanted:
            return prompt
        if best is None or chance > best[0]:
            best = chance, prompt
    return best[1] if best else _fresh(selection.walk, under_way)


def _fresh(walk: PromptCursor, under_way: Container[str]) -> Prompt:
    """The walk's next prompt that is not under way; its very next if all are."""
    end = walk.position + 2 * len(walk)  # so far, every prompt comes up, wherever in a pass it stands
    while walk.position < end:
        if (prompt := walk.next()).id not in under_way:
            return prompt
    return walk.next()


class Strategy(NamedTuple):
    """How prompts are drawn; `screens`: a few samples of a group are judged before the rest is generated."""

    draw: Callable[[Selection, int, Container[str]], Prompt]
    screens: bool


STRATEGIES: Mapping[str, Strategy] = {
    "uniform": Strategy(uniform, screens=False),
    "boundary": Strategy(boundary, screens=False),
    "screen": Strategy(uniform, screens=True),
}
"""By setting."""
