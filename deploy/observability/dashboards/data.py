"""Owns the dashboard of the data plane: streams, leases, sampling, what was given up, Redis.

Must not show what is in a message.
"""

from __future__ import annotations

from deploy.observability.dashboards.queries import chosen, events, grown, most, rate, setting, step
from deploy.observability.panels import Board, Panel

_STREAM = 'stream=~"$stream"'
_OF = "{{run}} {{stream}}"
_ENDED = chosen("penstock_groups", 'state=~"trained|filtered|stale|dead"')
_DISPATCHED = most("penstock_groups", "run", 'state="dispatched"')
_ALL_ENDS = most("penstock_groups", "run, state", 'state=~"trained|filtered|stale|dead|pending"')

DATA = Board(
    uid="penstock-data",
    title="Penstock / Data plane",
    tells="Groups from prompt to batch: streams and leases, sampling, dead letters, Redis.",
    variables={"stream": 'label_values(penstock_stream_entries{run=~"$run"}, stream)'},
    rows={
        "Streams": (
            Panel(
                "Not yet delivered", "Entries that no consumer was given: what waits for whom.",
                {_OF: most("penstock_stream_lag", "run, stream", _STREAM)}, low=0,
            ),
            Panel(
                "Under lease", "Entries that a consumer works on.",
                {_OF: most("penstock_stream_pending", "run, stream", _STREAM)}, low=0,
            ),
            Panel(
                "Oldest lease without renewal", "Far above limits.lease_s nobody takes the entry over.",
                {
                    _OF: most("penstock_stream_oldest_idle_seconds", "run, stream", _STREAM),
                    "{{run}} limits.lease_s": setting("limits.lease_s"),
                },
                "s", low=0,
            ),
            Panel(
                "Entries held", "With those that were acked and not trimmed yet; bounded.",
                {_OF: most("penstock_stream_entries", "run, stream", _STREAM)}, low=0,
            ),
            Panel(
                "Messages", "A second, by stream and result.",
                {"{{run}} {{stream}} {{result}}": rate("penstock_messages_total", "run, stream, result", _STREAM)},
                low=0,
            ),
            Panel(
                "Taken over", "Messages whose lease had lapsed, in 10 minutes: their consumer died or stopped.",
                {_OF: grown("penstock_redelivered_messages_total", "run, stream", _STREAM)},
                thresholds={20: "orange"}, low=0,
            ),
        ),
        "Sampling": (
            Panel(
                "Groups pending", "Dispatched and not ended, and the most there may be (limits.max_inflight_groups).",
                {
                    "{{run}} pending": most("penstock_groups", "run", 'state="pending"'),
                    "{{run}} limit": setting("limits.max_inflight_groups"),
                },
                low=0,
            ),
            Panel(
                "Groups a minute", "By how they ended.",
                {"{{run}} {{state}}": f"60 * max by (run, state) (deriv({_ENDED}[10m]))"}, kind="stack", low=0,
            ),
            Panel(
                "Counters", "dispatched - (trained + filtered + stale + dead + pending): anything but 0 is a fault.",
                {"{{run}}": f"{_DISPATCHED} - sum by (run) ({_ALL_ENDS})"},
                thresholds={1: "red"},
            ),
            Panel(
                "Starvation", "Rung of the ladder, 0 to 4.",
                {"{{run}}": most("penstock_starvation_rung", "run")}, thresholds={1: "orange", 4: "red"}, low=0, high=4,
            ),
            Panel(
                "Prompts never drawn again", "By cause: longer than the limit, or refused by the chat template.",
                {"{{run}} {{cause}}": most("penstock_prompts_dropped", "run, cause")}, low=0,
            ),
            Panel(
                "Price of a trained token", "Response tokens judged for each that was trained.",
                step("rollout_tokens_per_trained_token"), low=0,
            ),
        ),
        "Given up and damaged": (
            Panel(
                "Dead letters", "In 10 minutes, by cause. too-long and refused are faults of a prompt.",
                {"{{run}} {{cause}}": grown("penstock_dead_letters_total", "run, cause")},
                thresholds={1: "orange"}, low=0,
            ),
            Panel(
                "Damaged payloads", "In 10 minutes, by who found them missing or damaged.",
                {"{{run}} {{service}}": grown("penstock_damaged_payloads_total", "run, service")},
                thresholds={1: "red"}, low=0,
            ),
            Panel(
                "Batches and groups that were lost", "Batches made good, groups found on no stream, in 10 minutes.",
                events("batch-lost|batch-repaired|batch-too-old|group-orphaned"), thresholds={1: "orange"}, low=0,
            ),
        ),
        "Redis and disk": (
            Panel(
                "Redis memory", "Share of maxmemory; above 85 % nothing is dispatched. 0 where there is no limit.",
                {"{{run}}": most("penstock_redis_memory_share", "run")},
                "percentunit", {0.7: "orange", 0.85: "red"}, span=12, low=0, high=1,
            ),
            Panel(
                "Waits for room", "Seconds that checkpoints, the archive or responses have been waiting for room.",
                {
                    "{{run}} {{service}} {{wait}}": most(
                        "penstock_wait_seconds", "run, service, wait", 'wait=~"disk|checkpoint-owed|redis-memory"'
                    )
                },
                "s", {60: "red"}, span=12, low=0,
            ),
        ),
    },
    since="now-1h",
)  # fmt: skip
