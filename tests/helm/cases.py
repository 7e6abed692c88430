"""Owns the cases: the ways to install the chart that every test covers, and the objects that each expects to exist.

Must not assert anything.
"""

from __future__ import annotations

from typing import Any

from tests.helm.rendering import CHART, PROMETHEUS_API, RAY_API, Case, Document, default_values, load_all, merged

RAY = frozenset({8076, 8077, 8078, 8079, 52365, 10002, 19999})
METRICS = frozenset({9400, 9499})
"""Ports: Ray's own except the control store's; the first and the last of the metrics ports."""
DIGEST = "sha256:" + "0123456789abcdef" * 4
REDIS_KEYS = frozenset({"penstock-password", "ray-password"})
S3_KEYS = frozenset({"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"})
DRIVERS = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
"""The toleration of every pod that has GPUs, even if the values have none: clouds taint such nodes automatically."""
OF_RAY = {"key": "ray", "operator": "Exists", "effect": "NoSchedule"}
ROLES = ("cpu", "verifier", "verifier-code", "rollout", "learner")
GROUPS = ("head", *ROLES)
SECTIONS = {"verifier-code": "verifierCode", "functions": "rewardFunctions"}
"""Component -> its section of the values, where the two differ."""


def section(component: str) -> str:
    """The section of the values that describes a component."""
    return SECTIONS.get(component, component)


def _redis(**external: Any) -> dict[str, Any]:
    return {"existingSecret": "own-redis", "external": {"enabled": True, **external}}


def _placement(name: str) -> dict[str, Any]:
    """Where the pods of one component are placed; it differs for each component, so that a mix-up is detected."""
    return {
        "nodeSelector": {"pool": name},
        "tolerations": [{"key": "pool", "operator": "Equal", "value": name, "effect": "NoSchedule"}],
        "priorityClassName": f"priority-{name}",
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": f"topology.example/{name}",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {
                    "matchLabels": {"app.kubernetes.io/component": name, "app.kubernetes.io/instance": "demo"}
                },
            }
        ],
    }


PLACED = ("api", "functions", *GROUPS)
MONITORING: dict[str, Any] = {
    "metrics": {
        "serviceMonitor": {"enabled": True, "interval": "20s", "additionalLabels": {"release": "watch"}},
        "scrapeConfig": {"enabled": True, "interval": "25s", "additionalLabels": {"release": "watch"}},
        "podMonitor": {"enabled": True, "interval": "35s", "additionalLabels": {"release": "watch"}},
        "rules": {
            "enabled": True,
            "additionalLabels": {"release": "watch"},
            "runbooks": "https://example.org/runbooks",
        },
        "dashboards": {"enabled": True, "annotations": {"folder": "Penstock"}},
    }
}
CONTROLLER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress-nginx"}}}
INGRESS: dict[str, Any] = {
    "networkPolicy": {"clients": [CONTROLLER]},
    "api": {
        "ingress": {
            "enabled": True,
            "className": "nginx",
            "host": "penstock.example.org",
            "tlsSecret": "own-tls",
            "annotations": {"nginx.ingress.kubernetes.io/auth-url": "https://sign-in.example.org"},
        }
    },
}
S3: dict[str, Any] = {
    "storage": {
        "kind": "s3",
        "s3": {"url": "s3://bucket/team", "endpoint": "https://minio.example.org:9000", "existingSecret": "own-s3"},
    },
    "networkPolicy": {"objectStore": {"ports": [9000]}},
}
SENTINEL: dict[str, Any] = {
    "redis": _redis(
        tls=True,
        caSecret="own-ca",
        rayAddress="redis-primary.data:6380",
        sentinel={
            "addresses": ["sentinel-0.data:26379", "sentinel-1.data:26379"],
            "service": "penstock",
            "passwordKey": "sentinel-password",
        },
    )
}

DEFAULTS = Case("defaults")
CPU = Case("cpu profile", files=("values-cpu.yaml",))
EXTERNAL_REDIS = Case(
    "external Redis",
    {"redis": _redis(address="redis.data:6379")},
    external={("Secret", "own-redis"): REDIS_KEYS},
)
EXTERNAL_REDIS_TLS = Case(
    "external Redis over TLS",
    {"redis": _redis(address="redis.data:6380", tls=True, caSecret="own-ca", database=3)},
    external={("Secret", "own-redis"): REDIS_KEYS, ("Secret", "own-ca"): frozenset({"ca.crt"})},
)
SENTINELS = Case(
    "Sentinels over TLS",
    SENTINEL,
    external={("Secret", "own-redis"): REDIS_KEYS | {"sentinel-password"}, ("Secret", "own-ca"): frozenset({"ca.crt"})},
)
OWN_TLS = Case(
    "TLS of the chart's Redis",
    {"redis": {"tls": {"existingSecret": "own-redis-tls"}}},
    external={("Secret", "own-redis-tls"): frozenset({"tls.crt", "tls.key", "ca.crt"})},
)
OBJECT_STORE = Case("object store", S3, external={("Secret", "own-s3"): S3_KEYS})
OBJECT_STORE_BY_ROLE = Case(
    "object store with the account's role, a volume per pod",
    {
        "storage": {"kind": "s3", "s3": {"url": "s3://bucket", "scratch": {"storageClass": "fast", "size": "300Gi"}}},
        "serviceAccount": {
            "annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/penstock"},
            "podLabels": {"azure.workload.identity/use": "true"},
        },
    },
)
HUB = Case(
    "the hub by a mirror, with a token",
    {"hub": {"enabled": True, "endpoint": "https://mirror.example.org:8444/hub", "existingSecret": "own-hub"}},
    external={("Secret", "own-hub"): frozenset({"HF_TOKEN"})},
)
TRACKED = Case(
    "trackers with a server and credentials",
    {"tracking": {"enabled": True, "mlflow": "http://mlflow.example.org:5000", "existingSecret": "own-trackers"}},
    external={
        ("Secret", "own-trackers"): frozenset(
            {"WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"}
        )
    },
)
SHARED_CLAIM = Case(
    "own claim for many nodes",
    {"storage": {"claim": {"existingClaim": "own-claim", "accessMode": "ReadWriteMany"}}},
    external={("PersistentVolumeClaim", "own-claim"): frozenset()},
)
NEW_SHARED_CLAIM = Case(
    "new claim for many nodes",
    {"storage": {"claim": {"accessMode": "ReadWriteMany", "storageClass": "nfs", "size": "2Ti", "keep": False}}},
)
EXISTING_SECRETS = Case(
    "existing secrets",
    {
        "redis": {"existingSecret": "own-redis"},
        "ray": {"authSecret": "own-ray"},
        "imagePullSecrets": [{"name": "own-registry"}],
    },
    external={
        ("Secret", "own-redis"): REDIS_KEYS,
        ("Secret", "own-ray"): frozenset({"auth_token"}),
        ("Secret", "own-registry"): frozenset({".dockerconfigjson"}),
    },
)
MONITORED = Case("monitoring", MONITORING, api_versions=(*RAY_API, *PROMETHEUS_API))
PUBLISHED = Case("ingress", INGRESS, external={("Secret", "own-tls"): frozenset({"tls.crt", "tls.key"})})
PLACEMENT = Case(
    "every component on its own nodes",
    {
        **{section(name): _placement(name) for name in PLACED if name != "functions"},
        "rewardFunctions": {"enabled": True, **_placement("functions")},
        "redis": {key: value for key, value in _placement("redis").items() if key != "topologySpreadConstraints"},
        "ray": {"nodeSelector": {"zone": "a"}, "tolerations": [OF_RAY]},
        "storage": {"claim": {"accessMode": "ReadWriteMany"}},
    },
    external={("PriorityClass", f"priority-{name}"): frozenset() for name in (*PLACED, "redis")},
)
PINNED_DIGESTS = {"cpu": DIGEST, "gpu": "sha256:" + ("0123456789abcdef" * 4)[::-1]}
PINNED = Case(
    "images by digest",
    {
        "image": {
            "repository": "registry.example.org/penstock",
            "cpu": {"digest": PINNED_DIGESTS["cpu"]},
            "gpu": {"digest": PINNED_DIGESTS["gpu"]},
        },
        "redis": {"image": {"digest": DIGEST}},
    },
)
SELECTED_PEERS = Case(
    "network peers by selector",
    {
        "networkPolicy": {
            "clients": [CONTROLLER],
            "kubernetesApi": {"peers": [{"ipBlock": {"cidr": "10.96.0.1/32"}}], "ports": [443]},
            "extraEgress": [
                {"to": [{"ipBlock": {"cidr": "198.51.100.0/24"}}], "ports": [{"port": 443, "protocol": "TCP"}]}
            ],
        },
        "ray": {"dashboard": True},
    },
)
OPEN_NETWORK = Case("no network policies", {"networkPolicy": {"enabled": False}})
RDMA = Case(
    "RDMA between learner and rollout",
    {
        "storage": {"claim": {"accessMode": "ReadWriteMany"}},
        **{
            role: {
                "extraResources": {"vpc.amazonaws.com/efa": 4, "hugepages-2Mi": "5120Mi"},
                "runtimeClassName": "nvidia",
                "env": [{"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}],
            }
            for role in ("rollout", "learner")
        },
    },
)
REWARDS: dict[str, Any] = {
    "verifier": {
        "rewardHosts": ["rewards.internal", "judge.example.org"],
        "rewardEgress": [
            {"to": [{"ipBlock": {"cidr": "198.51.100.0/24"}}], "ports": [{"port": 8443, "protocol": "TCP"}]}
        ],
        "rewardSecret": "own-rewards",
    },
    "verifierCode": {"maxReplicas": 3, "isolation": "gvisor", "runtimeClassName": "gvisor"},
    "rewardFunctions": {
        "enabled": True,
        "replicas": 2,
        "env": [{"name": "USER_REWARD_DATABASE", "value": "db.data:5432"}],
        "envFrom": [{"prefix": "USER_REWARD_", "secretRef": {"name": "own-database"}}],
        "volumes": [{"name": "tables", "persistentVolumeClaim": {"claimName": "own-tables", "readOnly": True}}],
        "volumeMounts": [{"name": "tables", "mountPath": "/tables", "readOnly": True}],
        "egress": [{"to": [{"ipBlock": {"cidr": "198.51.100.9/32"}}], "ports": [{"port": 5432, "protocol": "TCP"}]}],
    },
}
REWARDED = Case(
    "rewards over HTTP, functions with needs, programs",
    REWARDS,
    external={
        ("Secret", "own-rewards"): frozenset({"PENSTOCK_REWARD_KEY"}),
        ("Secret", "own-database"): frozenset({"PASSWORD"}),
        ("PersistentVolumeClaim", "own-tables"): frozenset(),
    },
)
EVERYTHING = Case(
    "everything at once",
    merged(
        merged(MONITORING, INGRESS),
        {
            **S3,
            "networkPolicy": {"objectStore": {"ports": [9000]}, "clients": [CONTROLLER]},
            "imagePullSecrets": [{"name": "own-registry"}],
            "ray": {"authSecret": "own-ray"},
            "commonLabels": {"team": "red"},
        },
    ),
    external={
        **PUBLISHED.external,
        **OBJECT_STORE.external,
        ("Secret", "own-ray"): frozenset({"auth_token"}),
        ("Secret", "own-registry"): frozenset({".dockerconfigjson"}),
    },
    api_versions=(*RAY_API, *PROMETHEUS_API),
)

CASES = [
    DEFAULTS,
    CPU,
    EXTERNAL_REDIS,
    EXTERNAL_REDIS_TLS,
    OWN_TLS,
    SENTINELS,
    OBJECT_STORE,
    OBJECT_STORE_BY_ROLE,
    HUB,
    TRACKED,
    SHARED_CLAIM,
    NEW_SHARED_CLAIM,
    EXISTING_SECRETS,
    MONITORED,
    PUBLISHED,
    PLACEMENT,
    PINNED,
    SELECTED_PEERS,
    OPEN_NETWORK,
    RDMA,
    REWARDED,
    EVERYTHING,
]


def values_of(case: Case) -> Document:
    """The chart's values merged with those of a case; each group has what all groups have."""
    values = default_values()
    for name in case.files:
        values = merged(values, load_all((CHART / name).read_text(encoding="utf-8"))[0])
    values = merged(values, case.values)
    standard = {"minReplicas": 0, "gpus": 0, **values["groupDefaults"]}
    return values | {section(role): merged(standard, values[section(role)]) for role in ROLES}
