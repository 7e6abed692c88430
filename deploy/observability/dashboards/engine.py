"""Owns the panels of vLLM's own metrics, which each rollout replica exports beside Penstock's.

Must not lay out a dashboard.
"""

from __future__ import annotations

from deploy.observability.dashboards.queries import increase, most, quantile, rate
from deploy.observability.panels import Panel

_REPLICA = "run, instance"
_OF = "{{run}} {{instance}}"

ENGINE = (
    Panel(
        "Requests in the engine",
        "Responses that a replica's engine generates, and those that wait for a place in its batch.",
        {
            f"{_OF} running": most("vllm:num_requests_running", _REPLICA),
            f"{_OF} waiting": most("vllm:num_requests_waiting", _REPLICA),
        },
        low=0,
    ),
    Panel(
        "KV cache in use",
        "Ratio of rollout.kv_cache_mib; close to 1, requests are preempted and computed again.",
        {_OF: most("vllm:kv_cache_usage_perc", _REPLICA)},
        "percentunit",
        {0.95: "orange"},
        low=0,
        high=1,
    ),
    Panel(
        "Preempted requests",
        "In 10 minutes; each is prefilled again. More KV cache or a lower rollout.max_sequences avoids them.",
        {_OF: increase("vllm:num_preemptions_total", _REPLICA)},
        thresholds={1: "orange"},
        low=0,
    ),
    Panel(
        "Prefix cache hits",
        "Ratio of prompt tokens that an earlier response of the group had computed. A weight sync clears the cache.",
        {
            _OF: " / ".join(rate(f"vllm:prefix_cache_{part}_total", _REPLICA) for part in ("hits", "queries")),
        },
        "percentunit",
        low=0,
        high=1,
    ),
    Panel(
        "Time per output token",
        "Median and 90th percentile over the responses that ended, without the wait for a place.",
        {
            "{{run}} median": quantile(0.5, "vllm:request_time_per_output_token_seconds", "run"),
            "{{run}} 90th percentile": quantile(0.9, "vllm:request_time_per_output_token_seconds", "run"),
        },
        "s",
        low=0,
    ),
    Panel(
        "Wait for a place",
        "90th percentile of the time that a response waited in the engine before its prefill.",
        {"{{run}}": quantile(0.9, "vllm:request_queue_time_seconds", "run")},
        "s",
        low=0,
    ),
)
