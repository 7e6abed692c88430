"""Owns the dashboard of learning: the policy, clipping, off-policyness, the batch, checkpoints, evaluations.

Must not show how samples are generated; the data plane's dashboard does.
"""

from __future__ import annotations

from deploy.observability.dashboards.queries import events, increase, most, setting, step
from deploy.observability.panels import Board, Panel

LEARNER = Board(
    uid="penstock-learner",
    title="Penstock / Learner",
    description="Effect of each rollout step on the policy: the metrics that the DAPO paper monitors, and safeguards.",
    rows={
        "Policy": (
            Panel("Entropy", "Mean entropy per token, in nats.", step("entropy_nats"), low=0),
            Panel(
                "Mean token probability",
                "Mean probability of the trained tokens; close to 1, the policy is certain.",
                step("mean_token_probability_ratio"),
                "percentunit",
                low=0,
                high=1,
            ),
            Panel("Loss", "Mean over the optimizer steps of a rollout step.", step("loss")),
            Panel("Gradient norm", "Mean norm before clipping (learner.gradient_clip).", step("gradient_norm"), low=0),
            Panel(
                "Learning rate",
                "Constant after the warm-up (learner.warmup_rollout_steps).",
                step("learning_rate"),
                low=0,
            ),
            Panel(
                "Skipped optimizer steps",
                "Non-finite gradients in 15 minutes; several in a row fail the run.",
                {"{{run}}": increase("penstock_skipped_optimizer_steps_total", "run", within="15m")},
                thresholds={1: "red"},
                low=0,
            ),
        ),
        "Clipping": (
            Panel(
                "Clipped tokens",
                "Ratio of clipped tokens: low, high, dual clip. They have no gradient, except with clipping: cispo.",
                step("clip_low_ratio", "clip_high_ratio", "dual_clip_ratio"),
                "percentunit",
                low=0,
            ),
            Panel(
                "Ratio",
                "Current over proximal probability: percentiles and mean of the clipped ratio.",
                {
                    **step("policy_p1_ratio", "policy_p50_ratio", "policy_p99_ratio", "policy_mean_ratio"),
                    "{{run}} 1 + clip_high": f"1 + {setting('algorithm_clip_high_ratio')}",
                    "{{run}} 1 - clip_low": f"1 - {setting('algorithm_clip_low_ratio')}",
                },
                span=10,
            ),
            Panel("KL to the reference", "Only if algorithm.kl_coefficient is set.", step("reference_kl_nats"), span=6),
            Panel(
                "Value head",
                "Only with algorithm.advantage = gae: loss, explained variance of the returns, clipped tokens.",
                step("value_loss", "value_explained_variance_ratio", "value_clip_ratio"),
                span=6,
            ),
        ),
        "Distance from the sampling policy": (
            Panel(
                "Effective sample size",
                "Of the raw importance weights and of the applied ones, relative to the number of tokens.",
                step("effective_sample_size_ratio", "weight_effective_sample_size_ratio"),
                "percentunit",
                low=0,
                high=1,
            ),
            Panel(
                "Mismatch KL",
                "KL(behaviour || proximal) per token: staleness, and differences between engine and learner.",
                step("mismatch_kl_nats"),
                thresholds={0.02: "orange", 0.05: "red"},
                low=0,
            ),
            Panel(
                "Log-prob difference",
                "Between learner and engines with the same weights, per token: rounding, unless a replica is stale.",
                step("logprob_difference_mean_nats", "logprob_difference_p99_nats"),
                low=0,
            ),
            Panel(
                "Importance",
                "Proximal over behaviour probability: percentiles over tokens.",
                step("importance_p1_ratio", "importance_p50_ratio", "importance_p99_ratio"),
                low=0,
            ),
            Panel(
                "Corrected tokens",
                "Ratio of tokens whose weight was capped, or masked to 0.",
                step("capped_ratio", "masked_ratio"),
                "percentunit",
                low=0,
            ),
            Panel(
                "Staleness",
                "Versions between a response's oldest token and the policy that is trained on it.",
                {
                    **step("staleness_mean_steps", "staleness_max_steps"),
                    "{{run}} limit": setting("limits_max_staleness_steps"),
                },
                low=0,
            ),
            Panel(
                "Trained tokens",
                "Tokens in the loss of a rollout step, and those of them that were sampled with its first weights.",
                step("trained_tokens", "compared_tokens"),
                low=0,
            ),
        ),
        "Batch": (
            Panel(
                "Groups by correct responses",
                "Judged groups by number of correct responses; groups with all or none correct are filtered.",
                {"{{run}} {{correct}} correct": most("penstock_step_judged_groups", "run, correct")},
                kind="stack",
                span=12,
                low=0,
            ),
            Panel(
                "Responses without a gradient",
                "Ratio of trained responses with advantage 0.",
                step("zero_advantage_ratio"),
                "percentunit",
                {0.3: "orange", 0.5: "red"},
                span=6,
                low=0,
            ),
            Panel(
                "Judged groups by result",
                "Since the previous batch: kept, filtered, stale, dead, screened out.",
                step("kept_groups", "filtered_groups", "stale_groups", "dead_groups", "screened_out_groups"),
                span=6,
                low=0,
            ),
        ),
        "Time": (
            Panel(
                "Learning", "Duration of the optimizer steps of a rollout step.", step("learning_seconds"), "s", low=0
            ),
            Panel(
                "Publishing", "Time until the fleet held the new policy version.", step("publish_seconds"), "s", low=0
            ),
            Panel(
                "Checkpoints",
                "Checkpoints written, failed or found damaged, in 30 minutes.",
                events("checkpoint|checkpoint-failed|checkpoint-damaged", "30m"),
                low=0,
            ),
        ),
        "Evaluation": (
            Panel(
                "Scores",
                "avg@k, pass@k, maj@k of each set.",
                {"{{run}} {{set}} {{score}}": most("penstock_evaluation_score_ratio", "run, set, score")},
                "percentunit",
                span=12,
                low=0,
                high=1,
            ),
            Panel(
                "Dropped prompts",
                "Prompts of the last evaluation without an answer; the scores exclude them.",
                {"{{run}} {{set}}": most("penstock_evaluation_prompts", "run, set", 'result="dropped"')},
                thresholds={1: "orange"},
                low=0,
                span=12,
            ),
        ),
    },
    since="now-6h",
)
