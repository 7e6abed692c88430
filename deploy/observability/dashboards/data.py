"""Owns the dashboard of the data plane: streams, leases, sampling, dead letters, Redis.

Must not show the content of a message.
"""

from __future__ import annotations

from deploy.observability.dashboards.queries import (
    RELEASE,
    chosen,
    events,
    grouped,
    increase,
    most,
    rate,
    setting,
    step,
)
from deploy.observability.panels import Board, Panel

_STREAM = 'stream=~"$stream"'
_OF = "{{run}} {{stream}}"
_ENDED = chosen("penstock_groups", 'state=~"trained|filtered|stale|dead"')
_DISPATCHED = most("penstock_groups", "run", 'state="dispatched"')
_ALL_ENDS = most("penstock_groups", "run, state", 'state=~"trained|filtered|stale|dead|pending"')

DATA = Board(
    uid="penstock-data",
    title="Penstock / Data plane",
    description="Groups from prompt to batch: streams, leases, sampling, dead letters, Redis.",
    variables={"stream": f"label_values({chosen('penstock_stream_entries')}, stream)"},
    rows={
        "Streams": (
            Panel(
                "Not yet delivered",
                "Entries that no consumer has received yet.",
                {_OF: most("penstock_stream_lag_entries", "run, stream", _STREAM)},
                low=0,
            ),
            Panel(
                "Leased entries",
                "Entries that a consumer is processing.",
                {_OF: most("penstock_stream_pending_entries", "run, stream", _STREAM)},
                low=0,
            ),
            Panel(
                "Oldest lease without renewal",
                "A value far above limits.lease_s means that no consumer claims the entry.",
                {
                    _OF: most("penstock_stream_oldest_idle_seconds", "run, stream", _STREAM),
                    "{{run}} limits.lease_s": setting("limits_lease_seconds"),
                },
                "s",
                low=0,
            ),
            Panel(
                "Stream length",
                "Includes acknowledged entries that are not trimmed yet; bounded.",
                {_OF: most("penstock_stream_entries", "run, stream", _STREAM)},
                low=0,
            ),
            Panel(
                "Messages",
                "Per second, by stream and result.",
                {"{{run}} {{stream}} {{result}}": rate("penstock_messages_total", "run, stream, result", _STREAM)},
                low=0,
            ),
            Panel(
                "Redelivered messages",
                "Messages whose lease expired in 10 minutes because their consumer died or hung.",
                {_OF: increase("penstock_redelivered_messages_total", "run, stream", _STREAM)},
                thresholds={20: "orange"},
                low=0,
            ),
        ),
        "Sampling": (
            Panel(
                "Pending groups",
                "Groups in flight, and their limit (limits.max_inflight_groups).",
                {
                    "{{run}} pending": most("penstock_groups", "run", 'state="pending"'),
                    "{{run}} limit": setting("limits_max_inflight_groups"),
                },
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
                "Group balance",
                "dispatched - (trained + filtered + stale + dead + pending): any value except 0 is a fault.",
                {"{{run}}": f"{_DISPATCHED} - sum {grouped('run')} ({_ALL_ENDS})"},
                thresholds={1: "red"},
            ),
            Panel(
                "Starvation",
                "Starvation level, 0 to 4.",
                {"{{run}}": most("penstock_starvation_level", "run")},
                thresholds={1: "orange", 4: "red"},
                low=0,
                high=4,
            ),
            Panel(
                "Dropped prompts",
                "Prompts that are not drawn again, by cause: too long, rejected by the chat template, or unjudgeable.",
                {"{{run}} {{cause}}": most("penstock_dropped_prompts", "run, cause")},
                low=0,
            ),
            Panel(
                "Generated tokens per trained token",
                "Response tokens judged, per token in the loss.",
                step("rollout_to_trained_tokens_ratio"),
                low=0,
            ),
        ),
        "Dead letters and damage": (
            Panel(
                "Dead letters",
                "In 10 minutes, by cause. The causes too-long and refused are faults of the prompt itself.",
                {"{{run}} {{cause}}": increase("penstock_dead_letters_total", "run, cause")},
                thresholds={1: "orange"},
                low=0,
            ),
            Panel(
                "Damaged payloads",
                "Payloads found missing or damaged in 10 minutes, by service.",
                {"{{run}} {{service}}": increase("penstock_damaged_payloads_total", "run, service")},
                thresholds={1: "red"},
                low=0,
            ),
            Panel(
                "Lost batches and groups",
                "Recovered batches, and groups without a message on any stream, in 10 minutes.",
                events("archive-differs|batch-lost|group-orphaned|group-restored"),
                thresholds={1: "orange"},
                low=0,
            ),
        ),
        "Redis and disk": (
            Panel(
                "Redis memory",
                "Used share of maxmemory; above 85 % no run dispatches new work. 0 if maxmemory is not set.",
                {"{{run}}": most("penstock_redis_memory_ratio", "run")},
                "percentunit",
                {0.7: "orange", 0.85: "red"},
                low=0,
                high=1,
            ),
            Panel(
                "Redis' answers",
                "How long Redis has not answered the process of API and controller; 0 while it answers.",
                {
                    "{{namespace}}/{{release}} {{service}}": (
                        f'max {grouped("service")} (penstock_redis_outage_seconds{{{RELEASE}, service="api"}})'
                    )
                },
                "s",
                {60: "red"},
                low=0,
            ),
            Panel(
                "Waits for space",
                "How long checkpoints, the archive or responses have been waiting for space.",
                {
                    "{{run}} {{service}} {{wait}}": most(
                        "penstock_wait_seconds",
                        "run, service, wait",
                        'wait=~"disk|checkpoint-owed|.+-memory"',
                    )
                },
                "s",
                {60: "red"},
                low=0,
            ),
        ),
    },
    since="now-1h",
)
