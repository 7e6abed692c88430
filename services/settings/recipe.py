"""Owns the recipe: the document that describes a run, validated before anything starts.

Must not import an engine or Redis, nor read any other file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from services.settings.algorithm.section import AlgorithmSettings
from services.settings.base import Section, storable_faults
from services.settings.data import HELD_OUT, DataSettings, EvaluationSettings, SourceSettings
from services.settings.devices import architecture_faults, broadcast_faults, rank_faults, replica_faults, thread_faults
from services.settings.engines import schedule_fault
from services.settings.faults import explained, invalid
from services.settings.presets import with_preset
from services.settings.rewards.confined import function_faults
from services.settings.rewards.files import FileUse, file_faults, uses_of
from services.settings.rewards.reward import Reward, RewardError, RewardNames, parse_reward
from services.settings.sections import (
    LearnerSettings,
    LimitsSettings,
    ModelSettings,
    RolloutSettings,
    TrackingSettings,
    TuningSettings,
    VerifierSettings,
    WeightsSettings,
)

EXACT_DIFFERENCE, ROUNDED_DIFFERENCE = 1e-3, 0.1
"""Nats: limits.max_logprob_difference where both sides compute in float32 on CPU, and elsewhere.

docs/recipes.md derives them.
"""


LEAST_TEMPERATURE = 0.01
"""vLLM 0.32 samples at no lower temperature (0 is greedy), but the learner would divide by the recipe's."""


class RecipeError(ValueError):
    """A recipe that is not valid. One line per fault: field, value, what is expected."""


class Recipe(Section):
    """All settings of a run. Rules across sections are checked here, so that a run that cannot finish never starts.

    Those of `device_faults` are checked when a run is submitted, those of `sampling_faults` also when it is resumed:
    earlier releases accepted some recipes against them, whose runs must stay readable.
    """

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
    tracking: TrackingSettings = TrackingSettings()
    tuning: TuningSettings = TuningSettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        self._check_groups()
        self._check_lengths()
        self._check_dynamic_sampling()
        self._check_rewards()
        self._check_tuning()
        if not self.data.held_out and not self.evaluation.sets:
            expected = "at least 1 without evaluation.sets, so that there is a set to evaluate"
            raise ValueError(invalid("data.held_out", 0, expected))
        return self

    def _check_groups(self) -> None:
        groups, mini = self.limits.groups_per_step, self.learner.mini_batch_groups
        if groups % mini:
            expected = f"a multiple of learner.mini_batch_groups = {mini}"
            raise ValueError(invalid("limits.groups_per_step", groups, expected))
        text = "max_staleness + 1"
        if self.algorithm.dynamic_sampling.refill == "generation_batches":
            text = f"algorithm.dynamic_sampling.generation_batch_factor + {text}"
        if self.limits.max_inflight_groups < self.least_inflight_groups:
            expected = f"at least groups_per_step x ({text}) = {self.least_inflight_groups}"
            raise ValueError(invalid("limits.max_inflight_groups", self.limits.max_inflight_groups, expected))

    def _check_lengths(self) -> None:
        longest = self.model.max_model_len
        lengths = {
            "rollout.max_new_tokens": self.rollout.max_new_tokens,
            "evaluation.max_new_tokens": self.evaluation_new_tokens,
        }
        for field, tokens in lengths.items():
            if tokens >= longest:
                raise ValueError(invalid(field, tokens, f"less than model.max_model_len = {longest}"))
        prompt_tokens, room = self.data.max_prompt_tokens, longest - max(lengths.values())
        if prompt_tokens is not None and prompt_tokens > room:
            expected = f"at most model.max_model_len less max_new_tokens = {room}"
            raise ValueError(invalid("data.max_prompt_tokens", prompt_tokens, expected))
        if fault := schedule_fault(self.rollout.engine, self.rollout.max_sequences, longest):
            raise ValueError(fault)
        overlong = self.algorithm.overlong
        if overlong.punishment and self.overlong_cache > self.rollout.max_new_tokens:
            expected = f"at most rollout.max_new_tokens = {self.rollout.max_new_tokens}"
            raise ValueError(invalid("algorithm.overlong.cache", overlong.cache, expected))

    def _check_dynamic_sampling(self) -> None:
        section, group_size = "algorithm.dynamic_sampling", self.algorithm.group_size
        sampling = self.algorithm.dynamic_sampling
        if sampling.selection.strategy == "screen":
            screened = sampling.selection.screen_samples
            if not sampling.enabled:
                expected = f"another strategy with {section}.enabled = false, because screening filters groups"
                raise ValueError(invalid(f"{section}.selection.strategy", "screen", expected))
            if screened >= group_size:
                expected = f"less than algorithm.group_size = {group_size}"
                raise ValueError(invalid(f"{section}.selection.screen_samples", screened, expected))
        if sampling.min_known is not None and sampling.min_known > group_size:
            expected = f"at most algorithm.group_size = {group_size}"
            raise ValueError(invalid(f"{section}.min_known", sampling.min_known, expected))

    def _check_rewards(self) -> None:
        names = self.reward_names
        for name in self.verifier.rewards:
            _resolved(f"verifier.rewards.{name}", Reward("", name=name), names)
        for section, source in self.data_sources.items():
            _resolved(f"{section}.verifier", parse_reward(source.verifier), names)

    def _check_tuning(self) -> None:
        """Each knob starts within its bounds. Staleness 0 cannot change in flight."""
        tuning, limits = self.tuning, self.limits
        knobs = {
            "replicas": ("rollout.replicas", self.rollout.replicas),
            "inflight_groups": ("limits.max_inflight_groups", limits.max_inflight_groups),
            "max_staleness": ("limits.max_staleness", limits.max_staleness),
        }
        for name, (field, value) in knobs.items():
            bounds = getattr(tuning, name) if tuning.mode != "off" else None
            if bounds and not bounds[0] <= value <= bounds[1]:
                expected = f"{bounds[0]} to {bounds[1]}, the bounds of tuning.{name}, or tuning.mode = 'off'"
                raise ValueError(invalid(field, value, expected))

    @property
    def at_most(self) -> Recipe:
        """The recipe with the largest values that tuning may give it: what its plan and its quota have to hold."""
        if self.tuning.mode != "on":
            return self
        limits = {"max_inflight_groups": self.tuning.inflight_groups, "max_staleness": self.tuning.max_staleness}
        most = {name: bounds[1] for name, bounds in limits.items() if bounds}
        return self.model_copy(update={"limits": self.limits.model_copy(update=most)})

    def most_replicas(self, replicas: int) -> int:
        """The largest number of rollout replicas that tuning may give a run which has `replicas`."""
        bounds = self.tuning.replicas if self.tuning.mode == "on" else None
        return max(replicas, bounds[1]) if bounds else replicas

    @property
    def reward_names(self) -> RewardNames:
        """The rewards that this recipe names, for its other rewards and for rows."""
        return RewardNames(self.verifier.rewards)

    @property
    def rewards(self) -> tuple[Reward, ...]:
        """All rewards of this recipe, without repetition: those of its data, of its sets, and those that it names."""
        names = self.reward_names
        stated = [parse_reward(source.verifier) for source in self.data_sources.values() if not source.generated]
        found = [names.resolved(reward) for reward in (*stated, *(Reward("", name=n) for n in self.verifier.rewards))]
        if any(source.generated for source in self.data_sources.values()):
            found.append(parse_reward("reasoning-gym"))
        return tuple({reward.text: reward for reward in found}.values())

    @property
    def stated_rewards(self) -> dict[str, Reward]:
        """Each reward as it is written, its names not resolved, by the setting that states it."""
        sources = self.data_sources.items()
        stated = {f"{section}.verifier": source.verifier for section, source in sources if not source.generated}
        stated |= {f"verifier.rewards.{name}": document for name, document in self.verifier.rewards.items()}
        return {setting: parse_reward(document) for setting, document in stated.items()}

    @property
    def file_uses(self) -> tuple[FileUse, ...]:
        """Each use of a file beside the recipe, with the setting that names it."""
        found = (use for setting, reward in self.stated_rewards.items() for use in uses_of(setting, reward))
        template = self.model.chat_template or ""
        own = [FileUse(template, "model.chat_template")] if template.startswith("./") else []
        return (*found, *own, *(FileUse(name, "verifier.files") for name in self.verifier.files))

    @property
    def reward_files(self) -> tuple[str, ...]:
        """The files beside the recipe that travel with its run, such as `./rewards.py`."""
        return tuple(dict.fromkeys(use.name for use in self.file_uses))

    @property
    def device_faults(self) -> list[str]:
        """What no device can do, one line per fault. With 0 rollout steps there is neither learner nor broadcast."""
        learning = self.limits.rollout_steps > 0
        return [
            *replica_faults(self.rollout),
            *thread_faults(self.rollout),
            *architecture_faults(self.rollout, self.model.architecture),
            *(rank_faults(self.learner) if learning else ()),
            *(broadcast_faults(self.weights, self.rollout, self.learner) if learning else ()),
        ]

    @property
    def sampling_faults(self) -> list[str]:
        """How responses cannot be sampled for training, one line per fault.

        With top-p, behaviour log-probs are those of the nucleus, so the learner needs to know it. The engine returns it
        only if top-k limits it. Of a single token, the log-prob is always 0 and has no gradient.
        """
        rollout, found = self.rollout, list[str]()
        if self.limits.rollout_steps == 0:
            return found
        if rollout.temperature < LEAST_TEMPERATURE:
            expected = f"at least {LEAST_TEMPERATURE}, at which vLLM samples for any lower one"
            found.append(invalid("rollout.temperature", rollout.temperature, expected))
        if rollout.top_k == 1:
            expected = "at least 2, or null: a policy without a choice cannot be trained"
            found.append(invalid("rollout.top_k", 1, expected))
        if rollout.top_p < 1 and rollout.top_k is None:
            expected = "1.0 with rollout.top_k = null, or a top_k that limits the nucleus (evaluation.top_p needs none)"
            found.append(invalid("rollout.top_p", rollout.top_p, expected))
        return found

    @property
    def least_inflight_groups(self) -> int:
        """The smallest valid limits.max_inflight_groups."""
        batches, sampling = self.limits.max_staleness + 1, self.algorithm.dynamic_sampling
        if sampling.refill == "generation_batches":
            # A generation batch is dispatched whole, beside the batches in flight and the groups kept for the next one.
            batches += sampling.generation_batch_factor
        return self.limits.groups_per_step * batches

    @property
    def evaluated_sets(self) -> tuple[str, ...]:
        """The names of all sets that are evaluated, the run's own held-out split first."""
        own = (HELD_OUT,) if self.data.held_out else ()
        return (*own, *(evaluated.name for evaluated in self.evaluation.sets))

    @property
    def data_sources(self) -> dict[str, SourceSettings]:
        """Where prompts come from, by the section of the recipe that says so."""
        return {"data": self.data} | {f"evaluation.sets {entry.name!r}": entry for entry in self.evaluation.sets}

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
        """The longest prompt that is not dropped, in tokens: as set, else what the model's length leaves for it."""
        room = self.model.max_model_len - max(self.rollout.max_new_tokens, self.evaluation_new_tokens)
        return self.data.max_prompt_tokens or room

    @property
    def full_precision(self) -> bool:
        """Whether fleet and learner both compute in float32 or better."""
        return self.rollout.dtype == "float32" and self.learner.dtype in ("float32", "float64")

    @property
    def _exact(self) -> bool:
        """Whether rounding to float32 alone separates engine and learner. GPUs may multiply float32 with fewer bits."""
        return self.full_precision and not self.rollout.gpus and not self.learner.gpus

    @property
    def max_logprob_difference(self) -> float:
        """The limit in force of the difference between the log-probs of learner and replicas, in nats."""
        derived = EXACT_DIFFERENCE if self._exact else ROUNDED_DIFFERENCE
        return self.limits.max_logprob_difference or derived

    @property
    def correction(self) -> Literal["none", "importance", "truncated_is", "truncated_is_sequence", "icepop"]:
        """The off-policy correction in force: `auto` means truncated IS where the two policies may differ.

        They do not at staleness 0 if both sides compute in float32 on CPU, where they differ by rounding alone. With
        the behaviour log-probs as proximal ones there is nothing to correct.
        """
        if self.algorithm.correction != "auto":
            return self.algorithm.correction
        if self.algorithm.proximal == "behaviour":
            return "none"
        return "none" if self._exact and self.limits.max_staleness == 0 else "truncated_is"


def _resolved(field: str, reward: Reward, names: RewardNames) -> Reward:
    try:
        return names.resolved(reward)
    except RewardError as error:
        raise ValueError(f"{field}{str(error).removeprefix('verifier')}") from None


def fault_line(error: dict[str, Any]) -> str:
    """One of pydantic's errors about a recipe, as one line: field, value, what is expected."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return invalid(where, error["input"], "a known field; `penstock validate --schema` lists them")
    if error["type"] == "value_error":  # from a validator of ours, which names the field below its section
        message = str(error["msg"]).removeprefix("Value error, ")
        names = [part for part in error["loc"] if isinstance(part, str)][-1:]
        if isinstance(error["ctx"]["error"], RewardError):
            names.append("verifier")  # what a whole reward is called, whatever the setting that holds it
        for name in names:
            if message.startswith(f"{name}: "):  # it names the field itself
                return f"{where}{message.removeprefix(name)}"
        return f"{where}.{message}" if where else message
    return explained(where or "recipe", error)


def parse_recipe(document: Any) -> Recipe:
    """Validate a recipe given as plain data, its preset filled in. Raises RecipeError with one line per fault."""
    if not isinstance(document, dict):
        raise RecipeError(invalid("recipe", document, "a mapping of sections"))
    try:
        recipe = Recipe.model_validate(with_preset(document))
    except ValidationError as error:
        raise RecipeError("\n".join(fault_line(dict(fault)) for fault in error.errors())) from None
    faults = [*storable_faults(document), *recipe.device_faults, *recipe.sampling_faults]
    if faults := faults + function_faults(recipe.stated_rewards):
        raise RecipeError("\n".join(faults))
    return recipe


def check_files(recipe: Recipe, files: Mapping[str, str]) -> None:
    """Check the texts of the files beside a recipe, by name. Raises RecipeError with one line per fault."""
    if faults := file_faults(recipe.file_uses, files):
        raise RecipeError("\n".join(faults))


def check_trackers(recipe: Recipe) -> None:
    """Check that this Python has the libraries of a recipe's trackers. Raises RecipeError with one line per fault.

    For the platform: a client that submits a recipe needs none of them.
    """
    if faults := recipe.tracking.missing:
        raise RecipeError("\n".join(faults))


def load_recipe(path: Path) -> Recipe:
    """Read and validate a YAML or JSON recipe. Raises RecipeError, naming the file."""
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: not valid YAML ({error})".replace("\n", " ")) from None
    return parse_recipe(document)
