"""Owns the gauges that follow a table: one family per step metric, and one per recipe setting that alerts read.

Must not mix units in one family: each row names its family, and the name ends with the unit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client import Gauge

from services.contracts import reward_names

_STEP_METRICS = {
    "accuracy": ("accuracy_ratio", "Correct responses, of all with a known verdict, before filtering."),
    "batch_wait_seconds": ("batch_wait_seconds", "Time that the learner waited for the batch."),
    "capped_share": ("capped_ratio", "Trained tokens whose importance weight was capped."),
    "clip_high_share": ("clip_high_ratio", "Trained tokens clipped at the upper bound."),
    "clip_low_share": ("clip_low_ratio", "Trained tokens clipped at the lower bound."),
    "commit_wait_seconds": ("commit_wait_seconds", "Time that the learner waited for the step before to be committed."),
    "compared_tokens": ("compared_tokens", "Tokens sampled with the weights from which the step started."),
    "dual_clip_share": ("dual_clip_ratio", "Trained tokens clipped by dual clipping."),
    "effective_sample_size": ("effective_sample_size_ratio", "Effective sample size of the raw importance weights."),
    "entropy": ("entropy_nats", "Mean entropy of the policy per trained token."),
    "generation_batches": ("generation_batches", "Generation batches drawn for this batch."),
    "gradient_norm": ("gradient_norm", "Mean gradient norm before clipping."),
    "groups_dead": ("dead_groups", "Groups released as dead since the previous batch."),
    "groups_filtered": ("filtered_groups", "Groups filtered since the previous batch."),
    "groups_kept": ("kept_groups", "Groups kept since the previous batch."),
    "groups_missing": ("missing_groups", "Groups that a partial batch lacks."),
    "groups_screened_out": ("screened_out_groups", "Groups that screening ended since the previous batch."),
    "groups_stale": ("stale_groups", "Groups released as stale since the previous batch."),
    "importance_p1": ("importance_p1_ratio", "Proximal over behaviour probability, 1st percentile of the tokens."),
    "importance_p50": ("importance_p50_ratio", "Proximal over behaviour probability, median of the tokens."),
    "importance_p99": ("importance_p99_ratio", "Proximal over behaviour probability, 99th percentile of the tokens."),
    "kl_reference": ("reference_kl_nats", "KL divergence from the reference policy per token."),
    "learning_rate": ("learning_rate", "Learning rate."),
    "learning_seconds": ("learning_seconds", "Duration of the optimizer steps."),
    "logprob_difference_mean": (
        "logprob_difference_mean_nats",
        "Mean absolute difference between the log-probs of learner and engine, on the compared tokens.",
    ),
    "logprob_difference_p99": ("logprob_difference_p99_nats", "The 99th percentile of that difference."),
    "logprob_off_replicas": (
        "logprob_off_replicas",
        "Replicas whose log-probs differ from the learner's by more than limits.max_logprob_difference.",
    ),
    "logprob_off_share": ("logprob_off_ratio", "Compared tokens whose probabilities differ by more than 1 %."),
    "loss": ("loss", "Mean loss over the optimizer steps."),
    "masked_share": ("masked_ratio", "Trained tokens whose importance weight was set to 0."),
    "mean_token_probability": ("mean_token_probability_ratio", "Mean probability of the trained tokens."),
    "mismatch_kl": ("mismatch_kl_nats", "KL(behaviour || proximal) per token."),
    "prompts_refused": ("refused_prompts", "Prompts of the run that the chat template refused."),
    "prompts_too_long": ("too_long_prompts", "Prompts of the run that exceed the length limit."),
    "prompts_unjudgeable": ("unjudgeable_prompts", "Prompts of the run that no verifier could judge."),
    "publish_seconds": ("publish_seconds", "Time until the fleet held the new policy version."),
    "ratio_mean": ("policy_mean_ratio", "Current over proximal probability, mean of the tokens."),
    "ratio_p1": ("policy_p1_ratio", "Current over proximal probability, 1st percentile of the tokens."),
    "ratio_p50": ("policy_p50_ratio", "Current over proximal probability, median of the tokens."),
    "ratio_p99": ("policy_p99_ratio", "Current over proximal probability, 99th percentile of the tokens."),
    "response_length": ("response_length_tokens", "Mean response length."),
    "response_tokens": ("response_tokens", "Response tokens judged since the previous batch."),
    "return_mean": ("return", "Mean return of the trained tokens, which the value head learns."),
    "reward": ("reward", "Mean shaped reward, before filtering."),
    "rollout_tokens_per_trained_token": (
        "rollout_to_trained_tokens_ratio",
        "Response tokens judged since the previous batch, over those of this batch that enter the loss.",
    ),
    "score": ("score", "Mean score of the known verdicts, before filtering."),
    "skipped_optimizer_steps": ("skipped_optimizer_steps", "Optimizer steps skipped for a non-finite gradient."),
    "staleness_max": ("staleness_max_steps", "Highest staleness of a trained sample."),
    "staleness_mean": ("staleness_mean_steps", "Mean staleness of the trained samples."),
    "tokens_per_second": (
        "response_tokens_per_second",
        "Response tokens per second, from the first start to the last end.",
    ),
    "trained_tokens": ("trained_tokens", "Tokens in the loss."),
    "truncated_share": ("truncated_ratio", "Responses cut at the length limit."),
    "unknown_verdicts": ("unknown_verdicts", "Unknown verdicts since the previous batch."),
    "value_clip_share": ("value_clip_ratio", "Trained tokens whose value loss was clipped."),
    "value_explained_variance": (
        "value_explained_variance_ratio",
        "1 - the squared error of the values / the variance of the returns.",
    ),
    "value_loss": ("value_loss", "Half the mean squared error of the values."),
    "weight_effective_sample_size": (
        "weight_effective_sample_size_ratio",
        "Effective sample size of the importance weights in force.",
    ),
    "zero_advantage_share": ("zero_advantage_ratio", "Trained responses with advantage 0."),
}
"""By step metric (`GET /v1/runs/{id}/metrics`): its name after `penstock_step_`, ending with the unit, and its help."""
FAMILY_OF_STEP_METRIC = {name: family for name, (family, _) in _STEP_METRICS.items()}
"""By step metric: the end of its families' names."""

_SETTINGS = {
    "algorithm.clip_high": "algorithm_clip_high_ratio",
    "algorithm.clip_low": "algorithm_clip_low_ratio",
    "algorithm.group_size": "algorithm_group_size_samples",
    "limits.groups_per_step": "limits_groups_per_step",
    "limits.lease_s": "limits_lease_seconds",
    "limits.max_inflight_groups": "limits_max_inflight_groups",
    "limits.max_staleness": "limits_max_staleness_steps",
    "limits.rollout_steps": "limits_rollout_steps",
    "rollout.max_new_tokens": "rollout_max_new_tokens",
    "rollout.max_sequences": "rollout_max_sequences",
    "verifier.max_unknown_share": "verifier_max_unknown_ratio",
    "weights.timeout_s": "weights_timeout_seconds",
}
"""By path in the recipe: the metric's name after `penstock_setting_`, ending with the unit."""

STEP_METRICS = {
    name: Gauge(f"penstock_step_{family}", f"{text} Of the last committed rollout step.", ["run"])
    for name, (family, text) in _STEP_METRICS.items()
}
STEP_JUDGED_GROUPS = Gauge(
    "penstock_step_judged_groups",
    "Groups judged since the previous batch, by number of correct responses. Of the last committed rollout step.",
    ["run", "correct"],
)
"""The step metrics `groups_with_N_of_SIZE_correct`, whose number depends on the recipe."""
REWARD_SCORE = Gauge(
    "penstock_reward_score",
    "Mean score of a named reward, before filtering. Of the last committed rollout step.",
    ["run", "reward"],
)
"""The step metrics `reward_NAME`, whose names depend on the recipe."""
SETTINGS = {
    path: Gauge(f"penstock_setting_{family}", f"The run's setting {path}.", ["run"])
    for path, family in _SETTINGS.items()
}
_BY_CORRECT = re.compile(r"groups_with_(\d+)_of_\d+_correct")


def table_families() -> Iterator[Gauge]:
    """Every family of this module: the settings', then the step metrics'."""
    yield from SETTINGS.values()
    yield from STEP_METRICS.values()
    yield STEP_JUDGED_GROUPS
    yield REWARD_SCORE


def step_gauge(run: str, name: str) -> Gauge | None:
    """The gauge that shows the step metric `name` of `run`; None for a name that no table has."""
    if found := _BY_CORRECT.fullmatch(name):
        return STEP_JUDGED_GROUPS.labels(run, found[1])
    for reward in reward_names([name]):
        return REWARD_SCORE.labels(run, reward)
    family = STEP_METRICS.get(name)
    return family.labels(run) if family else None


def show_step(run: str, metrics: Mapping[str, float]) -> None:
    """Show the metrics of a committed rollout step, and remove those of `run` that the step does not have.

    A name without a family, such as one that another release wrote, is ignored.
    """
    REWARD_SCORE.remove_by_labels({"run": run})
    shown = [(gauge, value) for name, value in metrics.items() if (gauge := step_gauge(run, name))]
    for gauge, value in shown:
        gauge.set(value)
    for name, family in STEP_METRICS.items():
        if name not in metrics:
            family.remove_by_labels({"run": run})
