"""Owns the dashboard of a run as a whole: how far it is, whether it learns, what it costs, what hinders it.

Must not go into a plane; the other dashboards do.
"""

from __future__ import annotations

from deploy.observability.dashboards.queries import chosen, events, most, rate, setting, step
from deploy.observability.panels import Board, Panel

_WANTED = f"({setting('limits.rollout_steps')} * {setting('limits.groups_per_step')})"
_TRAINED = most("penstock_groups", "run", 'state="trained"')
_READY = most("penstock_processes", "run, service", 'state="ready"')
_ENDED = chosen("penstock_groups", 'state=~"trained|filtered|stale|dead"')
_FAULTS = (
    "batch-lost|batch-repaired|batch-too-old|checkpoint-damaged|checkpoint-failed|group-dead|group-orphaned|"
    "learner-restarted|look-failed|non-finite-gradient|payload-damaged|redis-memory-short|restart-failed|"
    "sampler-restarted|scaling-failed|service-failed|stalled|waiting|weight-sync-failed|weights-late"
)

RUN = Board(
    uid="penstock-run",
    title="Penstock / Run overview",
    tells="How far each run is, whether it learns, how fast, and what hinders it.",
    rows={
        "Now": (
            Panel(
                "State", "Which state each run is in, over time. A run that has ended is shown for an hour.",
                {"{{run}} {{state}}": most("penstock_run_state", "run, state")}, kind="states", span=10,
            ),
            Panel(
                "Trained so far", "Groups trained, of limits.rollout_steps x limits.groups_per_step.",
                {"{{run}}": f"{_TRAINED} / {_WANTED}"},
                "percentunit", kind="bars", span=6, low=0, high=1,
            ),
            Panel(
                "Alerts that fire", "Alerts of these runs, and those that concern no single run. Each has a runbook.",
                {"": 'ALERTS{alertstate="firing", run=~"$run|"}'}, kind="table",
            ),
        ),
        "Does it learn?": (
            Panel(
                "Accuracy", "Share of right answers among everything that was judged, before any filtering.",
                step("accuracy"), "percentunit", low=0, high=1,
            ),
            Panel(
                "Reward", "Mean shaped reward: +1 right, -1 wrong, less the punishment of overlong responses.",
                step("reward"), low=-2, high=1,
            ),
            Panel(
                "Evaluations", "avg@k, pass@k and maj@k of each held-out set, of its last evaluation.",
                {"{{run}} {{set}} {{score}}": most("penstock_evaluation", "run, set, score")},
                "percentunit", low=0, high=1,
            ),
            Panel(
                "Entropy", "Mean entropy of the policy per token, in nats. Towards 0 it no longer explores.",
                step("entropy"), low=0,
            ),
            Panel(
                "Response length", "Mean tokens a response, and the most there may be (rollout.max_new_tokens).",
                {**step("response_length"), "{{run}} limit": setting("rollout.max_new_tokens")}, low=0,
            ),
            Panel(
                "Truncated", "Share of the responses that reach the length limit.",
                step("truncated_share"), "percentunit", {0.2: "orange", 0.3: "red"}, low=0,
            ),
        ),
        "How fast?": (
            Panel(
                "Generated tokens", "Response tokens a second, of the whole fleet, evaluation too.",
                {"{{run}}": rate("penstock_response_tokens_total", "run")}, low=0,
            ),
            Panel(
                "Groups a minute", "By how they ended.",
                {"{{run}} {{state}}": f"60 * max by (run, state) (deriv({_ENDED}[10m]))"},
                kind="stack", low=0,
            ),
            Panel(
                "Price of a trained token", "Response tokens judged for each that was trained; 1 wastes nothing.",
                step("rollout_tokens_per_trained_token"), low=0,
            ),
            Panel(
                "Seconds of a rollout step", "Optimizer steps, and the weight sync behind them.",
                step("learning_seconds", "publish_seconds"), "s", low=0, span=12,
            ),
            Panel(
                "Policy version", "Versions published by the learner.",
                {"{{run}}": most("penstock_policy_version", "run", 'service="learner"')}, low=0, span=12,
            ),
        ),
        "What hinders it?": (
            Panel(
                "Processes that are lacking", "Processes wanted and not ready, by service.",
                {"{{run}} {{service}}": f"{most('penstock_replicas_wanted', 'run, service')} - {_READY}"},
                thresholds={1: "red"}, low=0,
            ),
            Panel(
                "Waits, as a share of their deadline", "What is waited for, 1 being the wait's deadline.",
                {
                    "{{run}} {{service}} {{wait}}": f"{most('penstock_wait_seconds', 'run, service, wait')} / "
                    f"{most('penstock_wait_deadline_seconds', 'run, service, wait')}"
                },
                "percentunit", {0.5: "orange", 1: "red"}, low=0,
            ),
            Panel(
                "Faults and recoveries", "Events that tell of a fault or of its repair, in 10 minutes.",
                events(_FAULTS), kind="stack", low=0,
            ),
            Panel(
                "Starvation", "Rung of the ladder: 1 wider draw, 2 boundary prompts, 3 partial batches, 4 a pause.",
                {"{{run}}": most("penstock_starvation_rung", "run")}, thresholds={1: "orange", 4: "red"}, low=0, high=4,
            ),
            Panel(
                "Staleness", "Versions between a response's oldest token and the policy that trains it.",
                {**step("staleness_mean", "staleness_max"), "{{run}} limit": setting("limits.max_staleness")}, low=0,
            ),
            Panel(
                "Redis memory", "Share of maxmemory; above 85 % nothing is dispatched. 0 where there is no limit.",
                {"{{run}}": most("penstock_redis_memory_share", "run")},
                "percentunit", {0.7: "orange", 0.85: "red"}, low=0, high=1,
            ),
        ),
    },
)  # fmt: skip
