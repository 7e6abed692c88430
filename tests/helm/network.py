"""Owns the meaning of NetworkPolicies: whether a connection between two endpoints is allowed, as Kubernetes defines it.

Must not know Penstock's components or ports. It does not model what Kubernetes
allows without a policy, such as a node's probes of its pods.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Document = Mapping[str, Any]
Direction = Literal["Ingress", "Egress"]
Ports = frozenset[int]
NAMESPACE_NAME = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Endpoint:
    """A pod (with its namespace), or an address outside the cluster (`namespace` is empty).

    `ports` are a pod's named ports; `ip` is needed only if policies name address blocks.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    ip: str = ""
    ports: Mapping[str, int] = field(default_factory=dict)

    @property
    def all_namespace_labels(self) -> dict[str, str]:
        """The namespace's labels, with the one that Kubernetes sets."""
        return {**self.namespace_labels, NAMESPACE_NAME: self.namespace}


@dataclass(frozen=True)
class Policy:
    """A NetworkPolicy in its namespace."""

    namespace: str
    document: Document

    @property
    def spec(self) -> Document:
        spec: Document = self.document["spec"]
        return spec

    @property
    def directions(self) -> frozenset[str]:
        """The directions it closes: those it states, by default Ingress, and Egress if it has egress rules."""
        stated = self.spec.get("policyTypes")
        return frozenset(stated or (["Ingress", "Egress"] if self.spec.get("egress") else ["Ingress"]))

    def selects(self, endpoint: Endpoint) -> bool:
        """Whether the policy applies to a pod."""
        return endpoint.namespace == self.namespace and matches(self.spec["podSelector"], endpoint.labels)


def matches(selector: Document | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches; an empty selector matches everything, None matches nothing."""
    if selector is None:
        return False
    exact = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return exact and all(_expression(term, labels) for term in selector.get("matchExpressions") or [])


def _expression(term: Document, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(term["key"]), term.get("values") or []
    outcomes = {
        "In": value is not None and value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
    }
    return outcomes[term["operator"]]


def allowed(
    policies: Sequence[Policy], source: Endpoint, destination: Endpoint, port: int, protocol: str = "TCP"
) -> bool:
    """Whether `source` may open a connection to `port` of `destination`: egress and ingress must both allow it."""
    ports = frozenset({port})
    return bool(
        let_out(policies, source, destination, ports, protocol) & let_in(policies, source, destination, ports, protocol)
    )


def let_out(
    policies: Sequence[Policy], source: Endpoint, destination: Endpoint, ports: Ports, protocol: str = "TCP"
) -> Ports:
    """Those of `ports` on which the policies of `source` allow egress to `destination`.

    A pod that no policy of a direction selects is open in that direction; so is an endpoint outside the cluster.
    """
    return _passing(policies, "Egress", source, destination, destination, ports, protocol)


def let_in(
    policies: Sequence[Policy], source: Endpoint, destination: Endpoint, ports: Ports, protocol: str = "TCP"
) -> Ports:
    """Those of `ports` on which the policies of `destination` allow ingress from `source`."""
    return _passing(policies, "Ingress", destination, source, destination, ports, protocol)


def _passing(
    policies: Sequence[Policy],
    direction: Direction,
    held: Endpoint,
    peer: Endpoint,
    destination: Endpoint,
    ports: Ports,
    protocol: str,
) -> Ports:
    closing = [policy for policy in policies if direction in policy.directions and policy.selects(held)]
    side = {"Ingress": "from", "Egress": "to"}[direction]
    passing = ports if not closing else frozenset()
    for policy in closing:
        for rule in policy.spec.get(direction.lower()) or []:
            if _peer_fits(rule.get(side), peer, policy.namespace):
                passing |= frozenset(
                    port for port in ports if _port_fits(rule.get("ports"), destination, port, protocol)
                )
    return passing


def _peer_fits(peers: Sequence[Document] | None, endpoint: Endpoint, namespace: str) -> bool:
    """Without peers, or with an empty list of them, a rule matches every endpoint."""
    return not peers or any(_one_peer(peer, endpoint, namespace) for peer in peers)


def _one_peer(peer: Document, endpoint: Endpoint, namespace: str) -> bool:
    if "ipBlock" in peer:
        return _in_block(peer["ipBlock"], endpoint)
    if not endpoint.namespace:
        return False
    here = endpoint.namespace == namespace
    if "namespaceSelector" in peer:
        here = matches(peer["namespaceSelector"], endpoint.all_namespace_labels)
    return here and ("podSelector" not in peer or matches(peer["podSelector"], endpoint.labels))


def _in_block(block: Document, endpoint: Endpoint) -> bool:
    if not endpoint.ip:
        return False
    address = ipaddress.ip_address(endpoint.ip)
    return address in ipaddress.ip_network(block["cidr"]) and not any(
        address in ipaddress.ip_network(cut) for cut in block.get("except") or []
    )


def _port_fits(ports: Sequence[Document] | None, destination: Endpoint, port: int, protocol: str) -> bool:
    """Without ports, or with an empty list of them, a rule matches every port."""
    return not ports or any(_one_port(entry, destination, port, protocol) for entry in ports)


def _one_port(entry: Document, destination: Endpoint, port: int, protocol: str) -> bool:
    if entry.get("protocol", "TCP") != protocol:
        return False
    stated = entry.get("port")
    if stated is None:
        return True
    first = destination.ports.get(stated) if isinstance(stated, str) else int(stated)
    return first is not None and first <= port <= int(entry.get("endPort", first))
