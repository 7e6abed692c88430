"""Owns the responses that a run has trained, from its archive: their texts, their prompts and the verdicts of then.

Must not judge. What is read is exact or left out: a text is decoded as the rollout service did, and a prompt counts
only if its tokens are those of the archive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from learner.archive import FACTS, ArchiveError, RunArchive, RunFacts
from learner.recovery.replay import open_run
from rollout.prompts import ChatTokenizer, PromptError
from services.contracts import BatchSample, Fence, Outcome, Prompt
from services.sampler.data import RowRewards, read_sources
from services.settings import Recipe
from services.storage.kept_files import read_kept_files
from services.storage.models import local_model, models_folder
from services.streams.delivery.payloads import SamplePayload

NOT_ARCHIVED, NO_PROMPT, OTHER_PROMPT = (
    "the archive has no tokens of it",
    "the recipe's data no longer has its prompt",
    "the recipe's data has another prompt in its place",
)


@dataclass(frozen=True)
class TrainedSample:
    """A trained response with the verdict of then. `tokens`: of the response; `reward`: punishment included."""

    step: int
    group: str
    index: int
    prompt: Prompt
    text: str
    tokens: int
    outcome: Outcome
    reward: float


@dataclass
class TrainedSamples:
    """The trained responses of a run, step by step. `left_out`: those that cannot be judged again, by cause."""

    archive: RunArchive
    facts: RunFacts
    prompts: Mapping[str, Prompt]
    tokenizer: ChatTokenizer
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def steps(self) -> dict[int, Fence]:
        """The rollout steps whose batches are archived, ascending, with the learner that trained each."""
        return self.archive.trained()

    def of_step(self, step: int, fence: Fence) -> Iterator[TrainedSample]:
        """The responses of a step in the order of its batch. Raises ArchiveError, StoreError."""
        batch = self.archive.batch(step, fence)
        payloads = self._payloads(step, fence)
        for group in batch.groups:
            prompt = self.prompts.get(group.prompt)
            ids = self._prompt_ids(prompt) if prompt else None
            for index, sample in enumerate(group.samples):
                payload = payloads.get(sample.payload)
                if payload is None:
                    self.left_out[NOT_ARCHIVED] += 1
                elif prompt is None:
                    self.left_out[NO_PROMPT] += 1
                elif ids is None or not np.array_equal(ids, payload.prompt_ids):
                    self.left_out[OTHER_PROMPT] += 1
                else:
                    text, known = self.tokenizer.text(payload.response_ids), outcome_of(sample)
                    yield TrainedSample(step, group.group, index, prompt, text, sample.tokens, known, sample.reward)

    def _payloads(self, step: int, fence: Fence) -> dict[str, SamplePayload]:
        self.archive.fetch_shares(step, fence)
        ranks = _ranks(self.archive.share_path(step, 0, fence))
        return {key: payload for rank in ranks for key, payload in self.archive.share(step, rank, fence).items()}

    def _prompt_ids(self, prompt: Prompt) -> NDArray[np.int32] | None:
        """The tokens of a prompt, int32 [P]; None for one that the run would have refused."""
        try:
            return self.tokenizer.prompt_ids(prompt)
        except PromptError:
            return None


def _ranks(first: Path) -> list[int]:
    """The ranks whose payloads of a step are on this node, ascending; `first`: the path of rank 0's."""
    start, end = first.name.split("-0.", 1)
    names = (path.name for path in first.parent.glob(f"{start}-*.{end}"))
    return sorted(int(name.removeprefix(f"{start}-").removesuffix(f".{end}")) for name in names)


def outcome_of(sample: BatchSample) -> Outcome:
    """The outcome of a trained response: an unknown one is masked, and has neither reward nor advantage."""
    if sample.correct:
        return Outcome.CORRECT
    return Outcome.UNKNOWN if sample.masked and sample.reward == sample.advantage == 0 else Outcome.WRONG


def trained_samples(runs: Path, run: str) -> TrainedSamples:
    """The trained responses of a run, whose folder is below `runs` or in the store.

    Raises ArchiveError, ReplayError, StoreError, DataError, ReferenceTrialError, ValueError.
    """
    folder, mirror = open_run(runs, run)
    if not (folder / FACTS).is_file():
        raise ArchiveError(f"RUN: {run!r} is not valid: expected a run with an archive in {folder.parent}")
    archive = RunArchive(folder, mirror)
    facts = archive.facts()
    recipe = facts.recipe
    model = str(local_model(facts.model_path, models_folder()))
    files = read_kept_files(folder, mirror)
    tokenizer = ChatTokenizer(model, recipe.max_prompt_tokens, recipe.model.chat_template, files)
    return TrainedSamples(archive, facts, _prompts(recipe), tokenizer)


def _prompts(recipe: Recipe) -> dict[str, Prompt]:
    """The prompts of a recipe's data by id, read as the run's sampler did, which has looked for their functions."""
    found = read_sources(recipe.data, recipe.evaluation.sets, RowRewards.of(recipe, {})).settled().data
    assert found is not None, "the run's own data was asked for"
    return {prompt.id: prompt for prompt in found.prompts}
