"""Owns the values that the chart must reject, and which of them can be tried at once.

Must not run Helm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Set = tuple[str, ...]
"""Arguments as users type them: `--set` parses them, `--set-string` keeps text, `--set-json` sets the exact value."""
Refused = tuple[Set, tuple[str, ...]]
"""Values, and what Helm must say of them, in one line."""

EXTERNAL: Set = ("redis.external.enabled=true", "redis.existingSecret=s")
REFUSED: list[tuple[Set, tuple[str, ...]]] = [
    # Numbers and their ranges.
    (("rollout.maxReplicas=-1",), ("rollout.maxReplicas", "greater than or equal to 1")),
    (("rollout.minReplicas=-1",), ("rollout.minReplicas", "greater than or equal to 0")),
    (("rollout.minReplicas=5",), ("rollout.minReplicas: 5 is not valid", "rollout.maxReplicas (4)")),
    (("learner.maxReplicas=many",), ("learner.maxReplicas", "integer")),
    (("learner.maxReplicas=1.5",), ("learner.maxReplicas", "integer")),
    (("verifier.cpus=0",), ("verifier.cpus", "greater than or equal to 1")),
    (("verifier.cpus=500m",), ("verifier.cpus", "integer")),
    (("rollout.gpus=-1",), ("rollout.gpus", "greater than or equal to 0")),
    (("cpu.gpus=1",), ("cpu.gpus", "0")),
    (("learner.gpuMemoryGiB=0",), ("learner.gpuMemoryGiB", "greater than 0")),
    (("rollout.gpuMemoryGiB=80Gi",), ("rollout.gpuMemoryGiB", "number")),
    (("verifier.gpuMemoryGiB=80",), ("verifier.gpuMemoryGiB", "null")),
    # Without them a group would be another one: no GPUs and the image without CUDA, or a single pod.
    *(
        ((f"json:{group}.{name}=null",), (group, f"{name} is required"))
        for group in ("cpu", "verifier", "verifierCode", "rollout", "learner")
        for name in ("minReplicas", "maxReplicas", *(("gpus",) if group in ("rollout", "learner") else ()))
    ),
    (("learner.minAvailable=0",), ("learner.minAvailable: 0 is not valid", "learner.disruptions: allow")),
    (("cpu.minReplicas=0",), ("cpu.minReplicas", "greater than or equal to 1")),
    (("api.replicas=0",), ("api.replicas", "greater than or equal to 1")),
    (("redis.maxMemoryMiB=8192",), ("redis.maxMemoryMiB: 8192 is not valid", "three quarters of redis.memory (8Gi)")),
    (
        ("redis.maxMemoryMiB=512", "redis.memory=1Gi", "redis.persistence.size=2047Mi"),
        ("redis.persistence.size: 2047Mi is not valid", "four times redis.maxMemoryMiB (2048Mi)"),
    ),
    (("networkPolicy.dns.ports={99999}",), ("networkPolicy.dns.ports", "65535")),
    # The peers of a policy: an empty list would open it to every endpoint, or on every port.
    *(
        ((f"json:networkPolicy.{name}={empty}",), (f"networkPolicy.{name.split('.')[0]}", word))
        for name in ("kubernetesApi.peers", "kubernetesApi.ports", "dns.peers", "dns.ports")
        for empty, word in (("[]", "at least 1 items"), ("null", f"{name.split('.')[1]} is required"))
    ),
    *(
        ((f"json:networkPolicy.{name}.peers={empty}",), (f"networkPolicy.{name}", word))
        for name in ("objectStore", "externalRedis", "hub", "tracking")
        for empty, word in (("[]", "at least 1 items"), ("null", "peers is required"))
    ),
    (("networkPolicy.kubernetesApi=null",), ("networkPolicy", "kubernetesApi is required")),
    (("networkPolicy.enabled=null",), ("networkPolicy", "enabled is required")),
    (("networkPolicy.prometheus.podSelector=null",), ("networkPolicy.prometheus", "podSelector is required")),
    (("json:networkPolicy.extraEgress=[{}]",), ("networkPolicy.extraEgress.0", "at least 1 properties")),
    (("uninstall.timeoutSeconds=1",), ("uninstall.timeoutSeconds", "30")),
    # Rewards.
    (("json:verifier.rewardHosts=[1]",), ("verifier.rewardHosts.0", "string")),
    *(
        (
            ("json:verifier.rewardHosts=[" + host + "]",),
            (f"verifier.rewardHosts[0]: {host} is not valid", "host's name"),
        )
        for host in ('"https://a"', '"a:80"', '"A.example"', '"*.example"', '"a/b"', '""', '"a,b"')
    ),
    (("json:verifier.rewardEgress=[{}]",), ("verifier.rewardEgress.0", "to is required")),
    (('json:verifier.rewardEgress=[{"to":[],"ports":[{"port":1}]}]',), ("verifier.rewardEgress.0.to", "at least 1")),
    (('json:verifier.rewardEgress=[{"to":[{"podSelector":{}}]}]',), ("verifier.rewardEgress.0", "ports is required")),
    (
        ('json:verifier.rewardEgress=[{"to":[{"podSelector":{}}],"ports":[{"port":1}]}]',),
        ("verifier.rewardHosts: [] is not valid", "verifier.rewardEgress"),
    ),
    (
        (
            "verifier.rewardHosts={a}",
            'json:verifier.rewardEgress=[{"to":[{"ipBlock":{"cidr":"0.0.0.0/0"}}],"ports":[{"port":443}]}]',
        ),
        ("verifier.rewardEgress[0].to[0].ipBlock.cidr", "except: [169.254.0.0/16]"),
    ),
    (("verifier.rewardSecret=Not_Valid",), ("verifier.rewardSecret", "pattern")),
    (("verifierCode.maxReplicas=-1",), ("verifierCode.maxReplicas", "greater than or equal to 0")),
    (("verifierCode.minReplicas=1",), ("verifierCode.minReplicas: 1 is not valid", "verifierCode.maxReplicas (0)")),
    (("verifierCode.gpus=1",), ("verifierCode.gpus", "0")),
    (("verifierCode.isolation=docker",), ("verifierCode.isolation", "gvisor", "bubblewrap")),
    (("verifierCode.isolation=gvisor",), ('verifierCode.runtimeClassName: "" is not valid', "gVisor")),
    (
        ("verifierCode.isolation=bubblewrap",),
        ('verifierCode.seccompProfile.type: "RuntimeDefault" is not valid', "Localhost or Unconfined"),
    ),
    (("verifierCode.seccompProfile.type=Localhost",), ("verifierCode.seccompProfile.localhostProfile", "Localhost")),
    (("verifierCode.appArmorProfile.localhostProfile=a",), ("verifierCode.appArmorProfile.localhostProfile",)),
    (("verifierCode.seccompProfile.type=None",), ("verifierCode.seccompProfile", "Unconfined")),
    (("rewardFunctions.replicas=0",), ("rewardFunctions.replicas", "greater than or equal to 1")),
    (("rewardFunctions.image=registry.example.org/rewards",), ("rewardFunctions.image", "pattern")),
    (
        ("rewardFunctions.env[0].name=DATABASE", "rewardFunctions.env[0].value=x"),
        ('rewardFunctions.env[0].name: "DATABASE" is not valid', "USER_REWARD_"),
    ),
    (("rewardFunctions.envFrom[0].secretRef.nam=a",), ("rewardFunctions.envFrom.0.secretRef", "nam")),
    (("json:rewardFunctions.egress=[{}]",), ("rewardFunctions.egress.0", "to is required")),
    (("rewardFunctions.podLabels.app\\.kubernetes\\.io/component=verifier",), ("rewardFunctions.podLabels",)),
    (
        ("rewardFunctions.enabled=true", "rewardFunctions.requests.memory=5Gi"),
        ("rewardFunctions.requests.memory: 5Gi is not valid", "rewardFunctions.memory (4Gi)"),
    ),
    # Quantities.
    (("rollout.memory=64 GB",), ("rollout.memory", "pattern")),
    (("rollout.memory=2x",), ("rollout.memory", "pattern")),
    (("rollout.shmSize=-1Gi",), ("rollout.shmSize", "pattern")),
    (("rollout.shmSize=64Gi",), ("rollout.shmSize: 64Gi is not valid", "less than rollout.memory (64Gi)")),
    (("rollout.shmSize=64Mi",), ("rollout.shmSize: 64Mi is not valid", "ray.objectStoreMiB (256 MiB)")),
    (("rollout.requests.memory=65Gi",), ("rollout.requests.memory: 65Gi is not valid", "rollout.memory (64Gi)")),
    (("rollout.requests.cpu=9",), ("rollout.requests.cpu: 9 is not valid", "rollout.cpus (8)")),
    (("storage.claim.size=big",), ("storage.claim.size", "pattern")),
    (("storage.claim.size=0Gi",), ("storage.claim.size", "pattern")),
    (("cpu.requests.cpu=-1",), ("cpu.requests.cpu", "greater than 0")),
    (("text:cpu.requests.cpu=0.0",), ("cpu.requests.cpu", "pattern")),
    (("cpu.requests.memory=500m",), ("cpu.requests.memory", "pattern")),
    (("cpu.requests.cpus=500m",), ("cpu.requests", "cpus is not allowed")),
    (("rollout.requests.nvidia\\.com/gpu=0",), ("rollout.requests", "nvidia.com/gpu is not allowed")),
    (('json:rollout.extraResources={"rdma/x":1.5}',), ("rollout.extraResources", "integer")),
    (("text:rollout.extraResources.rdma/x=1.5",), ("rollout.extraResources", "pattern")),
    (("rollout.extraResources.rdma=1",), ("rollout.extraResources", "rdma is not allowed")),
    (("head.minAvailable=5",), ("head.minAvailable", "less than or equal to 1")),
    (("verifier.minAvailable=50",), ("verifier.minAvailable: 50 is not valid", "verifier.maxReplicas (4)")),
    # Keys.
    (("rolout.maxReplicas=2",), ("rolout", "not allowed")),
    (("rollout.maxReplica=2",), ("rollout", "maxReplica")),
    (("rollout.replicas=2",), ("rollout", "replicas is not allowed")),
    (("redis.external.adress=a:1",), ("redis.external", "adress")),
    (("networkPolicy.clients[0].podSelectr.a=b",), ("networkPolicy.clients.0", "podSelectr")),
    # Errors that Kubernetes would report only for the first pod: it does not check the pod templates of a RayCluster.
    (("rollout.tolerations[0].operatr=Exists",), ("rollout.tolerations.0", "operatr is not allowed")),
    (("rollout.tolerations[0].operator=Exist",), ("rollout.tolerations.0.operator", "Exists")),
    (("learner.topologySpreadConstraints[0].foo=1",), ("learner.topologySpreadConstraints.0", "maxSkew is required")),
    (("head.affinity.nodeAfinity.a=b",), ("head.affinity", "nodeAfinity")),
    (("learner.env[0].name=A", "learner.env[0].vale=b"), ("learner.env.0", "vale is not allowed")),
    (("learner.env[0].name=A", "learner.env[0].valueFrom.secretRef.name=b"), ("learner.env.0.valueFrom", "secretRef")),
    (
        ("ray.extraVolumeMounts[0].name=data", "ray.extraVolumeMounts[0].mountPath=/data"),
        ('ray.extraVolumeMounts[0].name: "data" is not valid', "ray.extraVolumes"),
    ),
    (("ray.extraVolumeMounts[0].name=data",), ("ray.extraVolumeMounts.0", "mountPath is required")),
    (
        ("ray.extraVolumes[0].name=d", "ray.extraVolumeMounts[0].name=d", "ray.extraVolumeMounts[0].mountPath=/tmp/"),
        ("ray.extraVolumeMounts[0].mountPath", "chart's own"),
    ),
    (("ray.extraVolumes[0].name=tmp",), ("ray.extraVolumes[0].name", "chart's own")),
    # Images.
    (("image.repository=",), ("image.repository", "pattern")),
    (("image.cpu.tag=latest",), ("image.cpu.tag",)),
    (("redis.image.tag=latest",), ("redis.image.tag",)),
    (("image.gpu.digest=sha256:abc",), ("image.gpu.digest", "sha256")),
    (("image.pullPolicy=Sometimes",), ("image.pullPolicy", "IfNotPresent")),
    # Redis.
    (
        ("redis.external.enabled=true", "redis.external.address=r:6379"),
        ("redis.existingSecret", "penstock-password", "ray-password"),
    ),
    (EXTERNAL, ("redis.external.address", "host:port")),
    ((*EXTERNAL, "redis.external.address=no-port"), ("redis.external.address", "pattern")),
    (
        (*EXTERNAL, "redis.external.sentinel.addresses={a:26379}", "redis.external.rayAddress=r:6379"),
        ("redis.external.sentinel.service",),
    ),
    (
        (*EXTERNAL, "redis.external.address=r:6379", "redis.external.caSecret=ca"),
        ("redis.external.caSecret", "redis.external.tls"),
    ),
    (
        (*EXTERNAL, "redis.external.address=r:6379", "redis.tls.existingSecret=own"),
        ("redis.tls.existingSecret", "redis.external.tls"),
    ),
    (("redis.external.address=redis://user:password@host:6379",), ("redis.external.address",)),
    (("redis.external.address=h:99999",), ("redis.external.address", "pattern")),
    (("redis.external.sentinel.addresses={h:0}",), ("redis.external.sentinel.addresses.0", "pattern")),
    (('json:redis.external.sentinel.addresses=[""]',), ("redis.external.sentinel.addresses.0", "equal to 1")),
    # Storage.
    (("storage.kind=nfs",), ("storage.kind", "claim", "s3")),
    (("storage.roots={relative}",), ("storage.roots", "pattern")),
    (("storage.roots={/}",), ("storage.roots", "pattern")),
    (("storage.roots={/mnt:/etc}",), ("storage.roots", "pattern")),
    (("storage.roots={/proc/1}",), ("storage.roots", "not")),
    (("storage.roots={/mnt/../etc}",), ("storage.roots", "not")),
    (("storage.kind=s3",), ("storage.s3.url", "s3://bucket/prefix")),
    (("storage.kind=s3", "storage.s3.url=s3://"), ("storage.s3.url", "pattern")),
    (("storage.kind=s3", "storage.s3.url=https://bucket.example"), ("storage.s3.url", "pattern")),
    (("storage.claim.accessMode=ReadWriteOften",), ("storage.claim.accessMode", "ReadWriteMany")),
    (("storage.claim.sameNode=false",), ("storage.claim.sameNode", "ReadWriteMany", "storage.kind")),
    (
        ("rollout.nodeSelector.pool=a", "learner.nodeSelector.pool=b"),
        ("nodeSelector", "ReadWriteOnce", "ReadWriteMany"),
    ),
    # The API.
    (("api.ingress.enabled=true", 'json:networkPolicy.clients=[{"podSelector":{}}]'), ("api.ingress.host",)),
    (("api.ingress.enabled=true", "api.ingress.host=a.example"), ("networkPolicy.clients", "Ingress controller")),
    (("api.service.type=External",), ("api.service.type", "ClusterIP")),
    # Ray.
    (("ray.version=new",), ("ray.version", "pattern")),
    (("ray.upgradeStrategy=NewCluster",), ("ray.upgradeStrategy", "Recreate", "None")),
    (("ray.objectStoreMiB=10",), ("ray.objectStoreMiB", "80")),
    (("logLevel=CHATTY",), ("logLevel", "DEBUG")),
    (("head.expireEndedSeconds=-1",), ("head.expireEndedSeconds", "0")),
    (("prices.currency=dollar",), ("prices.currency", "pattern")),
    (("prices.gpuHour=-1",), ("prices.gpuHour", "0")),
    # Names that the chart itself sets.
    (("commonLabels.app\\.kubernetes\\.io/name=x",), ("commonLabels",)),
    (("api.env[0].name=PENSTOCK_REDIS", "api.env[0].value=redis://u:p@h"), ("api.env",)),
    (("ray.env[0].name=REDIS_PASSWORD", "ray.env[0].value=p"), ("ray.env",)),
    (("rollout.env[0].name=HOME", "rollout.env[0].value=/root"), ("rollout.env",)),
    (("fullnameOverride=Upper",), ("fullnameOverride", "pattern")),
    (("fullnameOverride=a-name-of-more-than-forty-characters-is-too-long",), ("fullnameOverride",)),
    (("metrics.serviceMonitor.interval=often",), ("metrics.serviceMonitor.interval", "pattern")),
]


def values_of(case: Refused) -> set[str]:
    """The first two parts of each path that a case sets."""
    paths = (re.split(r"^(?:json|text):", setting)[-1].partition("=")[0] for setting in case[0])
    return {".".join(re.split(r"\.|\[", path)[:2]) for path in paths}


def together(cases: Iterable[Refused]) -> list[list[Refused]]:
    """The cases in lists, in each of which no two set the same value."""
    lists: list[tuple[set[str], list[Refused]]] = []
    for case in cases:
        own = values_of(case)
        free = next((each for each in lists if not each[0] & own), None)
        if free is None:
            lists.append((own, [case]))
        else:
            free[0].update(own)
            free[1].append(case)
    return [joined for _, joined in lists]
