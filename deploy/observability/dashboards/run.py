"""Owns the overview dashboard of a run: progress, learning, speed and problems.

Must not show details of one plane; the other dashboards do.
"""

from __future__ import annotations

from deploy.observability.dashboards.costs import COSTS, TUNING
from deploy.observability.dashboards.queries import chosen, events, grouped, most, rate, setting, step
from deploy.observability.panels import Board, Panel

_PLANNED = f"({setting('limits_rollout_steps')} * {setting('limits_groups_per_step')})"
_TRAINED = most("penstock_groups", "run", 'state="trained"')
_READY = most("penstock_processes", "run, service", 'state="ready"')
_ENDED = chosen("penstock_groups", 'state=~"trained|filtered|stale|dead"')
_FAULTS = (
    "archive-differs|batch-lost|checkpoint-damaged|checkpoint-failed|group-dead|group-orphaned|group-restored|"
    "groups-withdrawn|learner-restarted|logprobs-differ|look-failed|non-finite-gradient|payload-damaged|"
    "prompt-unjudgeable|prompts-withdrawn|redis-memory-partial|redis-memory-short|restart-failed|sampler-restarted|"
    "scaling-failed|service-failed|stalled|verdicts-unknown|waiting|weight-sync-failed|weights-late"
)

RUN = Board(
    uid="penstock-run",
    title="Penstock / Run overview",
    description="Progress, learning, speed and problems of each run.",
    rows={
        "Now": (
            Panel(
                "State",
                "State of each run over time. A finished run is shown for an hour.",
                {"{{run}} {{state}}": most("penstock_run_state", "run, state")},
                kind="states",
                span=10,
            ),
            Panel(
                "Training progress",
                "Trained groups, relative to limits.rollout_steps x limits.groups_per_step.",
                {"{{run}}": f"{_TRAINED} / {_PLANNED}"},
                "percentunit",
                kind="bars",
                span=6,
                low=0,
                high=1,
            ),
            Panel(
                "Firing alerts",
                "Alerts of these runs and of these releases. Each has a runbook.",
                {"": 'ALERTS{alertstate="firing", namespace=~"$namespace|", release=~"$release|", run=~"$run|"}'},
                kind="table",
            ),
        ),
        "Learning": (
            Panel(
                "Accuracy",
                "Ratio of correct responses among all with a known verdict, before filtering.",
                step("accuracy_ratio"),
                "percentunit",
                low=0,
                high=1,
                span=6,
            ),
            Panel(
                "Reward",
                "Mean shaped reward: +1 correct, -1 wrong, or 2 s - 1 for a score s (algorithm.reward), minus the "
                "penalty for overlong responses.",
                step("reward"),
                low=-2,
                high=1,
                span=6,
            ),
            Panel(
                "Scores",
                "Mean score of the known verdicts, and of each named reward, before filtering.",
                {"{{run}} score": most("penstock_step_score", "run")}
                | {"{{run}} {{reward}}": most("penstock_reward_score", "run, reward")},
                low=0,
                high=1,
                span=6,
            ),
            Panel(
                "Evaluations",
                "avg@k, pass@k, maj@k and mean score of each held-out set, from its last evaluation.",
                {"{{run}} {{set}} {{score}}": most("penstock_evaluation_score_ratio", "run, set, score")},
                "percentunit",
                low=0,
                high=1,
                span=6,
            ),
            Panel(
                "Entropy",
                "Mean entropy of the policy per token, in nats. Close to 0, the policy no longer explores.",
                step("entropy_nats"),
                low=0,
            ),
            Panel(
                "Response length",
                "Mean tokens per response, and their limit (rollout.max_new_tokens).",
                {**step("response_length_tokens"), "{{run}} limit": setting("rollout_max_new_tokens")},
                low=0,
            ),
            Panel(
                "Truncated",
                "Ratio of responses that reach the length limit.",
                step("truncated_ratio"),
                "percentunit",
                {0.2: "orange", 0.3: "red"},
                low=0,
            ),
        ),
        "Speed": (
            Panel(
                "Generated tokens",
                "Response tokens per second of the whole fleet, evaluation included.",
                {"{{run}}": rate("penstock_response_tokens_total", "run")},
                low=0,
            ),
            Panel(
                "Groups per minute",
                "By final state.",
                {"{{run}} {{state}}": f"60 * max {grouped('run, state')} (deriv({_ENDED}[10m]))"},
                kind="stack",
                low=0,
            ),
            Panel(
                "Generated tokens per trained token",
                "Response tokens judged, per token in the loss; 1 means no waste.",
                step("rollout_to_trained_tokens_ratio"),
                low=0,
            ),
            Panel(
                "Duration of a rollout step",
                "The optimizer steps; the weight sync, which overlaps the next step; how long that waited for it.",
                step("learning_seconds", "publish_seconds", "commit_wait_seconds"),
                "s",
                low=0,
                span=12,
            ),
            Panel(
                "Policy version",
                "Versions published by the learner.",
                {"{{run}}": most("penstock_policy_version", "run", 'service="learner"')},
                low=0,
                span=12,
            ),
        ),
        "Costs": COSTS,
        "Tuning": TUNING,
        "Problems": (
            Panel(
                "Missing processes",
                "Desired processes that are not ready, by service.",
                {"{{run}} {{service}}": f"{most('penstock_replicas_desired', 'run, service')} - {_READY}"},
                thresholds={1: "red"},
                low=0,
            ),
            Panel(
                "Waits relative to their deadline",
                "Duration of each wait; 1 is its deadline.",
                {
                    "{{run}} {{service}} {{wait}}": f"{most('penstock_wait_seconds', 'run, service, wait')} / "
                    f"{most('penstock_wait_deadline_seconds', 'run, service, wait')}"
                },
                "percentunit",
                {0.5: "orange", 1: "red"},
                low=0,
            ),
            Panel(
                "Faults and recoveries",
                "Events that report a fault or its recovery, in 10 minutes.",
                events(_FAULTS),
                kind="stack",
                low=0,
            ),
            Panel(
                "Starvation",
                "Starvation level: 1 wider draw, 2 boundary prompts, 3 partial batches, 4 pause.",
                {"{{run}}": most("penstock_starvation_level", "run")},
                thresholds={1: "orange", 4: "red"},
                low=0,
                high=4,
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
                "Redis memory",
                "Used share of maxmemory; above 85 % no run dispatches new work. 0 if maxmemory is not set.",
                {"{{run}}": most("penstock_redis_memory_ratio", "run")},
                "percentunit",
                {0.7: "orange", 0.85: "red"},
                low=0,
                high=1,
            ),
        ),
    },
)
