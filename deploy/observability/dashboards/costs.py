"""Owns the panels of what a run costs and of what tuning decides.

Must not lay out a dashboard.
"""

from __future__ import annotations

from deploy.observability.dashboards.queries import increase, most
from deploy.observability.panels import Panel

COSTS = (
    Panel(
        "Tokens by use",
        "Response tokens by what became of them; see docs/operations/costs.md.",
        {"{{run}} {{use}}": most("penstock_ledger_tokens", "run, use")},
        kind="stack",
        low=0,
    ),
    Panel(
        "GPU time by use",
        "GPU time that the run was charged, by the same uses and idle.",
        {"{{run}} {{use}}": most("penstock_gpu_seconds", "run, use")},
        "s",
        kind="stack",
        low=0,
    ),
    Panel(
        "Cost",
        "What the run has cost so far, if the operator has set prices.",
        {"{{run}} {{currency}}": most("penstock_cost", "run, currency")},
        low=0,
    ),
)

TUNING = (
    Panel(
        "Idle learner",
        "The learner's share of the time spent waiting for batches, and tuning.idle_share.",
        {
            "{{run}}": most("penstock_tuning_idle_ratio", "run"),
            "{{run}} target": most("penstock_tuning_idle_target_ratio", "run"),
        },
        "percentunit",
        low=0,
        high=1,
    ),
    Panel(
        "Staleness that tuning measured",
        "Mean staleness over the same rollout steps, and tuning.staleness.",
        {
            "{{run}}": most("penstock_tuning_staleness_steps", "run"),
            "{{run}} target": most("penstock_tuning_staleness_target_steps", "run"),
        },
        low=0,
    ),
    Panel(
        "Decisions of tuning",
        "In 10 minutes; with tuning.mode report they were only reported.",
        {
            "{{run}} {{knob}} {{direction}} ({{mode}})": increase(
                "penstock_tuning_decisions_total", "run, knob, direction, mode"
            )
        },
        kind="stack",
        low=0,
    ),
)
