"""Owns the metrics that rules and dashboards read and Penstock does not export: each with the program that does.

Must not list a metric that services.metrics has.
"""

from __future__ import annotations

OF_KUBERNETES = {
    "kube_pod_status_phase": "kube-state-metrics",
    "kube_pod_container_status_waiting_reason": "kube-state-metrics",
    "kube_pod_init_container_status_waiting_reason": "kube-state-metrics",
    "kube_statefulset_status_replicas_ready": "kube-state-metrics",
    "kube_deployment_status_replicas_available": "kube-state-metrics",
    "kubelet_volume_stats_available_bytes": "kubelet",
    "kubelet_volume_stats_capacity_bytes": "kubelet",
    "kuberay_cluster_info": "KubeRay 1.4 or newer",
    "DCGM_FI_DEV_XID_ERRORS": "DCGM exporter",
}
"""They have the label namespace, but none for the release."""
OF_THE_ENGINE = {
    "vllm:num_requests_running": "vLLM",
    "vllm:num_requests_waiting": "vLLM",
    "vllm:kv_cache_usage_perc": "vLLM",
    "vllm:num_preemptions_total": "vLLM",
    "vllm:prefix_cache_hits_total": "vLLM",
    "vllm:prefix_cache_queries_total": "vLLM",
    "vllm:request_time_per_output_token_seconds_bucket": "vLLM",
    "vllm:request_queue_time_seconds_bucket": "vLLM",
}
"""On the page of each rollout replica; Prometheus adds the labels of that target."""
OF_PROMETHEUS = {"up": "Prometheus", "ALERTS": "Prometheus"}
OF_EVERY_PROCESS = dict.fromkeys(
    (
        "process_cpu_seconds_total",
        "process_resident_memory_bytes",
        "process_open_fds",
        "process_max_fds",
    ),
    "prometheus-client",
)
EXTERNAL = {**OF_KUBERNETES, **OF_THE_ENGINE, **OF_PROMETHEUS, **OF_EVERY_PROCESS}
