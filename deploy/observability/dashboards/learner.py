"""Owns the dashboard of learning: the policy, clipping, off-policyness, the batch, checkpoints, evaluations.

Must not show how samples came to be; the data plane's does.
"""

from __future__ import annotations

from deploy.observability.dashboards.queries import events, grown, most, setting, step
from deploy.observability.panels import Board, Panel

LEARNER = Board(
    uid="penstock-learner",
    title="Penstock / Learner",
    tells="What each rollout step did to the policy: the monitoring set of the DAPO paper, and what guards it.",
    rows={
        "Policy": (
            Panel("Entropy", "Mean entropy per token, in nats.", step("entropy"), low=0),
            Panel(
                "Mean token probability", "Mean probability of the trained tokens; towards 1 the policy is certain.",
                step("mean_token_probability"), "percentunit", low=0, high=1,
            ),
            Panel("Loss", "Mean over the optimizer steps of a rollout step.", step("loss")),
            Panel("Gradient norm", "Mean norm before clipping (learner.gradient_clip).", step("gradient_norm"), low=0),
            Panel("Learning rate", "Constant after the warm-up in rollout steps.", step("learning_rate"), low=0),
            Panel(
                "Skipped optimizer steps", "Gradients that were not finite, in 15 minutes; in a row they fail it.",
                {"{{run}}": grown("penstock_skipped_optimizer_steps_total", "run", within="15m")},
                thresholds={1: "red"}, low=0,
            ),
        ),
        "Clipping": (
            Panel(
                "Clipped tokens", "Share of the tokens whose gradient is cut: low (A < 0), high (A > 0), dual clip.",
                step("clip_low_share", "clip_high_share", "dual_clip_share"), "percentunit", low=0,
            ),
            Panel(
                "Ratio", "Policy over proximal policy: percentiles and mean of what is clipped.",
                {
                    **step("ratio_p1", "ratio_p50", "ratio_p99", "ratio_mean"),
                    "{{run}} 1 + clip_high": f"1 + {setting('algorithm.clip_high')}",
                    "{{run}} 1 - clip_low": f"1 - {setting('algorithm.clip_low')}",
                },
                span=10,
            ),
            Panel("KL to the reference", "Only where algorithm.kl_coefficient is set.", step("kl_reference"), span=6),
        ),
        "How far from the policy that sampled": (
            Panel(
                "Effective sample size", "What the raw weights, and those in force, are worth: a share of the tokens.",
                step("effective_sample_size", "weight_effective_sample_size"), "percentunit", low=0, high=1,
            ),
            Panel(
                "Mismatch KL", "KL(behaviour || proximal) per token: staleness, and engine against learner.",
                step("mismatch_kl"), thresholds={0.02: "orange", 0.05: "red"}, low=0,
            ),
            Panel(
                "Importance", "Proximal over behaviour probability: percentiles over tokens.",
                step("importance_p1", "importance_p50", "importance_p99"), low=0,
            ),
            Panel(
                "Corrected tokens", "Share of the tokens whose weight was capped, or masked to 0.",
                step("capped_share", "masked_share"), "percentunit", low=0,
            ),
            Panel(
                "Staleness", "Versions between a response's oldest token and the policy that trains it.",
                {**step("staleness_mean", "staleness_max"), "{{run}} limit": setting("limits.max_staleness")}, low=0,
            ),
            Panel("Trained tokens", "Tokens in the loss of a rollout step.", step("trained_tokens"), low=0),
        ),
        "Batch": (
            Panel(
                "Groups by right answers", "Judged groups by how many answers were right: all or none is filtered.",
                {"{{run}} {{name}}": most("penstock_step_metric", "run, name", 'name=~"groups_with_.+_correct"')},
                kind="stack", span=12, low=0,
            ),
            Panel(
                "Responses without a gradient", "Share of the trained responses whose advantage is 0.",
                step("zero_advantage_share"), "percentunit", {0.3: "orange", 0.5: "red"}, span=6, low=0,
            ),
            Panel(
                "What became of judged groups", "Since the batch before: kept, filtered, stale, dead, screened out.",
                step("groups_kept", "groups_filtered", "groups_stale", "groups_dead", "groups_screened_out"),
                span=6, low=0,
            ),
        ),
        "Time": (
            Panel("Learning", "Seconds in a rollout step's optimizer steps.", step("learning_seconds"), "s", low=0),
            Panel("Publishing", "Seconds until the fleet held the new version.", step("publish_seconds"), "s", low=0),
            Panel(
                "Checkpoints", "Written, failed, found damaged, in 30 minutes.",
                events("checkpoint|checkpoint-failed|checkpoint-damaged", "30m"), low=0,
            ),
        ),
        "Evaluation": (
            Panel(
                "Scores", "avg@k, pass@k, maj@k of each set.",
                {"{{run}} {{set}} {{score}}": most("penstock_evaluation", "run, set, score")},
                "percentunit", span=12, low=0, high=1,
            ),
            Panel(
                "Dropped prompts", "Prompts of the last evaluation that got no answer; the scores leave them out.",
                {"{{run}} {{set}}": most("penstock_evaluation_prompts", "run, set", 'result="dropped"')},
                thresholds={1: "orange"}, low=0, span=12,
            ),
        ),
    },
    since="now-6h",
)  # fmt: skip
