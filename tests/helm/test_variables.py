"""Tests that every Penstock process gets exactly the known variables, and that they agree with the other manifests.

Must not check where secrets come from; test_secrets.py does.
"""

from __future__ import annotations

import json

from services.settings import Prices
from tests.harness.each import each
from tests.helm.cases import CASES, DEFAULTS, EXTERNAL_REDIS_TLS, GROUPS, METRICS, OBJECT_STORE, RAY, ROLES, SENTINELS
from tests.helm.rendering import Case, render

EVERYWHERE = {
    "PENSTOCK_REDIS",
    "PENSTOCK_REDIS_USERNAME",
    "PENSTOCK_REDIS_PASSWORD_FILE",
    "PENSTOCK_HOST",
    "PENSTOCK_LOG_LEVEL",
    "PENSTOCK_ROOTS",
}
IN_RAY_PODS = EVERYWHERE | {"PENSTOCK_RUNS", "PENSTOCK_METRICS_PORTS", "PENSTOCK_NODE"}
AGREED = IN_RAY_PODS | {
    "PENSTOCK_REDIS_CA_FILE",
    "PENSTOCK_REDIS_SENTINEL_PASSWORD_FILE",
    "PENSTOCK_STORE",
    "PENSTOCK_ACCESS",
    "PENSTOCK_HOSTS",
    "PENSTOCK_PROXIES",
    "PENSTOCK_BOUNDS",
    "PENSTOCK_GPUS",
    "PENSTOCK_EXPIRE_ENDED_S",
    "PENSTOCK_PRICES",
    "PENSTOCK_REWARD_HOSTS",
    "PENSTOCK_FUNCTIONS_URL",
    "PENSTOCK_FUNCTIONS_SECRET_FILE",
}
PORTS_OF_RAY = {
    "object-manager-port": 8076,
    "node-manager-port": 8077,
    "runtime-env-agent-port": 8078,
    "dashboard-agent-grpc-port": 8079,
    "dashboard-agent-listen-port": 52365,
    "min-worker-port": 10002,
    "max-worker-port": 19999,
}
"""The ports that `ray start` gets; the NetworkPolicies open exactly these."""


@each("case", CASES)
def test_every_process_has_exactly_the_known_variables(case: Case) -> None:
    for component in ("api", *GROUPS):
        env = render(case).pod(component).main.env
        given = {name for name in env if name.startswith("PENSTOCK_")}
        assert (EVERYWHERE if component == "api" else IN_RAY_PODS) <= given, component
        assert given <= AGREED, component
        assert env["PENSTOCK_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP", component


@each("component", GROUPS)
def test_the_ports_that_processes_use_are_open(component: str) -> None:
    rendering = render(DEFAULTS)
    first, last = rendering.pod(component).main.env["PENSTOCK_METRICS_PORTS"]["value"].split("-")
    assert {int(first), int(last)} == METRICS
    spec = rendering.cluster.at("spec")
    group = spec["headGroupSpec"] if component == "head" else rendering.group(component)
    assert {name: int(group["rayStartParams"][name]) for name in PORTS_OF_RAY} == PORTS_OF_RAY
    assert set(PORTS_OF_RAY.values()) == RAY


def test_options_set_their_variables_and_no_others() -> None:
    table = {
        "PENSTOCK_REDIS_CA_FILE": EXTERNAL_REDIS_TLS,
        "PENSTOCK_REDIS_SENTINEL_PASSWORD_FILE": SENTINELS,
        "PENSTOCK_STORE": OBJECT_STORE,
    }
    for name, case in table.items():
        assert name in render(case).pod("learner").main.env, name
        assert name not in render(DEFAULTS).pod("learner").main.env, name


def test_every_process_knows_which_files_recipes_may_name() -> None:
    bucket = OBJECT_STORE.values["storage"]["s3"]["url"]
    more = {"storage": {"roots": ["/mnt/data", "s3://shared/models"]}}
    table = (
        (DEFAULTS, "/var/lib/penstock"),
        (DEFAULTS.but(more), "/var/lib/penstock,/mnt/data,s3://shared/models"),
        (OBJECT_STORE, bucket),
        (OBJECT_STORE.but(more), f"{bucket},/mnt/data,s3://shared/models"),
    )
    for case, roots in table:
        for component in ("api", *GROUPS):
            assert render(case).pod(component).main.env["PENSTOCK_ROOTS"]["value"] == roots, (case, component)


def test_worker_pods_know_their_node_and_their_gpus() -> None:
    env = {group: render(DEFAULTS).pod(group).main.env for group in GROUPS}
    assert {each["PENSTOCK_NODE"]["valueFrom"]["fieldRef"]["fieldPath"] for each in env.values()} == {"spec.nodeName"}
    counts = {group: found["PENSTOCK_GPUS"]["value"] for group, found in env.items() if "PENSTOCK_GPUS" in found}
    assert counts == {"rollout": "1", "learner": "4"}
    slices = render(DEFAULTS.but({"ray": {"gpuResource": "nvidia.com/mig-3g.40gb"}}))
    assert not any("PENSTOCK_GPUS" in slices.pod(group).main.env for group in GROUPS), "NVML does not count these"


def test_the_controller_is_told_when_runs_expire() -> None:
    for seconds, text in ((None, "1209600"), (0, "0"), (31_536_000, "31536000")):
        case = DEFAULTS if seconds is None else DEFAULTS.but({"head": {"expireEndedSeconds": seconds}})
        rendered = render(case)
        assert rendered.pod("head").main.env["PENSTOCK_EXPIRE_ENDED_S"]["value"] == text
        others = ("api", *(group for group in GROUPS if group != "head"))
        assert not any("PENSTOCK_EXPIRE_ENDED_S" in rendered.pod(other).main.env for other in others)


def test_controller_and_api_know_the_same_prices() -> None:
    table: tuple[tuple[dict[str, object], dict[str, object]], ...] = (
        ({"currency": "USD", "gpuHour": 2.5, "cpuHour": 0.04}, {"currency": "USD", "gpu_hour": 2.5, "cpu_hour": 0.04}),
        ({"currency": "USD", "gpuHour": "2.5"}, {"currency": "USD", "gpu_hour": 2.5, "cpu_hour": 0}),
        ({"currency": "EUR", "gpuHour": 3}, {"currency": "EUR", "gpu_hour": 3, "cpu_hour": 0}),
    )
    for values, expected in table:
        rendered = render(DEFAULTS.but({"prices": values}))
        for component in ("api", "head"):
            text = rendered.pod(component).main.env["PENSTOCK_PRICES"]["value"]
            assert json.loads(text) == expected, component
            assert Prices.model_validate_json(text).currency == expected["currency"]
        assert "PENSTOCK_PRICES" not in rendered.pod("rollout").main.env
    for component in ("api", "head"):
        assert "PENSTOCK_PRICES" not in render(DEFAULTS).pod(component).main.env


@each("role", ROLES)
def test_the_log_level_reaches_every_role(role: str) -> None:
    rendering = render(DEFAULTS.but({"logLevel": "DEBUG"}))
    assert rendering.pod(role).main.env["PENSTOCK_LOG_LEVEL"]["value"] == "DEBUG"
