"""Owns the allowed connections: from where to where and on which ports, one table per way of installing.

Must not know how policies express them; network.py evaluates policies.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from itertools import product

from tests.harness.each import each
from tests.helm.cases import (
    CPU,
    DEFAULTS,
    EXTERNAL_REDIS_TLS,
    GROUPS,
    HUB,
    METRICS,
    MONITORED,
    OBJECT_STORE,
    OPEN_NETWORK,
    RAY,
    REWARDED,
    ROLES,
    SELECTED_PEERS,
    TRACKED,
)
from tests.helm.network import Endpoint, Policy, allowed, let_in, let_out, matches
from tests.helm.rendering import NAMESPACE, Case, PodTemplate, render

DNS, HTTPS, REDIS, GCS, DASHBOARD, API, NODE, FREE = 53, 443, 6379, 6379, 8265, 8470, 8471, 40000
FUNCTIONS, OF_REWARDS, OF_FUNCTIONS = 8480, 8443, 5432
API_SERVERS = frozenset({443, 6443, 8443, 16443})
"""The ports on which API servers listen: clouds and kubeadm, minikube, MicroK8s."""
STORE, REDIS_TLS, MIRROR, TRACKER = 9000, 6380, 8444, 5000
OF_RAY = 8080
"""Ray's own metrics."""
OPEN_TO_RAY = RAY | {16443}
"""With a port between the first and the last port of Ray's workers."""
PROBED = (
    frozenset(
        {
            DNS,
            GCS,
            REDIS,
            REDIS_TLS,
            DASHBOARD,
            API,
            NODE,
            FREE,
            STORE,
            MIRROR,
            TRACKER,
            22,
            OF_RAY,
            9399,
            9500,
            10001,
            20000,
        }
    )
    | {FUNCTIONS, OF_REWARDS, OF_FUNCTIONS}
    | RAY
    | METRICS
    | API_SERVERS
)
"""Every port in use, those next to the ranges, and some unused ones."""

OTHERS = {
    endpoint.name: endpoint
    for endpoint in (
        Endpoint("stranger", {"app": "other"}, NAMESPACE, ip="10.1.0.90"),
        Endpoint(
            "another release",
            {
                "app.kubernetes.io/name": "penstock",
                "app.kubernetes.io/instance": "other",
                "app.kubernetes.io/component": "head",
            },
            NAMESPACE,
            ip="10.1.0.91",
        ),
        Endpoint("foreign", {"app.kubernetes.io/name": "prometheus"}, "elsewhere", ip="10.2.0.1"),
        Endpoint("prometheus", {"app.kubernetes.io/name": "prometheus"}, "monitoring", ip="10.3.0.1"),
        Endpoint("grafana", {"app.kubernetes.io/name": "grafana"}, "monitoring", ip="10.3.0.2"),
        Endpoint("operator", {"app.kubernetes.io/name": "kuberay-operator"}, "kuberay-system", ip="10.4.0.1"),
        Endpoint("ingress", {"app.kubernetes.io/name": "ingress-nginx"}, "ingress-nginx", ip="10.5.0.1"),
        Endpoint("dns", {"k8s-app": "kube-dns"}, "kube-system", ip="10.6.0.1"),
        Endpoint("node's dns", ip="169.254.20.10"),
        Endpoint("metadata", ip="169.254.169.254"),
        Endpoint("kubernetes", ip="10.96.0.1"),
        Endpoint("internet", ip="203.0.113.7"),
        Endpoint("internet, IPv6", ip="2001:db8::7"),
        Endpoint("agent", ip="198.51.100.9"),
    )
}
PENSTOCK = ("api", *GROUPS)
KEEPING_FILES = ("head", "cpu", "rollout", "learner")
OWN = (*PENSTOCK, "redis", "functions", "test", "uninstall")
REACHED_BY_ADDRESS = (
    "foreign",
    "stranger",
    "another release",
    "prometheus",
    "grafana",
    "operator",
    "ingress",
    "dns",
    "kubernetes",
    "internet",
    "agent",
)
"""The endpoints in 0.0.0.0/0 apart from the release's own pods; a cloud's metadata service is always excluded."""

Arrows = dict[tuple[str, str], frozenset[int]]


def joined(*tables: Arrows) -> Arrows:
    """Merge tables; a connection in two tables has the ports of both."""
    result: Arrows = {}
    for table in tables:
        for arrow, ports in table.items():
            result[arrow] = result.get(arrow, frozenset()) | ports
    return result


def fan(sources: tuple[str, ...], destinations: tuple[str, ...], *ports: int) -> Arrows:
    """The same connection between each source and each destination."""
    return {(endpoint, other): frozenset(ports) for endpoint, other in product(sources, destinations)}


ALWAYS = joined(
    fan(("head",), ROLES, *OPEN_TO_RAY),
    fan(ROLES, ("head",), GCS, *OPEN_TO_RAY),
    fan(("rollout", "learner"), ("rollout", "learner"), *PROBED),
    fan((*PENSTOCK, "test", "uninstall"), ("dns", "node's dns"), DNS),
    fan(("test", "prometheus"), ("api",), API),
    fan(("prometheus",), GROUPS, *METRICS),
)
"""Ray's star around the head, weights between learner and rollout, metrics, DNS; none from the verifier to a worker."""
OWN_REDIS = fan(PENSTOCK, ("redis",), REDIS)


def by_address(sources: tuple[str, ...], *ports: int) -> Arrows:
    """Egress to any address; the release's pods have addresses too, but allow no ingress by address."""
    return fan(sources, (*REACHED_BY_ADDRESS, *OWN), *ports)


ANYWHERE = by_address(("head", "uninstall"), *API_SERVERS)
"""The chart cannot know the API server's address; networkPolicy.kubernetesApi.peers narrows it."""

EXPECTED: list[tuple[Case, Arrows, Arrows]] = [
    (DEFAULTS, joined(ALWAYS, OWN_REDIS), ANYWHERE),
    (CPU, joined(ALWAYS, OWN_REDIS), ANYWHERE),
    (MONITORED, joined(ALWAYS, OWN_REDIS, fan(("prometheus",), GROUPS, OF_RAY)), ANYWHERE),
    (OBJECT_STORE, joined(ALWAYS, OWN_REDIS), joined(ANYWHERE, by_address(KEEPING_FILES, STORE))),
    (HUB, joined(ALWAYS, OWN_REDIS), joined(ANYWHERE, by_address(("cpu",), MIRROR))),
    (TRACKED, joined(ALWAYS, OWN_REDIS), joined(ANYWHERE, by_address(("cpu",), TRACKER, HTTPS))),
    (
        REWARDED,
        joined(
            ALWAYS,
            OWN_REDIS,
            fan(("verifier",), ("functions",), FUNCTIONS),
            fan(("verifier",), ("agent",), OF_REWARDS),
            fan(("functions",), ("agent",), OF_FUNCTIONS),
            fan(("functions",), ("dns", "node's dns"), DNS),
        ),
        ANYWHERE,
    ),
    (EXTERNAL_REDIS_TLS, ALWAYS, joined(ANYWHERE, by_address(PENSTOCK, REDIS_TLS))),
    (
        SELECTED_PEERS,
        joined(
            ALWAYS,
            OWN_REDIS,
            fan(("head", "uninstall"), ("kubernetes",), HTTPS),
            fan(("ingress",), ("api",), API),
            fan(("operator",), ("head",), DASHBOARD),
            fan(KEEPING_FILES, ("agent",), HTTPS),
        ),
        {},
    ),
]
"""Case, the drawn arrows, and further egress by address."""
every_case = each("case, drawn, outwards", EXPECTED, called=lambda case: case[0])


def policies(case: Case) -> list[Policy]:
    return [Policy(NAMESPACE, policy.document) for policy in render(case).all("NetworkPolicy")]


def endpoint(pod: PodTemplate, number: int) -> Endpoint:
    ports = {name: port for container in pod.containers for name, port in container.ports.items()}
    return Endpoint(pod.component, pod.labels, NAMESPACE, ip=f"10.1.0.{number}", ports=ports)


def all_endpoints(case: Case) -> dict[str, Endpoint]:
    """All pods of a release, hooks included, and all other endpoints."""
    own = [endpoint(pod, number) for number, pod in enumerate(render(case).pods, start=10)]
    return {endpoint.name: endpoint for endpoint in own} | OTHERS


def sides(case: Case, rules: list[Policy], protocol: str = "TCP", only: Policy | None = None) -> tuple[Arrows, Arrows]:
    """The ports on which each pod of the release has egress to and ingress from each endpoint.

    `only`: the pods to which one policy applies; it changes nothing for the others.
    """
    there = all_endpoints(case)
    own = [name for name in there if name not in OTHERS and (only is None or only.selects(there[name]))]
    outwards = {
        (endpoint, other): let_out(rules, there[endpoint], there[other], PROBED, protocol)
        for endpoint, other in product(own, there)
    }
    inwards = {
        (other, endpoint): let_in(rules, there[other], there[endpoint], PROBED, protocol)
        for endpoint, other in product(own, there)
    }
    return present(outwards), present(inwards)


def arrows(case: Case, rules: list[Policy], protocol: str = "TCP") -> Arrows:
    """Every allowed connection of a pod of the release: egress and ingress both allow it."""
    outwards, inwards = sides(case, rules, protocol)
    return present(
        {
            arrow: outwards.get(arrow, PROBED if arrow[0] in OTHERS else frozenset())
            & inwards.get(arrow, PROBED if arrow[1] in OTHERS else frozenset())
            for arrow in (*outwards, *inwards)
        }
    )


def present(table: Arrows) -> Arrows:
    """Without the connections that have no ports."""
    return {arrow: ports for arrow, ports in table.items() if ports}


def drawn_for(case: Case, drawn: Arrows, side: int) -> Arrows:
    """The expected connections that start (0) or end (1) at a pod of the release, if the case has that pod."""
    there = all_endpoints(case)
    return {arrow: ports for arrow, ports in drawn.items() if arrow[side] not in OTHERS and {*arrow} <= set(there)}


def differences(found: Arrows, expected: Arrows) -> list[str]:
    """The connections with too many or too few ports, as text."""
    lines = []
    for arrow in sorted(set(found) | set(expected)):
        more = found.get(arrow, frozenset()) - expected.get(arrow, frozenset())
        less = expected.get(arrow, frozenset()) - found.get(arrow, frozenset())
        if more or less:
            lines.append(f"{arrow[0]} -> {arrow[1]}: extra {sorted(more)}, missing {sorted(less)}")
    return lines


@every_case
def test_exactly_the_expected_connections_are_allowed(case: Case, drawn: Arrows, outwards: Arrows) -> None:
    beyond = {arrow: ports for arrow, ports in outwards.items() if arrow[1] in OTHERS}
    assert differences(arrows(case, policies(case)), joined(drawn, beyond)) == []


@every_case
def test_each_pod_is_closed_on_its_own_side(case: Case, drawn: Arrows, outwards: Arrows) -> None:
    """Each side is enough to close a connection if the other is opened by mistake."""
    let_go, let_come = sides(case, policies(case))
    assert differences(let_go, joined(drawn_for(case, drawn, 0), drawn_for(case, outwards, 0))) == []
    assert differences(let_come, drawn_for(case, drawn, 1)) == []


def test_udp_is_only_for_dns_and_weights() -> None:
    found = arrows(DEFAULTS, policies(DEFAULTS), "UDP")
    expected = joined(
        fan((*PENSTOCK, "test", "uninstall"), ("dns", "node's dns"), DNS),
        fan(("rollout", "learner"), ("rollout", "learner"), *PROBED),
    )
    assert differences(found, expected) == []


@every_case
def test_no_outside_endpoint_reaches_ray_or_redis(case: Case, drawn: Arrows, outwards: Arrows) -> None:
    """The table itself must not contain such a connection."""
    for (source, destination), ports in joined(drawn, outwards).items():
        if source in OTHERS and destination in (*GROUPS, "redis"):
            assert source in ("prometheus", "operator"), (source, destination)
            ray = {OF_RAY} if (source, case) == ("prometheus", MONITORED) else set()
            assert ports <= METRICS | {DASHBOARD} | ray, (source, destination)


def test_the_verifier_reaches_only_redis_the_head_and_dns() -> None:
    for case, verifier in ((DEFAULTS, "verifier"), (DEFAULTS, "verifier-code"), (REWARDED, "verifier-code")):
        found = arrows(case, policies(case))
        reached = {destination for source, destination in found if source == verifier}
        assert reached == {"redis", "head", "dns", "node's dns"}
        assert {source for source, destination in found if destination == verifier} == {"head", "prometheus"}


def test_functions_reach_nothing_of_penstock() -> None:
    found = arrows(REWARDED, policies(REWARDED))
    assert not {destination for source, destination in found if source == "functions"} & set(OWN)
    assert {source for source, destination in found if destination == "functions"} == {"verifier"}


def test_kuberays_clean_up_of_redis_is_allowed_as_the_head() -> None:
    head = all_endpoints(DEFAULTS)["head"]
    cleaner = Endpoint("clean-up", {**head.labels, "ray.io/node-type": "redis-cleanup"}, NAMESPACE, ip="10.1.0.80")
    assert allowed(policies(DEFAULTS), cleaner, all_endpoints(DEFAULTS)["redis"], REDIS)


def test_a_pod_without_a_policy_of_its_own_is_closed() -> None:
    labels = {"app.kubernetes.io/name": "penstock", "app.kubernetes.io/instance": "demo"}
    new = Endpoint("new", labels, NAMESPACE, ip="10.1.0.81")
    rules, there = policies(DEFAULTS), all_endpoints(DEFAULTS)
    assert not [
        endpoint.name
        for endpoint in there.values()
        for port in PROBED
        if allowed(rules, new, endpoint, port) or allowed(rules, endpoint, new, port)
    ]


CILIUM = DEFAULTS.but({"networkPolicy": {"cilium": True, "kubernetesApi": {"ports": [6443]}}}, name="Cilium")


def test_with_cilium_only_its_own_kind_allows_the_api_server() -> None:
    found = {policy.component: policy for policy in render(CILIUM).all("CiliumNetworkPolicy")}
    assert set(found) == {"head", "uninstall"}
    for component, policy in found.items():
        assert policy.api_version == "cilium.io/v2"
        own = [pod for pod in render(CILIUM).pods if matches(policy.at("spec", "endpointSelector"), pod.labels)]
        assert [pod.component for pod in own] == [component]
        assert policy.at("spec", "egress") == [
            {
                "toEntities": ["kube-apiserver"],
                "toPorts": [{"ports": [{"port": "6443", "protocol": "TCP"}]}],
            }
        ]
        assert set(policy.document["spec"]) == {"endpointSelector", "egress"}
    assert differences(arrows(CILIUM, policies(CILIUM)), joined(ALWAYS, OWN_REDIS)) == []


def test_cilium_allows_only_what_drain_and_policies_need() -> None:
    undrained = render(CILIUM.but({"uninstall": {"drain": False}}))
    assert [policy.component for policy in undrained.all("CiliumNetworkPolicy")] == ["head"]
    assert not render(CILIUM.but({"networkPolicy": {"enabled": False}})).has("CiliumNetworkPolicy")


def test_extra_egress_allows_the_agent_of_a_cloud_role() -> None:
    """EKS Pod Identity: a link-local address, which the object store's peers exclude."""
    rule = {"to": [{"ipBlock": {"cidr": "169.254.170.23/32"}}], "ports": [{"port": 80, "protocol": "TCP"}]}
    case = OBJECT_STORE.but({"networkPolicy": {"extraEgress": [rule]}})
    agent = Endpoint("pod identity", ip="169.254.170.23")
    reaching = [
        endpoint.name
        for endpoint in all_endpoints(case).values()
        if endpoint.name in OWN and let_out(policies(case), endpoint, agent, frozenset({80}))
    ]
    assert set(reaching) == set(KEEPING_FILES)


def test_without_policies_everything_is_open() -> None:
    assert policies(OPEN_NETWORK) == []
    found = arrows(OPEN_NETWORK, [])
    assert found["internet", "redis"] == PROBED


def mutations(rules: list[Policy]) -> Iterator[tuple[str, Policy, list[Policy]]]:
    """Variants of the policies, with names: one policy removed or opened, or a rule without peers or ports."""
    for index, policy in enumerate(rules):
        name = policy.document["metadata"]["name"]
        if not name.endswith("-deny"):  # a separate test covers that
            yield f"{name} removed", policy, rules[:index] + rules[index + 1 :]
        for direction in ("ingress", "egress"):
            yield f"{name}: any {direction}", policy, swapped(rules, index, direction, [{}], add=True)
            for number, rule in enumerate(policy.spec.get(direction) or []):
                for part in ("from", "to", "ports"):
                    if part in rule:
                        looser = deepcopy(list(policy.spec[direction]))
                        looser[number].pop(part)
                        without = swapped(rules, index, direction, looser)
                        yield f"{name}: {direction} {number} without {part}", policy, without
                fewer = [entry for entry in policy.spec[direction] if entry is not rule]
                yield f"{name}: no {direction} {number}", policy, swapped(rules, index, direction, fewer)


def swapped(
    rules: list[Policy], index: int, direction: str, replaced: list[dict[str, object]], add: bool = False
) -> list[Policy]:
    document = deepcopy(dict(rules[index].document))
    document["spec"][direction] = [*(document["spec"].get(direction) or []), *replaced] if add else replaced
    return [*rules[:index], Policy(NAMESPACE, document), *rules[index + 1 :]]


def test_every_removed_or_loosened_policy_is_detected() -> None:
    rules = policies(DEFAULTS)
    expected = {id(policy): sides(DEFAULTS, rules, only=policy) for policy in rules}
    changed = list(mutations(rules))
    assert len(changed) > 60
    unnoticed = [
        name for name, policy, others in changed if sides(DEFAULTS, others, only=policy) == expected[id(policy)]
    ]
    assert unnoticed == []
