"""Tests that the ports of containers, probes, Services, monitors, Ingress and routes agree.

Must not check which pods may reach them; test_network.py does.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from services.api.app import create_app
from tests.harness.api_access import ACCESS
from tests.harness.each import each
from tests.helm.cases import CASES, EVERYTHING, MONITORED, PUBLISHED
from tests.helm.network import matches
from tests.helm.rendering import FULLNAME, NAMESPACE, Case, Container, Document, Rendering, render

API_PORT, NODE_PORT, FUNCTIONS_PORT, REDIS_PORT, GCS_PORT = 8470, 8471, 8480, 6379, 6379
SIDECARS = ("autoscaler",)
"""Containers without probes: KubeRay and the probes of the pod's main container cover them."""


@cache
def routes() -> frozenset[str]:
    """The paths that the API answers."""
    without_redis: Any = None  # no route is called here
    return frozenset(str(getattr(route, "path", "")) for route in create_app(without_redis, ACCESS).routes)


def target(container: Container, port: str | int) -> int:
    """The number of a port that a probe or Service names. Raises AssertionError if the container does not have it."""
    if isinstance(port, str):
        assert port in container.ports, f"{container.name} has no port {port!r}: {container.ports}"
        return container.ports[port]
    assert port in container.ports.values(), f"{container.name} does not declare port {port}: {container.ports}"
    return port


@each("case", CASES)
def test_a_service_port_is_a_port_of_its_pods(case: Case) -> None:
    rendering = render(case)
    for service in rendering.all("Service"):
        pods = [
            pod
            for pod in rendering.lasting_pods
            if matches({"matchLabels": service.at("spec", "selector")}, pod.labels)
        ]
        for port in service.at("spec", "ports"):
            for pod in pods:
                target(pod.main, port.get("targetPort", port["port"]))


def probes(container: Container) -> dict[str, Document]:
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    return {kind: container.document[kind] for kind in kinds if kind in container.document}


@each("case", CASES)
def test_every_lasting_container_has_all_three_probes(case: Case) -> None:
    for pod in render(case).lasting_pods:
        for container in pod.containers:
            if container.init or container.name in SIDECARS or pod.owner.kind == "Job":
                continue
            found = probes(container)
            assert set(found) == {"startupProbe", "readinessProbe", "livenessProbe"}, (
                f"{pod} {container.name}: {set(found)}"
            )
            for probe in found.values():
                for how in ("httpGet", "tcpSocket"):
                    if how in probe:
                        target(container, probe[how]["port"])


@each("case", CASES)
def test_probes_use_routes_that_exist(case: Case) -> None:
    ports = {"api": API_PORT, "functions": FUNCTIONS_PORT}
    assert {"/readyz", "/healthz", "/metrics"} <= routes()
    for pod in render(case).lasting_pods:
        if pod.component == "redis":
            continue
        found = probes(pod.main)
        expected = ports.get(pod.component, NODE_PORT)
        ready = "/healthz" if pod.component == "functions" else "/readyz"
        for kind, path in (("readinessProbe", ready), ("livenessProbe", "/healthz")):
            assert found[kind]["httpGet"]["path"] == path, f"{pod} {kind}"
            assert target(pod.main, found[kind]["httpGet"]["port"]) == expected, f"{pod} {kind}"
        assert target(pod.main, found["startupProbe"]["httpGet"]["port"]) == expected, pod


@each("case", CASES)
def test_a_started_container_has_time_to_start(case: Case) -> None:
    for pod in render(case).lasting_pods:
        if pod.owner.kind == "Job":
            continue
        start = probes(pod.main)["startupProbe"]
        seconds = start.get("periodSeconds", 10) * start.get("failureThreshold", 3)
        assert seconds >= 60, f"{pod}: killed after {seconds} s of starting"


@each("case", CASES)
def test_the_known_ports_are_declared(case: Case) -> None:
    rendering = render(case)
    assert API_PORT in rendering.pod("api").main.ports.values()
    assert [port["port"] for port in rendering.one("Service", "api").at("spec", "ports")] == [API_PORT]
    if rendering.has("StatefulSet", "redis"):
        assert REDIS_PORT in rendering.pod("redis").main.ports.values()
    assert {NODE_PORT, GCS_PORT} <= set(rendering.pod("head").main.ports.values())
    for pod in rendering.lasting_pods:
        if pod.group:
            assert NODE_PORT in pod.main.ports.values(), pod


@each("case", CASES)
def test_a_pods_ports_are_unique_and_not_host_ports(case: Case) -> None:
    for pod in render(case).pods:
        declared = [port for container in pod.containers for port in container.document.get("ports", [])]
        numbers = [(port["containerPort"], port.get("protocol", "TCP")) for port in declared]
        assert len(set(numbers)) == len(numbers), f"{pod}: {numbers}"
        assert not [port for port in declared if "hostPort" in port], pod


@each("case", CASES)
def test_an_ingress_and_the_monitors_name_ports_that_exist(case: Case) -> None:
    rendering = render(case)
    services = {
        service.name: {port.get("name"): port["port"] for port in service.at("spec", "ports")}
        for service in rendering.all("Service")
    }
    for ingress in rendering.all("Ingress"):
        for rule in ingress.at("spec", "rules"):
            for path in rule["http"]["paths"]:
                backend = path["backend"]["service"]
                ports = services[backend["name"]]
                assert backend["port"].get("name", "") in ports or backend["port"].get("number") in ports.values(), (
                    backend
                )
    for monitor in rendering.all("ServiceMonitor"):
        chosen = [
            service for service in rendering.all("Service") if matches(monitor.at("spec", "selector"), service.labels)
        ]
        for endpoint in monitor.at("spec", "endpoints"):
            assert all(endpoint["port"] in services[service.name] for service in chosen), (monitor, endpoint)
            assert endpoint["path"] == "/metrics"
    assert (rendering.has("Ingress"), rendering.has("ServiceMonitor")) == (
        case in (PUBLISHED, EVERYTHING),
        case in (MONITORED, EVERYTHING),
    )


def service_of_host(rendering: Rendering, host: str) -> bool:
    """Whether a host name belongs to a rendered Service in this namespace."""
    name, *domain = host.split(".")
    return any(service.name == name for service in rendering.all("Service")) and (not domain or domain[0] == NAMESPACE)


@each("case", CASES)
def test_discovery_finds_all_processes_except_the_api(case: Case) -> None:
    for config in render(case).all("ScrapeConfig"):
        for discovery in config.at("spec", "httpSDConfigs"):
            address = urlsplit(discovery["url"])
            assert address.port == API_PORT
            assert service_of_host(render(case), str(address.hostname)), address.hostname
            assert address.path in routes()
        drops = [rule for rule in config.at("spec", "relabelings") if rule.get("action") in ("drop", "Drop")]
        assert any("service" in str(rule["sourceLabels"]) and re.fullmatch(rule["regex"], "api") for rule in drops), (
            drops
        )


@each("case", CASES)
def test_variables_and_commands_use_addresses_of_services(case: Case) -> None:
    rendering = render(case)
    for pod in rendering.pods:
        for container in pod.containers:
            texts = [*container.command, *(str(entry.get("value", "")) for entry in container.env.values())]
            for host, port in re.findall(rf"\b({FULLNAME}-[\w.-]+?):(\d+)", " ".join(texts)):
                ports = service_ports(rendering, host)
                assert int(port) in ports, f"{pod} {container.name}: {host}:{port}, but the Service has {ports}"


def service_ports(rendering: Rendering, host: str) -> set[int]:
    """The ports of the Service at a host; KubeRay creates the head's from the head's container ports."""
    name = host.split(".")[0]
    if name == f"{FULLNAME}-head-svc":
        return set(rendering.pod("head").main.ports.values())
    return {port["port"] for port in rendering.one("Service", name=name).at("spec", "ports")}
