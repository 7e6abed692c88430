"""Owns by which reward a run's responses are judged again, and what each of them needs for it.

Must not judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.cli.judging.rewards_here import NO_RUN, with_reward
from services.contracts import Prompt
from services.sampler.data import RowRewards
from services.sampler.data.row_rewards import RowReward
from services.settings import Recipe
from services.settings.rewards.reward import Reward, parse_text
from services.storage.kept_files import read_kept_files
from verifier.verifiers.base import Candidate

if TYPE_CHECKING:
    from learner.archive import RunArchive
    from verifier.judging import JudgedText


@dataclass(frozen=True)
class NewReward:
    """The reward to judge by, with its files. `other`: that of all prompts; None: each prompt's own."""

    recipe: Recipe
    files: Mapping[str, str]
    rewards: tuple[Reward, ...]
    other: RowReward | None

    def text(self, prompt: Prompt, response: str) -> JudgedText:
        """A response to a prompt, with the reference that the reward needs."""
        own, reference = prompt.verifier, prompt.reference
        if self.other is not None:
            own, reference = self.other.text, _reference(self.other, prompt.reference)
        return parse_text(own), Candidate(response, reference, prompt.messages, prompt.metadata)


def new_reward(recipe: Recipe, verifier: str | None, archive: RunArchive) -> NewReward:
    """The reward that --verifier names, or the run's own without it. Raises RecipeError, StoreError."""
    if verifier is None or verifier in recipe.verifier.rewards:
        files = read_kept_files(archive.folder, archive.mirror)
        if verifier is None:
            return NewReward(recipe, files, recipe.rewards, None)
        judged_by = recipe.data.model_copy(update={"verifier": verifier})
        other = RowRewards.of(recipe, files).of_source(judged_by, "data").own
        return NewReward(recipe, files, (parse_text(other.text),), other)
    here, files = with_reward(NO_RUN, verifier, Path.cwd())
    other = RowRewards.of(here, files).of_source(here.data, "data").own
    return NewReward(here, files, (parse_text(other.text),), other)


def _reference(reward: RowReward, known: Mapping[str, Any]) -> dict[str, Any]:
    """The reference of a prompt as another reward reads it: a bare answer has the name that this reward needs."""
    if len(known) != 1 or any(name in known for name in reward.needed):
        return dict(known)
    [answer] = known.values()
    number = isinstance(answer, int | float) and not isinstance(answer, bool)
    return {reward.bare: str(answer) if number and not reward.takes_any_answer else answer}
