"""Owns the section `algorithm` of a recipe: DAPO's parts, each with its switch.

Must not hold a formula; learner.algorithm and services.sampler.advantage do.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.settings.algorithm.sampling import DynamicSamplingSettings
from services.settings.algorithm.value import ValueSettings
from services.settings.base import Positive, Section
from services.settings.faults import invalid, shown


class OverlongSettings(Section):
    """The two independent treatments of long responses (paper section 3.4); lengths in tokens.

    `filtering` masks the loss of truncated responses; `punishment` shapes rewards over the last `cache` tokens (null:
    a fifth of rollout.max_new_tokens, like the paper's 4096 of 20480). `shape`: `paper` is Eq. 13, `published` the
    code's formula, times `factor` and never below -`factor`.
    """

    filtering: bool = False
    punishment: bool = True
    shape: Literal["paper", "published"] = "paper"
    factor: Annotated[float, Field(gt=0)] = 1.0
    cache: Positive | None = None

    @model_validator(mode="after")
    def _factor_of_published(self) -> OverlongSettings:
        if self.shape == "paper" and self.factor != 1.0:
            raise ValueError(invalid("factor", self.factor, "1.0 unless shape = 'published' (Eq. 13 has no factor)"))
        return self


class AlgorithmSettings(Section):
    """DAPO's parts, each with its switch. `preset` fills in what the recipe does not give; presets.py has the sources.

    `reward`: what a response earns, +1 or -1 by its `verdict`, or its verdict's `score` s as 2 s - 1.
    `ratio`: what is clipped, the ratio of each `token`, or that of the whole response normalised by its length (GSPO:
    `sequence`, or `sequence_token`, with which the tokens of a response may differ in weight). `symmetric` clips at
    1 +- clip_low; `cispo` clips the weight of each token, which keeps its gradient. With clip_low 1 there is no lower
    bound.
    `dual_clip` bounds the loss of negative advantages at that ratio (null: off).
    `constant_length` divides each response's sum (null: rollout.max_new_tokens). `proximal`: the log-probs in the
    denominator of the clipped ratio. `icepop_low`, `icepop_high`: the range of importance ratios that `icepop` keeps.
    `value`: the value head of `advantage: gae`, with which a group may be a single response.
    """

    preset: Literal["dapo", "dapo-verl", "grpo", "dr-grpo", "gspo", "cispo", "ppo"] = "dapo"
    reward: Literal["verdict", "score"] = "verdict"
    group_size: Positive = 16
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    clipping: Literal["symmetric", "clip_higher", "cispo"] = "clip_higher"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] = 0.28
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    reduction: Literal["token", "group_token", "sample", "sequence_sum", "constant_length"] = "token"
    constant_length: Positive | None = None
    advantage: Literal["group_std", "group_std_biased", "group_mean", "leave_one_out", "gae"] = "group_std"
    proximal: Literal["recomputed", "behaviour"] = "recomputed"
    correction: Literal["auto", "none", "importance", "truncated_is", "truncated_is_sequence", "icepop"] = "auto"
    correction_cap: Annotated[float, Field(gt=0)] = 2.0
    icepop_low: Annotated[float, Field(gt=0)] = 0.5
    icepop_high: Annotated[float, Field(gt=0)] = 5.0
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    value: ValueSettings = ValueSettings()
    overlong: OverlongSettings = OverlongSettings()
    dynamic_sampling: DynamicSamplingSettings = DynamicSamplingSettings()

    @property
    def filter(self) -> Literal["accuracy", "spread"]:
        """The filter in force: by default scores are compared where scores are trained."""
        return self.dynamic_sampling.filter or ("spread" if self.reward == "score" else "accuracy")

    @model_validator(mode="after")
    def _parts_fit(self) -> AlgorithmSettings:
        if self.clipping == "symmetric" and self.clip_high != self.clip_low:
            expected = f"clip_low = {self.clip_low} with clipping = 'symmetric'"
            raise ValueError(invalid("clip_high", self.clip_high, expected))
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(invalid("dual_clip", self.dual_clip, f"more than 1 + clip_high = {1 + self.clip_high}"))
        if self.clipping == "cispo":
            self._fits_cispo()
        if self.ratio == "sequence" and self.correction == "icepop":
            expected = "another with ratio = 'sequence', which trains masked tokens too ('sequence_token' does not)"
            raise ValueError(invalid("correction", self.correction, expected))
        if self.proximal == "behaviour" and self.correction not in ("auto", "none"):
            expected = "'auto' or 'none' with proximal = 'behaviour', which leaves nothing to correct"
            raise ValueError(invalid("correction", self.correction, expected))
        self._fits_gae()
        self._fits_filter()
        if not self.icepop_low < 1 < self.icepop_high:
            expected = f"icepop_low < 1 < icepop_high (icepop_high = {self.icepop_high})"
            raise ValueError(invalid("icepop_low", self.icepop_low, expected))
        if self.constant_length is not None and self.reduction != "constant_length":
            raise ValueError(
                invalid("constant_length", self.constant_length, "null unless reduction = 'constant_length'")
            )
        return self

    def _fits_filter(self) -> None:
        section, sampling = "dynamic_sampling", self.dynamic_sampling
        if self.filter == "accuracy":
            if (given := sampling.min_spread) != (default := DynamicSamplingSettings().min_spread):
                expected = f"{default}, the default, with {section}.filter = 'accuracy', which compares no scores"
                raise ValueError(invalid(f"{section}.min_spread", given, expected))
            return
        if self.reward == "verdict":
            expected = "'accuracy' or null with reward = 'verdict', which gives all correct responses the same reward"
            raise ValueError(invalid(f"{section}.filter", "spread", expected))
        if sampling.selection.strategy == "boundary":
            expected = f"'uniform' or 'screen' with {section}.filter = 'spread' (null means that with reward = 'score')"
            expected += ", of which a pass rate says nothing"
            raise ValueError(invalid(f"{section}.selection.strategy", "boundary", expected))

    def _fits_gae(self) -> None:
        for name, given in self.value if self.advantage != "gae" else ():
            if given != (default := ValueSettings.model_fields[name].default):
                expected = f"{shown(default)}, the default, with advantage = {self.advantage!r}, which has no values"
                raise ValueError(invalid(f"value.{name}", given, expected))
        if self.group_size == 1 and self.advantage != "gae":
            expected = f"at least 2 with advantage = {self.advantage!r}, which compares the responses of a group"
            raise ValueError(invalid("group_size", self.group_size, expected))
        if self.group_size == 1 and self.dynamic_sampling.enabled:
            expected = "at least 2 with dynamic_sampling.enabled = true, which keeps groups of mixed verdicts"
            raise ValueError(invalid("group_size", self.group_size, expected))
        if self.advantage == "gae" and self.ratio == "sequence":
            expected = "'token' or 'sequence_token' with advantage = 'gae', whose advantages differ within a response"
            raise ValueError(invalid("ratio", self.ratio, expected))

    def _fits_cispo(self) -> None:
        if self.ratio != "token":
            expected = "'token' with clipping = 'cispo', which weights each token by its own ratio"
            raise ValueError(invalid("ratio", self.ratio, expected))
        if self.dual_clip is not None:
            expected = "null with clipping = 'cispo', which bounds the weight for any advantage"
            raise ValueError(invalid("dual_clip", self.dual_clip, expected))
