"""Owns Ray's own autoscaler without a cluster: which pods it would add for requests that wait.

Must not know the chart's values; the callers render the cluster.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.helm.rendering import NAMESPACE, Document


def pods_added(cluster: Document, *requests: dict[str, float]) -> Counter[str]:
    """The pods by group that the autoscaler of an empty cluster launches for the requests, the minimums included.

    By the functions of the container in the head's pod: they read the RayCluster and schedule the requests.
    """
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil

    document: Any = {**cluster, "metadata": {**cluster["metadata"], "namespace": NAMESPACE}}
    config = AutoscalingConfig(_derive_autoscaling_config_from_ray_cr(document), skip_content_hash=True)
    demands = [ResourceRequestUtil.make(request) for request in requests]
    reply = ResourceDemandScheduler(event_logger=None).schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_worker_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count(demands),
        )
    )
    assert not reply.infeasible_resource_requests, reply.infeasible_resource_requests
    return Counter({launch.instance_type: launch.count for launch in reply.to_launch})
