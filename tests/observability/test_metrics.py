"""Metrics: their page matches the code, counters start at 0, and metrics of ended runs are removed."""

import ast
import asyncio
import re
import socket
import uuid

import httpx
import pytest
from prometheus_client import REGISTRY, Gauge, generate_latest, start_http_server
from redis.exceptions import NoPermissionError, ResponseError

from services.api.app import create_app
from services.contracts import COMMON_PHASES, PHASES, Cause, DeadLetter, Lane, ProcessInfo, RunState, Transition
from services.controller.ended.known_runs import EndedRuns, KnownRuns
from services.controller.run_metrics import RunMetrics, RunStates
from services.metrics import AT_ZERO, PORTS, STREAMS, expose, families, forget, serve_metrics
from services.metrics.recent import RECENT, recent_families
from services.metrics.tables import SETTINGS, STEP_METRICS, table_families
from services.sampler.queue.maintenance import Maintenance
from services.settings import parse_recipe
from services.settings.rewards.reward import parse_text
from services.streams.connection.client import client
from services.streams.delivery.consumer import Consumer
from services.streams.keys import STREAM_READERS, RunKeys
from services.streams.state.events import EventLog
from services.streams.state.group_state import GroupTransitions
from services.streams.state.run_record import RunRecord
from services.streams.state.runs import RunRecords
from services.streams.state.stats import StreamFigures, stream_figures
from tests.harness.api_access import ACCESS, HEADERS
from tests.harness.free_ports import free_port
from tests.harness.small_run import recipe_document, service_context
from tests.observability.external import EXTERNAL
from tests.observability.reading import ROOT
from tests.services.driven import put_stub_record
from verifier.sandbox.pool import Sandbox
from verifier.verifiers.base import Candidate

PACKAGES = ("services", "rollout", "verifier", "learner", "deploy")
COMPUTED = {"starvation-", "prompt-"}
"""Prefixes of phases that the code completes."""


def sample(metric, /, **labels):
    return REGISTRY.get_sample_value(metric, labels)


def shown(run):
    """Every series of a run that this process exports."""
    return [
        line for line in generate_latest().decode().splitlines() if f'run="{run}"' in line and "_created{" not in line
    ]


def documented(title):
    """The rows of the table under a heading of the page."""
    part = (ROOT / "docs" / "operations" / "observability.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    return rows[2:]


def test_the_page_lists_every_metric_with_its_type_and_labels():
    listed = [(row[0].strip("`"), row[1], tuple(filter(None, row[2].split(", ")))) for row in documented("Metrics")]
    tabled = {*table_families(), *recent_families()}
    exported = [
        (family._name + ("_total" if family._type == "counter" else ""), family._type, tuple(family._labelnames))
        for family in families()
        if family not in tabled
    ]
    assert sorted(listed) == sorted(exported)
    assert all(row[3] and row[4] for row in documented("Metrics"))


def test_the_page_lists_step_metrics_and_settings():
    steps = {row[0].strip("`"): row[1].strip("`") for row in documented("Step metrics")}
    assert "penstock_step_judged_groups`" in steps.pop("groups_with_N_of_SIZE_correct")
    assert "penstock_reward_score`" in steps.pop("reward_NAME")
    assert steps == {name: family._name for name, family in STEP_METRICS.items()}
    settings = {row[0].strip("`"): row[1].strip("`") for row in documented("Settings")}
    assert settings == {path: family._name for path, family in SETTINGS.items()}


def test_the_page_lists_windows_and_metrics_of_others():
    windows = {row[0].strip("`"): row[1].strip("`") for row in documented("Windows")}
    assert windows == {name: family._name for name, family in RECENT.items()}
    assert {row[0].strip("`"): row[1] for row in documented("Metrics of other programs")} == EXTERNAL


def test_the_page_lists_every_phase_of_an_event():
    listed = {row[0]: tuple(row[1].split(", ")) for row in documented("Events")}
    assert listed.pop("every service") == COMMON_PHASES
    assert listed == {service: phases for service, phases in PHASES.items() if phases}
    every = [phase for phases in PHASES.values() for phase in phases]
    assert len(set(every)) == len(every), "each phase must have one meaning"


def test_every_event_in_the_code_has_a_known_phase():
    known = {*COMMON_PHASES, *(word for words in PHASES.values() for word in words)}
    written = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "event" and node.args:
                word = node.args[0]
                if isinstance(word, ast.Constant):
                    written.add(word.value)
                elif isinstance(word, ast.JoinedStr):
                    assert word.values[0].value in COMPUTED, path
    assert written <= known
    source = "\n".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    prefixes = tuple(COMPUTED)
    unused = {word for word in known if not word.startswith(prefixes) and source.count(f'"{word}"') < 2}
    assert unused == set(), "phases that no code writes"


def test_counters_start_at_zero_and_end_with_the_process(run_id):
    for service in AT_ZERO:
        expose(run_id, service)
    assert sample("penstock_messages_total", run=run_id, stream="train-tasks", result="mixed-version") == 0
    assert sample("penstock_verdict_seconds_count", run=run_id, outcome="unknown") == 0
    assert sample("penstock_skipped_optimizer_steps_total", run=run_id) == 0
    other = f"{run_id}-other"
    expose(other, "rollout")
    forget(run_id)
    assert shown(run_id) == []
    assert sample("penstock_response_tokens_total", run=other) == 0
    forget(other)


def test_streams_have_one_name_everywhere():
    keys = RunKeys("r")
    assert {name: kind for kind, names in STREAMS.items() for name in names} == {
        name: stream.rpartition(":")[2] for lane in Lane for name, stream in keys.streams(lane).items()
    }
    assert list(STREAM_READERS) == list(STREAMS)
    assert keys.stream_name(keys.lane(Lane.EVALUATION).samples) == "evaluation-samples"
    assert keys.stream_name(keys.batches) == "batches"


@pytest.fixture
def pages(monkeypatch):
    """Metrics pages live as long as the process; this closes those of the test."""
    started = []

    def start(port, addr):
        started.append(start_http_server(port, addr=addr))
        return started[-1]

    monkeypatch.setattr("services.metrics.start_http_server", start)
    yield started
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join(10)
        assert not thread.is_alive()


def test_a_metrics_page_uses_a_free_port_of_the_range(monkeypatch, pages):
    first = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        monkeypatch.setenv(PORTS, f"{first}-{first}")
        with pytest.raises(OSError, match=PORTS):
            serve_metrics("127.0.0.1")
        monkeypatch.setenv(PORTS, f"{first}-{first + 20}")
        assert first < serve_metrics("127.0.0.1") <= first + 20
    monkeypatch.delenv(PORTS)
    assert serve_metrics("127.0.0.1") > 0
    assert len(pages) == 2


@pytest.mark.parametrize(
    "accepted",
    [
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=1.0.0;q=0.3",
        "*/*",
    ],
)
def test_a_metrics_page_keeps_the_colons_of_the_engine(accepted, pages):
    """Prometheus 2 and 3 ask for OpenMetrics, in which prometheus-client replaces a colon for some of them."""
    gauge = Gauge("vllm:of_a_test", "As the engine names them.")
    try:
        port = serve_metrics("127.0.0.1")
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accepted})
    finally:
        REGISTRY.unregister(gauge)
    assert "\nvllm:of_a_test 0.0\n" in page.text
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("text", ["9400", "9499-9400", "0-5", "1-65536", "a-b"])
def test_an_invalid_port_range_is_rejected_by_name(monkeypatch, text):
    monkeypatch.setenv(PORTS, text)
    with pytest.raises(ValueError, match=rf"{PORTS}: '{text}' is not valid: expected FIRST-LAST within 1-65535"):
        serve_metrics("127.0.0.1")


def record(run, state, at, **changes):
    recipe = parse_recipe(recipe_document("/model"))
    history = (Transition(state=state, at=at, reason="test"),)
    known = {
        "stored_recipe": recipe.model_dump_json().encode(),
        "rollout_replicas": 1,
        "cancel_requested": False,
        "created_at": at,
        "model_path": None,
        "export_path": None,
        "summary": None,
    }
    return RunRecord(id=run, state=state, history=history, **{**known, **changes})


def test_a_run_state_is_shown_while_its_end_is_recent(run_id):
    states = RunStates()
    counted = {RunState.FAILED: 1}
    states.show([record(run_id, RunState.RUNNING, 0.0)], EndedRuns())
    assert sample("penstock_run_state", run=run_id, state="running") == 1
    assert sample("penstock_runs", state="running") == 1
    states.show([], EndedRuns({run_id: RunState.FAILED}, counted))
    assert sample("penstock_run_state", run=run_id, state="running") is None
    assert sample("penstock_run_state", run=run_id, state="failed") == 1
    states.show([], EndedRuns({}, counted))
    assert sample("penstock_run_state", run=run_id, state="failed") is None
    assert sample("penstock_runs", state="failed") == 1


async def test_the_controller_exports_processes_settings_and_events(redis, run_id):
    await put_stub_record(redis, RunKeys(run_id))
    event_log = EventLog(redis, RunKeys(run_id), "learner")
    await event_log.write("checkpoint-failed", "before the controller started")
    figures = RunMetrics(run_id, EventLog(redis, RunKeys(run_id), "controller"))
    running = record(run_id, RunState.RUNNING, 0.0, rollout_replicas=3)
    await figures.open(running.recipe)
    labels = {"run": run_id, "service": "learner"}
    assert sample("penstock_events_total", phase="checkpoint-failed", **labels) == 1
    assert sample("penstock_events_total", phase="weights-late", **labels) == 0
    assert sample("penstock_setting_limits_lease_seconds", run=run_id) == running.recipe.limits.lease_s
    await event_log.write("checkpoint-failed", "again")
    await event_log.write("no-such-word", "from a newer release")
    ready = ProcessInfo(id="rollout-1", service="rollout", run=run_id, host="h", pid=1, metrics="h:9", state="ready")
    await figures.show(running, [ready])
    assert sample("penstock_events_total", phase="checkpoint-failed", **labels) == 2
    assert sample("penstock_events_total", phase="no-such-word", **labels) is None
    assert sample("penstock_processes", run=run_id, service="rollout", state="ready") == 1
    assert sample("penstock_replicas_desired", run=run_id, service="rollout") == 3
    assert sample("penstock_setting_verifier_max_unknown_ratio", run=run_id) == 0.5
    await figures.show(running, [])
    assert sample("penstock_processes", run=run_id, service="rollout", state="ready") == 0
    figures.close()
    assert shown(run_id) == []


async def test_a_setting_without_a_value_is_not_exported(redis, run_id):
    figures = RunMetrics(run_id, EventLog(redis, RunKeys(run_id), "controller"))
    await figures.open(parse_recipe(recipe_document("/model", verifier={"max_unknown_share": None})))
    assert sample("penstock_setting_verifier_max_unknown_ratio", run=run_id) is None
    assert sample("penstock_setting_limits_lease_seconds", run=run_id) == 5
    figures.close()


async def test_stream_figures_show_stuck_leases(redis, run_id):
    keys = RunKeys(run_id)
    streams = keys.lane(Lane.TRAIN)
    readers = {streams.tasks: "rollout", streams.samples: "verifier"}
    assert await stream_figures(redis, readers, 1.0) == dict.fromkeys(readers, StreamFigures())
    for number in range(5):
        await redis.xadd(streams.tasks, {"m": f"{number}"})
    assert (await stream_figures(redis, readers, 1.0))[streams.tasks] == StreamFigures(entries=5, lag=5)
    await redis.xgroup_create(streams.tasks, "rollout", id="0")
    await redis.xreadgroup("rollout", "one", {streams.tasks: ">"}, count=3)
    await asyncio.sleep(0.3)
    found = (await stream_figures(redis, readers, 0.1))[streams.tasks]
    assert (found.entries, found.pending, found.lag) == (5, 3, 2)
    assert 0.3 <= found.oldest_idle_s < 60
    [newest] = [entry["message_id"] for entry in await redis.xpending_range(streams.tasks, "rollout", "-", "+", 10)][2:]
    await redis.xclaim(streams.tasks, "rollout", "one", 0, [newest], idle=90_000)
    assert (await stream_figures(redis, readers, 1.0))[streams.tasks].oldest_idle_s >= 90, (
        "the oldest lease must be found anywhere in the list"
    )
    [undelivered] = [entry for entry, _ in await redis.xrange(streams.tasks)][4:]
    await redis.xdel(streams.tasks, undelivered)
    assert (await stream_figures(redis, readers, 1.0))[streams.tasks].lag is None


async def test_stream_figures_do_not_hide_errors(own_server):
    server, redis = own_server
    await redis.set("{run}:text", "no stream")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await stream_figures(redis, {"{run}:text": "rollout"}, 1.0)
    await redis.acl_setuser("few", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-xinfo"])
    as_few = client(f"redis://few:any@127.0.0.1:{server.port}/0")
    with pytest.raises(NoPermissionError, match="xinfo"):
        await stream_figures(as_few, {"{run}:tasks": "rollout"}, 1.0)
    await as_few.aclose()


async def test_maintenance_exports_streams_and_dead_letters(redis, run_id):
    keys = RunKeys(run_id)
    letter = DeadLetter(
        stream=keys.lane(Lane.TRAIN).tasks, entry="1-0", reason="x", deliveries=4, cause=Cause.DELIVERIES, body="{}"
    )
    async with service_context(redis, run_id, recipe_document("/model"), "sampler") as context:
        await redis.xadd(keys.dead, {"m": letter.model_dump_json()})
        maintenance = Maintenance(context)
        assert sample("penstock_dead_letters_total", run=run_id, cause="deliveries") is None, (
            "the counter must not exist before maintenance"
        )
        await maintenance._maintain()
        assert sample("penstock_dead_letters_total", run=run_id, cause="deliveries") == 1
        assert sample("penstock_dead_letters_total", run=run_id, cause="invalid") == 0
        await maintenance._maintain()
        assert sample("penstock_dead_letters_total", run=run_id, cause="deliveries") == 1
        assert sample("penstock_stream_entries", run=run_id, stream="evaluation-verdicts") == 0
        assert sample("penstock_stream_oldest_idle_seconds", run=run_id, stream="train-tasks") == 0
    forget(run_id)


async def test_redelivered_messages_are_counted(redis, run_id):
    keys = RunKeys(run_id)
    stream = keys.lane(Lane.TRAIN).tasks
    await put_stub_record(redis, keys)
    await redis.xadd(stream, {"m": "no task"})
    first, second = (Consumer(redis, keys, stream, "rollout", name, DeadLetter, 0.05, 3) for name in ("a", "b"))
    await first.open()
    await redis.xreadgroup("rollout", "a", {stream: ">"})
    await asyncio.sleep(0.1)
    await second.read(1, 0.01)
    assert sample("penstock_redelivered_messages_total", run=run_id, stream="train-tasks") == 1
    forget(run_id)


async def test_the_sandbox_reports_why_it_did_not_judge():
    with Sandbox(1, 20.0) as sandbox:
        judged = await sandbox.judge(parse_text("pattern"), Candidate("a", {"pattern": "a"}))
        broken = await sandbox.judge(parse_text("pattern"), Candidate("a", {}))
    assert (judged.fault, broken.fault) == (None, "error")


async def test_requests_are_timed_by_route_and_status(redis, run_id):
    transport = httpx.ASGITransport(create_app(redis, ACCESS))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=HEADERS) as client:
        for path in (f"/v1/runs/{run_id}", f"/nowhere/{uuid.uuid4()}", "/healthz", "/metrics"):
            await client.get(path)
        page = (await client.get("/metrics")).text
    routes = set(re.findall(r'penstock_api_request_seconds_count{method="GET",route="([^"]+)",status="(\d+)"}', page))
    assert {("/v1/runs/{run}", "404"), ("none", "404")} <= routes
    assert not any(route in ("/healthz", "/metrics") or run_id in route or "nowhere" in route for route, _ in routes)


async def test_the_state_of_a_failed_run_is_shown(redis, run_id):
    records = RunRecords(redis)
    await records.create(run_id, parse_recipe(recipe_document("/model")))
    transitions = await GroupTransitions.fenced(redis, RunKeys(run_id), "controller")
    await records.transition(run_id, RunState.FAILED, "for the test", transitions.fence)
    known, states = KnownRuns(redis, records), RunStates()
    states.show(await known.look(), known.ended)
    assert sample("penstock_run_state", run=run_id, state="failed") == 1
    states.show([], EndedRuns())
