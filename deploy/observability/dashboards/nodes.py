"""Owns the panels of what Kubernetes and the GPUs report; they are empty without the exporters that they name.

Must not lay out a dashboard.
"""

from __future__ import annotations

from deploy.observability.dashboards.queries import RELEASE, grouped
from deploy.observability.panels import Panel

_HERE = 'namespace=~"$namespace"'
_PENDING = 'phase=~"Pending|Failed|Unknown"'
_WAITING = 'reason!~"ContainerCreating|PodInitializing"'

NODES = (
    Panel(
        "Pods that do not run",
        "Pods of these namespaces that are pending, failed or unknown (kube-state-metrics).",
        {"{{namespace}} {{phase}}": f"sum by (namespace, phase) (kube_pod_status_phase{{{_HERE}, {_PENDING}}})"},
        low=0,
    ),
    Panel(
        "Containers that wait",
        "Containers of these namespaces that cannot start, by reason, such as ImagePullBackOff (kube-state-metrics).",
        {
            "{{namespace}} {{reason}}": (
                f"sum by (namespace, reason) (kube_pod_container_status_waiting_reason{{{_HERE}, {_WAITING}}})"
            )
        },
        low=0,
    ),
    Panel(
        "Free space of claims",
        "Ratio that is free of each claim of these namespaces (kubelet).",
        {
            "{{namespace}} {{persistentvolumeclaim}}": (
                f"min by (namespace, persistentvolumeclaim) (kubelet_volume_stats_available_bytes{{{_HERE}}}"
                f" / kubelet_volume_stats_capacity_bytes{{{_HERE}}})"
            )
        },
        "percentunit",
        low=0,
        high=1,
    ),
    Panel(
        "Operator",
        "Available replicas of the KubeRay operator (kube-state-metrics).",
        {
            "{{namespace}}/{{deployment}}": "max by (namespace, deployment) "
            '(kube_deployment_status_replicas_available{deployment=~".*kuberay-operator.*"})'
        },
        low=0,
    ),
    Panel(
        "GPU errors",
        "In 10 minutes, by kind: xid, ecc, remap, as processes read them, and GPUs that a run avoids for one.",
        {
            "{{node}} {{device}} {{kind}}": (
                f"sum {grouped('node, device, kind')} (increase(penstock_gpu_errors_total{{{RELEASE}}}[10m]))"
            ),
            "{{node}} {{device}} {{kind}}, avoided": (
                f"max {grouped('node, device, kind')} (penstock_lost_gpus{{{RELEASE}}})"
            ),
        },
        thresholds={1: "red"},
        low=0,
    ),
    Panel(
        "Last XID",
        "Of each GPU in use by a pod of these namespaces; 0 for none (DCGM exporter).",
        {
            "{{Hostname}} {{gpu}} {{pod}}": (
                f'max by (namespace, Hostname, gpu, pod) (DCGM_FI_DEV_XID_ERRORS{{{_HERE}, exported_pod=""}})'
            ),
            # Scraped without honorLabels, `namespace` and `pod` are the exporter's own.
            "{{Hostname}} {{gpu}} {{exported_pod}}": (
                "max by (exported_namespace, Hostname, gpu, exported_pod) "
                f'(DCGM_FI_DEV_XID_ERRORS{{exported_{_HERE}, exported_pod!=""}})'
            ),
        },
        thresholds={1: "red"},
        low=0,
    ),
)
