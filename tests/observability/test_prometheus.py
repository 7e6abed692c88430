"""Debian's Prometheus next to a real laptop stack: the shipped configuration, rules and dashboards work."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable

import httpx
import pytest
import yaml

from deploy.observability.dashboards.nodes import NODES
from services.api.access.local_token import read_token, token_path
from services.metrics.tables import step_gauge
from tests.harness.free_ports import free_port
from tests.harness.programs import needed
from tests.harness.small_run import recipe_document
from tests.harness.stack import Stack
from tests.harness.workload import write_questions
from tests.observability.external import OF_KUBERNETES
from tests.observability.reading import RULES, dashboard_expressions, everything_named, recorded

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

SHIPPED = RULES.parents[3] / "deploy" / "observability" / "prometheus.yml"
DEADLINE_S = 240
STEPS = 40
PAUSED_AFTER = 12
"""Steps; the windows of alerts need 10."""
SERVICES = {"api", "sampler", "verifier", "rollout", "learner"}
NOT_EXPORTED = {
    **dict.fromkeys(
        (
            "penstock_tuning_decisions_total",
            "penstock_tuning_idle_ratio",
            "penstock_tuning_idle_target_ratio",
            "penstock_tuning_staleness_steps",
            "penstock_tuning_staleness_target_steps",
        ),
        "tuning is off",
    ),
    "penstock_cost": "the stack has no prices",
    "penstock_reward_score": "the recipe names no rewards",
    "ALERTS": "Prometheus writes it while an alert is pending or firing",
    "penstock_step_reference_kl_nats": "the recipe has no KL term",
    "penstock_step_value_clip_ratio": "the recipe has no value head",
    "penstock_step_value_explained_variance_ratio": "the recipe has no value head",
    "penstock_step_value_loss": "the recipe has no value head",
    **dict.fromkeys(OF_KUBERNETES, "a laptop has no Kubernetes"),
    "penstock_gpu_errors_total": "a laptop has no GPU",
    "penstock_lost_gpus": "a laptop has no GPU",
}
"""Metrics that a healthy run does not export, and why."""
OF_AN_UNTRAINED_MODEL = {"TruncatedResponses": "it samples tokens at random, and half of the responses reach the limit"}
EMPTY = {
    "Firing alerts": "nothing is wrong",
    "annotation Alerts": "nothing is wrong",
    "Stalled waits": "no wait is stalled",
    "Errors": "no request was answered with 5xx",
    "Waits for space": "there is enough space",
    "KL to the reference": "the recipe has no KL term",
    "Value head": "the recipe has no value head",
    **dict.fromkeys((panel.title for panel in NODES), "a laptop has neither Kubernetes nor a GPU"),
    "Cost": "the stack has no prices",
    "Scores": "the recipe names no rewards",
    **dict.fromkeys(("Idle learner", "Staleness that tuning measured", "Decisions of tuning"), "tuning is off"),
}
"""Panels that are empty for a healthy run, and why."""


class Prometheus:
    """The shipped configuration on a free port, scraping the test's stack at an interval that suits a short run."""

    def __init__(self, program, folder, api_port):
        document = yaml.safe_load(SHIPPED.read_text())
        document["global"] = {"scrape_interval": "2s", "evaluation_interval": "2s", "scrape_timeout": "2s"}
        document["rule_files"] = [str((SHIPPED.parent / path).resolve()) for path in document["rule_files"]]
        [job] = document["scrape_configs"]
        for discovery in job["http_sd_configs"]:
            discovery["url"] = discovery["url"].replace(":8470", f":{api_port}")
            discovery["refresh_interval"] = "1s"
        (folder / "token").write_text(read_token(token_path(api_port)))
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(document))
        port = free_port()
        self.began = time.time()
        self._log = folder / "prometheus.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    str(program),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=20)

    def ask(self, path, **parameters):
        answer = self._client.get(path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def until_ready(self):
        def ready():
            try:
                return self._client.get("/status/buildinfo").status_code == 200
            except httpx.TransportError:
                return False

        until(ready, "Prometheus answers", 30, lambda: self._log.read_text()[-3000:])

    def stop(self):
        self._client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(timeout=10)


def until(condition: Callable[[], object], what: str, deadline_s: float, state: Callable[[], object]):
    """Wait until `condition` returns something true, and return that."""
    ends = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < ends, f"{what}: not within {deadline_s} s\n{state()}"
        time.sleep(0.5)
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory):
    needed("prometheus")
    with Stack(tmp_path_factory.mktemp("runs"), os.environ.get("PENSTOCK_TEST_REDIS")) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(stack, tmp_path_factory):
    server = Prometheus(needed("prometheus"), tmp_path_factory.mktemp("prometheus"), stack.port)
    try:
        server.until_ready()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def run(stack, prometheus, tiny_model, tmp_path_factory):
    """A run after its first steps; it is paused there, so that the checks have time."""
    questions = write_questions(tmp_path_factory.mktemp("data") / "questions.jsonl")
    document = recipe_document(
        tiny_model,
        data={"source": "jsonl", "path": str(questions), "train": 30, "held_out": 8, "options": {}},
        rollout={"cpus": 0.3},
        learner={"cpus": 0.3, "learning_rate": 1e-5, "checkpoint_every": 1},
        # Steps may be shorter than a scrape: without staleness each compares log-probs, so the last one does too.
        limits={"rollout_steps": STEPS, "startup_timeout_s": 200, "max_staleness": 0},
        algorithm={"overlong": {"cache": 4}},
    )
    name = stack.submit(document)
    stack.until(name, lambda view: view["rollout_steps"] >= PAUSED_AFTER, "the first rollout steps", DEADLINE_S)
    assert stack.api.post(f"/v1/runs/{name}/pause").status_code == 202
    stack.until(name, lambda view: view["state"] == "paused", "a pause", 30)
    yield name
    if stack.view(name)["state"] not in ("succeeded", "failed", "cancelled"):
        stack.api.post(f"/v1/runs/{name}/cancel")


def series_of(prometheus, expression):
    return prometheus.ask("/query", query=expression)["result"]


@pytest.mark.timeout(600)
def test_the_shipped_files_work_with_a_real_run(stack, prometheus, run):
    check_targets(prometheus)
    check_metrics(stack, prometheus, run)
    check_rules(prometheus, run)
    check_panels(prometheus, run)
    check_the_end(stack, prometheus, run)


def check_targets(prometheus):
    """Prometheus finds every process, and every process answers."""

    def all_up():
        found = prometheus.ask("/targets")["activeTargets"]
        services = {target["labels"]["service"] for target in found}
        return found if services == SERVICES and all(target["health"] == "up" for target in found) else None

    found = until(all_up, "all targets up", 60, lambda: prometheus.ask("/targets")["activeTargets"])
    assert {target["labels"]["job"] for target in found} == {"penstock"}
    assert {(target["labels"]["namespace"], target["labels"]["release"]) for target in found} == {("local", "laptop")}


def check_metrics(stack, prometheus, run):
    """Every metric that a dashboard or rule names exists, with the labels of the process that exported it."""
    named = set(everything_named())

    def missing():
        return named - set(prometheus.ask("/label/__name__/values")) - set(NOT_EXPORTED)

    until(lambda: not missing(), "metrics that rules and dashboards name", 60, missing)
    assert not [label for label in prometheus.ask("/labels") if label.startswith("exported_")], "honor_labels"

    # A scrape that timed out omits its series until the next scrape.
    def ready():
        found = series_of(prometheus, 'penstock_processes{state="ready"} == 1')
        return {series["metric"]["service"] for series in found}

    until(lambda: ready() == SERVICES - {"api"}, "a ready process of every service", 60, ready)
    limit = f'penstock_setting_limits_lease_seconds{{run="{run}"}}'
    [lease] = until(lambda: series_of(prometheus, limit), "the run's settings", 60, lambda: limit)
    assert float(lease["value"][1]) == 5.0
    [step, *_] = stack.api.get(f"/v1/runs/{run}/metrics").json()["steps"]
    assert {name for name in step["metrics"] if step_gauge(run, name) is None} == set(), "step metrics without a family"
    trained = f'penstock_groups{{run="{run}", state="trained"}} >= 8'
    until(lambda: series_of(prometheus, trained), "the groups of the first steps", 30, lambda: trained)


def check_rules(prometheus, run):
    """Every rule is evaluated without an error, and no alert fires for a healthy run."""
    groups = prometheus.ask("/rules")["groups"]
    assert len(groups) == len(list(RULES.glob("*.yaml")))

    def evaluated():
        found = [rule for group in prometheus.ask("/rules")["groups"] for rule in group["rules"]]
        return found if all(rule["health"] != "unknown" for rule in found) else None

    found = until(evaluated, "an evaluation of every rule", 30, lambda: groups)
    assert {rule["name"]: rule.get("lastError") for rule in found if rule["health"] != "ok"} == {}

    def unrecorded():
        return recorded() - set(prometheus.ask("/label/__name__/values"))

    until(lambda: not unrecorded(), "the recorded series of the first steps", 60, unrecorded)
    found = prometheus.ask("/alerts")["alerts"]
    firing = {alert["labels"]["alertname"] for alert in found if alert["state"] == "firing"}
    assert firing <= set(OF_AN_UNTRAINED_MODEL), "alerts of a healthy run"


def check_panels(prometheus, run):
    """Every expression of every dashboard is valid, and returns data unless EMPTY has the reason.

    The range is the whole run, as in a panel, because the waits of its start are over.
    """

    def empty():
        # A coarse step, because Prometheus returns at most 11000 points.
        seen = {"start": prometheus.began, "end": time.time(), "step": 2}
        return {
            where
            for where, expression in dashboard_expressions()
            if not any(where.endswith(title) for title in EMPTY)
            and not prometheus.ask("/query_range", query=expression, **seen)["result"]
        }

    # A rate needs two scrapes of its counter.
    until(lambda: not empty(), "data in every panel", 60, empty)


def check_the_end(stack, prometheus, run):
    """A finished run exports its state, and nothing else."""
    assert stack.api.post(f"/v1/runs/{run}/resume").status_code == 202
    stack.until(run, lambda view: view["state"] == "succeeded", "success", DEADLINE_S)

    def ended():
        states = series_of(prometheus, f'penstock_run_state{{run="{run}"}}')
        return [series["metric"]["state"] for series in states] == ["succeeded"]

    until(ended, "the run's end in Prometheus", 30, lambda: series_of(prometheus, f'{{run="{run}"}}'))
    page = stack.api.get("/metrics").text
    assert set(re.findall(rf'^(penstock_\w+){{[^}}]*run="{run}"', page, re.M)) == {"penstock_run_state"}

    def gone():
        found = series_of(prometheus, f'{{run="{run}", __name__!~"ALERTS.*|run:.*"}}')
        return {series["metric"]["__name__"] for series in found}

    until(lambda: gone() == {"penstock_run_state"}, "no series of the run except its state", 30, gone)
