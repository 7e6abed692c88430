"""Owns the recipe: the one document that describes a run, validated before anything starts.

Must not import an engine, Redis, or read anything but the recipe itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from services.settings.base import Section
from services.settings.data import HELD_OUT, DataSettings, EvaluationSettings
from services.settings.presets import with_preset
from services.settings.sections import (
    AlgorithmSettings,
    LearnerSettings,
    LimitsSettings,
    ModelSettings,
    RolloutSettings,
    VerifierSettings,
    WeightsSettings,
)


class RecipeError(ValueError):
    """A recipe that cannot be used. One line per fault: field, value, what is accepted."""


class Recipe(Section):
    """A run, whole. Cross-field rules are checked here, so that nothing starts that cannot end."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    seed: int = 0
    model: ModelSettings
    data: DataSettings = DataSettings()
    verifier: VerifierSettings = VerifierSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    rollout: RolloutSettings = RolloutSettings()
    learner: LearnerSettings = LearnerSettings()
    weights: WeightsSettings = WeightsSettings()
    limits: LimitsSettings
    evaluation: EvaluationSettings = EvaluationSettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        groups, mini = self.limits.groups_per_step, self.learner.mini_batch_groups
        if groups % mini:
            raise ValueError(
                f"limits.groups_per_step = {groups} must be a multiple of learner.mini_batch_groups = {mini}"
            )
        needed = groups * (self.limits.max_staleness + 1)
        if self.limits.max_inflight_groups < needed:
            raise ValueError(
                f"limits.max_inflight_groups = {self.limits.max_inflight_groups} must be at least "
                f"groups_per_step x (max_staleness + 1) = {needed}"
            )
        sampling = self.algorithm.dynamic_sampling
        if sampling.refill == "generation_batches":
            # A wave goes out whole, beside the batches under way and what is kept for the next one.
            needed = groups * (sampling.generation_batch_factor + self.limits.max_staleness + 1)
            if self.limits.max_inflight_groups < needed:
                raise ValueError(
                    f"limits.max_inflight_groups = {self.limits.max_inflight_groups} must be at least groups_per_step "
                    f"x (algorithm.dynamic_sampling.generation_batch_factor + max_staleness + 1) = {needed}"
                )
        self._check_lengths()
        overlong = self.algorithm.overlong
        if overlong.punishment and self.overlong_cache > self.rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong.cache = {overlong.cache} must not exceed "
                f"rollout.max_new_tokens = {self.rollout.max_new_tokens}"
            )
        screened = sampling.selection.screen_samples
        if sampling.selection.strategy == "screen" and not sampling.enabled:
            raise ValueError(
                "algorithm.dynamic_sampling.selection.strategy = 'screen' filters groups: it needs "
                "algorithm.dynamic_sampling.enabled = true"
            )
        if sampling.selection.strategy == "screen" and screened >= self.algorithm.group_size:
            raise ValueError(
                f"algorithm.dynamic_sampling.selection.screen_samples = {screened} must be below "
                f"algorithm.group_size = {self.algorithm.group_size}"
            )
        known = self.algorithm.dynamic_sampling.min_known
        if known is not None and known > self.algorithm.group_size:
            raise ValueError(
                f"algorithm.dynamic_sampling.min_known = {known} must not exceed "
                f"algorithm.group_size = {self.algorithm.group_size}"
            )
        if not self.data.held_out and not self.evaluation.sets:
            raise ValueError("data.held_out = 0 leaves nothing to evaluate; give it or evaluation.sets")
        return self

    def _check_lengths(self) -> None:
        longest = self.model.max_model_len
        lengths = {
            "rollout.max_new_tokens": self.rollout.max_new_tokens,
            "evaluation.max_new_tokens": self.evaluation_new_tokens,
        }
        for field, tokens in lengths.items():
            if tokens >= longest:
                raise ValueError(f"{field} = {tokens} must be below model.max_model_len = {longest}")
        asked, room = self.data.max_prompt_tokens, longest - max(lengths.values())
        if asked is not None and asked > room:
            raise ValueError(
                f"data.max_prompt_tokens = {asked} must not exceed model.max_model_len less max_new_tokens = {room}"
            )

    @property
    def evaluated_sets(self) -> tuple[str, ...]:
        """The names of all sets that are evaluated, the run's own held-out split first."""
        own = (HELD_OUT,) if self.data.held_out else ()
        return (*own, *(one.name for one in self.evaluation.sets))

    @property
    def overlong_cache(self) -> int:
        """The tokens below rollout.max_new_tokens over which the overlong punishment grows."""
        return self.algorithm.overlong.cache or max(1, self.rollout.max_new_tokens // 5)

    @property
    def evaluation_new_tokens(self) -> int:
        """The longest response of an evaluation, in tokens."""
        return self.evaluation.max_new_tokens or self.rollout.max_new_tokens

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that is accepted, in tokens: as set, else what the model's length leaves for it."""
        room = self.model.max_model_len - max(self.rollout.max_new_tokens, self.evaluation_new_tokens)
        return self.data.max_prompt_tokens or room

    @property
    def correction(self) -> Literal["none", "importance", "truncated_is", "truncated_is_sequence", "icepop"]:
        """The off-policy correction in force: `auto` means truncated IS as soon as staleness is allowed.

        With behaviour log-probs as proximal ones there is no gap to correct.
        """
        if self.algorithm.correction != "auto":
            return self.algorithm.correction
        if self.algorithm.proximal == "behaviour":
            return "none"
        return "truncated_is" if self.limits.max_staleness > 0 else "none"


def _fault(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "recipe"
    accepted = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "missing":
        return f"{where}: missing; this field is required"
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown field (value {error['input']!r}); see `penstock validate --schema`"
    if error["type"] == "value_error":
        return f"{where}: {accepted}" if where != "recipe" else accepted
    return f"{where}: value {error['input']!r} is not accepted; {accepted}"


def parse_recipe(document: Any) -> Recipe:
    """Validate a recipe given as plain data, its preset filled in. Raises RecipeError with one line per fault."""
    if not isinstance(document, dict):
        raise RecipeError(f"recipe: value {document!r} is not accepted; a mapping of sections is")
    try:
        return Recipe.model_validate(with_preset(document))
    except ValidationError as error:
        raise RecipeError("\n".join(_fault(dict(one)) for one in error.errors())) from None


def load_recipe(path: Path) -> Recipe:
    """Read and validate a YAML or JSON recipe. Raises RecipeError, naming the file."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid YAML ({error})".replace("\n", " ")) from None
    return parse_recipe(document)
