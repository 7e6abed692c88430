"""Owns the settings of prompts: their source, how rows are read, which sets are evaluated.

Must not read a file.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from services.settings.base import Positive, Section
from services.settings.faults import invalid, shown
from services.settings.rewards.reward import RewardSetting

HELD_OUT = "held-out"
"""The name of the evaluation set that the run's own data provides."""


class FieldMapping(Section):
    """Which field of a row holds what; a dotted path goes into nested objects (`reward_model.ground_truth`).

    Either `question` (text) or `messages` (a chat) gives the prompt; `answer` becomes `{"answer": ...}`, the reference
    of `data.verifier`. Rows may name their own verifier in `verifier`, and hold a whole reference in `reference`.
    `metadata`: an object that only your own rewards read.
    `answer_after`: the answer is the text after the last such mark (`####` in GSM8K's worked solutions).
    """

    question: str | None = "question"
    messages: str | None = None
    answer: str | None = "answer"
    answer_after: Annotated[str, Field(min_length=1)] | None = None
    verifier: str | None = None
    reference: str | None = None
    metadata: str | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> FieldMapping:
        for first, second in (("question", "messages"), ("answer", "reference")):
            value, other = getattr(self, first), getattr(self, second)
            if (value is None) == (other is None):
                expected = f"exactly one of {first} and {second} ({second} = {shown(other)}); set the other to null"
                raise ValueError(invalid(first, value, expected))
        if self.answer_after is not None and self.answer is None:
            raise ValueError(invalid("answer_after", self.answer_after, "null without answer"))
        return self


class SourceSettings(Section):
    """The source of prompts.

    `reasoning-gym` generates `task` with `options`; `jsonl`, `csv`, `parquet` and `hf` (a dataset folder as `datasets`
    saves it) read `path` (also `s3://...`, and `ORG/NAME@REVISION/PATH` of the Hugging Face Hub), whose rows have the
    `layout`: `penstock` (question, verifier, reference), `dapo-math-17k` (the published schema), or `fields` (as mapped
    by `fields`). `prompt_format: dapo` asks for a last line `Answer: ...`. `verifier`: the reward of rows that name
    none (docs/rewards.md). A reference that its verifier cannot read is an error, or the row is dropped and counted
    (`on_bad_reference: drop`).
    """

    source: Literal["reasoning-gym", "jsonl", "csv", "parquet", "hf"] = "reasoning-gym"
    task: str = "chain_sum"
    options: dict[str, Any] = Field(default_factory=dict)
    path: str | None = None
    split: str | None = None
    layout: Literal["penstock", "dapo-math-17k", "fields"] = "penstock"
    fields: FieldMapping = FieldMapping()
    verifier: RewardSetting = "math"
    on_bad_reference: Literal["error", "drop"] = "error"
    prompt_format: Literal["plain", "dapo"] = "plain"
    seed: int = 17
    system_prompt: str | None = None
    suffix: str = ""

    @property
    def generated(self) -> bool:
        """Whether its prompts are generated, and judged by the generator's own scorers."""
        return self.source == "reasoning-gym"

    @property
    def rows_name_verifiers(self) -> bool:
        """Whether each row names its own reward."""
        own = self.layout == "penstock" or (self.layout == "fields" and self.fields.verifier is not None)
        return own and not self.generated

    @model_validator(mode="after")
    def _path_of_files(self) -> SourceSettings:
        if (self.source == "reasoning-gym") == (self.path is not None):
            expected = "null" if self.source == "reasoning-gym" else "a path"
            raise ValueError(invalid("path", self.path, f"{expected} with source = {self.source!r}"))
        if self.split is not None and self.source != "hf":
            raise ValueError(invalid("split", self.split, "null unless source = 'hf'"))
        if self.layout == "dapo-math-17k" and self.source == "csv":
            expected = "another one with source = 'csv', whose fields hold no chat"
            raise ValueError(invalid("layout", self.layout, expected))
        if self.layout == "dapo-math-17k" and self.prompt_format != "plain":
            expected = "'plain' with layout = 'dapo-math-17k', whose prompts contain their instruction"
            raise ValueError(invalid("prompt_format", self.prompt_format, expected))
        return self


class DataSettings(SourceSettings):
    """Prompts of the run. The two splits share no question; `train: null` takes all that `held_out` leaves.

    A prompt of more than `max_prompt_tokens` (null: what model.max_model_len leaves for it) is dropped and counted.
    """

    train: Positive | None = 128
    held_out: Annotated[int, Field(ge=0)] = 64
    max_prompt_tokens: Positive | None = None

    @model_validator(mode="after")
    def _end_of_training_prompts(self) -> DataSettings:
        if self.train is None and self.path is None:
            raise ValueError(invalid("train", None, "a number with source = 'reasoning-gym', which has no end"))
        return self


class EvaluationSet(SourceSettings):
    """One more held-out set: its first `prompts` questions (null: all), each answered `samples` times.

    `samples`: null means evaluation.samples.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    prompts: Positive | None = None
    samples: Positive | None = None

    @model_validator(mode="after")
    def _end_of_prompts(self) -> EvaluationSet:
        if self.prompts is None and self.path is None:
            raise ValueError(invalid("prompts", None, "a number with source = 'reasoning-gym', which has no end"))
        return self


class EvaluationSettings(Section):
    """avg@k, pass@k and maj@k with k = `samples`, on the held-out split (`held-out`) and on every set of `sets`.

    Sets are evaluated before the first rollout step, after every `every` steps (0: never) while training continues,
    and after the last. `max_new_tokens`: null means rollout.max_new_tokens.
    """

    samples: Positive = 4
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.7
    every: Annotated[int, Field(ge=0)] = 0
    max_new_tokens: Positive | None = None
    sets: tuple[EvaluationSet, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> EvaluationSettings:
        names = [evaluated.name for evaluated in self.sets]
        if len({HELD_OUT, *names}) <= len(names):
            raise ValueError(invalid("sets", names, f"names that differ from each other and from {HELD_OUT!r}"))
        return self
