"""Each sink writes what its own library reads back, once, also after the tracker was killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.contracts import Event, RunState
from services.settings.sections import MlflowSettings
from services.tracking.rows import TrackedFacts
from services.tracking.sinks.mlflow import MlflowSink
from services.tracking.sinks.tensorboard import _records
from services.tracking.sinks.wandb import _records as wandb_records
from tests.services.tracking.following import evaluation_of, step_of

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*noload.*:DeprecationWarning",  # SQLAlchemy about MLflow
)


class TensorBoardReader:
    tracking = ["tensorboard"]  # noqa: RUF012

    def __init__(self, folder):
        self.folder = folder / "tensorboard"

    def _read(self):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        read = EventAccumulator(str(self.folder), size_guidance={"scalars": 0, "tensors": 0})
        read.Reload()
        return read

    def curve(self, name):
        read = self._read()
        return [(point.step, round(point.value, 6)) for point in read.Scalars(name)] if name in _tags(read) else []

    def texts(self):
        read = self._read()
        tags = [tag for tag in read.Tags()["tensors"] if tag.startswith("run/")]
        return [point.tensor_proto.string_val[0].decode() for tag in tags for point in read.Tensors(tag)]


def _tags(read):
    return read.Tags()["scalars"]


class MlflowReader:
    tracking = ["mlflow"]  # noqa: RUF012

    def __init__(self, folder):
        self.uri = f"sqlite:///{folder / 'mlflow' / 'mlflow.db'}"

    def run(self):
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self.uri)
        [run] = client.search_runs([client.get_experiment_by_name("penstock").experiment_id])
        return client, run

    def curve(self, name):
        if not Path(self.uri.removeprefix("sqlite:///")).exists():
            return []
        client, run = self.run()
        return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]

    def texts(self):
        tags = self.run()[1].data.tags
        return [*tags["penstock.events"].splitlines(), tags["penstock.state"]]


class WandbReader:
    tracking = ["wandb"]  # noqa: RUF012

    def __init__(self, folder):
        self.folder = folder / "wandb"

    def rows(self):
        from wandb.proto.wandb_internal_pb2 import Record

        found = []
        for file in sorted(self.folder.glob("offline-run-*/run-*.wandb")):
            for record in wandb_records(file):
                items = Record.FromString(record).history.item
                found.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
        return [row for row in found if row]

    def curve(self, name):
        return [(row["rollout_step"], row[name]) for row in self.rows() if name in row]

    def texts(self):
        return [text for row in self.rows() for name, text in row.items() if name.startswith("run/")]


READERS = {"tensorboard": TensorBoardReader, "mlflow": MlflowReader, "wandb": WandbReader}


MLFLOW_SLOWLY = pytest.param("mlflow", marks=pytest.mark.slow)  # creating its database takes ten seconds


@pytest.fixture(params=["tensorboard", MLFLOW_SLOWLY, "wandb"])
def reader(request, runs, run_id):
    return READERS[request.param](runs / run_id)


@asynccontextmanager
async def own_process(run, runs):
    """A tracker in a process of its own, as a user starts it."""
    command = [sys.executable, "-m", "services.tracking", "--run", run.id, "--redis", run.url]
    # The library shares its second process with every process that inherits its address.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment["PENSTOCK_RUNS"] = str(runs)
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        async with asyncio.timeout(30):
            await process.wait()


async def test_a_library_reads_back_what_a_run_logged(submit, reader):
    run = await submit(reader.tracking)
    await run.append(evaluation_of("before", 0, 0.25), *(step_of(step) for step in range(1, 6)))
    await run.append(Event(service="learner", phase="checkpoint", text="step 5", at=5.0))
    await run.append(evaluation_of("after", 5, 0.75))
    await run.end()
    async with run.tracked():
        await run.until(lambda: run.events("tracking-started"), "the sink")
    assert await run.events("tracking-failed") == []
    assert reader.curve("loss") == [(step, step / 10) for step in range(1, 6)]
    assert reader.curve("evaluation/held-out/accuracy") == [(0, 0.25), (5, 0.75)]
    assert reader.curve("policy_version") == [(step, step) for step in range(1, 6)]
    assert any("checkpoint: step 5" in text for text in reader.texts())


@pytest.mark.parametrize("kind", ["tensorboard", MLFLOW_SLOWLY, "wandb"])
async def test_a_killed_tracker_leaves_neither_gap_nor_double(submit, runs, run_id, kind):
    reader = READERS[kind](runs / run_id)
    run = await submit(reader.tracking)
    await run.append(*(step_of(step) for step in range(1, 31)))
    async with own_process(run, runs) as process:
        await run.until(lambda: run.events("tracking-started"), "the sink")
        if kind != "wandb":  # its library has not written anything yet
            await run.until(lambda: asyncio.to_thread(reader.curve, "loss"), "the first steps")
        process.send_signal(signal.SIGKILL)
    await run.append(*(step_of(step) for step in range(31, 41)))
    await run.end()
    async with run.tracked():
        await run.until(lambda: started(run, 2), "the sink of the second tracker")
    assert reader.curve("loss") == [(step, step / 10) for step in range(1, 41)]
    assert await run.events("tracking-failed") == []


async def started(run, times):
    return len(await run.events("tracking-started")) == times


async def test_a_rewound_run_is_written_again(submit, reader):
    run = await submit(reader.tracking)
    await run.append(*(step_of(step) for step in range(1, 5)))
    async with run.tracked():
        await run.until(lambda: run.events("tracking-started"), "the sink")
    await run.rewind(2)
    await run.append(step_of(3, 5, loss=9.0))
    async with run.tracked():
        await run.until(lambda: started(run, 2), "the sink of the second tracker")
    again = [(1, 0.1), (2, 0.2), (3, 9.0)]
    before = [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    shown = sorted(reader.curve("loss"))
    assert shown == (again if isinstance(reader, TensorBoardReader) else sorted([*before, (3, 9.0)]))
    assert (3, 1) in reader.curve("rewinds")
    assert any("the rollout steps after 2 left" in text for text in reader.texts())


async def test_a_session_never_overwrites_another(submit, runs, run_id):
    run, reader = await submit(["wandb"]), WandbReader(runs / run_id)
    for step in range(1, 4):
        await run.append(step_of(step))
        async with run.tracked():
            await run.until(lambda times=step: started(run, times), "the sink")
    assert reader.curve("loss") == [(1, 0.1), (2, 0.2), (3, 0.3)]


async def test_mlflow_has_recipe_tags_and_how_the_run_ended(submit, runs, run_id):
    run, reader = await submit(["mlflow"]), MlflowReader(runs / run_id)
    await run.append(step_of(1))
    await run.end(RunState.FAILED, "no progress")
    async with run.tracked():
        await run.until(lambda: run.events("tracking-started"), "the sink")
    client, found = reader.run()
    assert (found.info.status, found.info.run_name) == ("FAILED", run.id)
    assert found.data.params["limits.rollout_steps"] == "3"
    tags = found.data.tags
    assert (tags["penstock.run"], tags["penstock.project"]) == (run.id, "default")
    assert (tags["penstock.state"], tags["penstock.export"]) == ("failed: no progress", "/exports/final")
    [point] = client.get_metric_history(found.info.run_id, "loss")
    assert point.timestamp == int(step_of(1).learning_finished_at * 1000)


def facts(tmp_path):
    return TrackedFacts("r", "default", 1.0, {}, tmp_path)


def test_the_platforms_credentials_go_to_its_own_server_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://ours")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    with pytest.raises(
        ValueError, match=r"^tracking.mlflow.uri: 'https://other' is not valid: expected .*'https://ours'"
    ):
        MlflowSink(MlflowSettings(uri="https://other")).open(facts(tmp_path))


def test_records_end_where_a_file_was_cut_off(tmp_path, runs):
    torn = tmp_path / "torn"
    torn.write_bytes(b"\x05" + b"\x00" * 7 + b"crc1" + b"abc")
    assert list(_records(torn)) == []
    torn.write_bytes(b"\xff" * 12)
    assert list(_records(torn)) == []
    torn.write_bytes(b":W&B\xe1\xbe\x00" + b"\x00" * 4 + b"\x09\x00\x01abc")
    assert list(wandb_records(torn)) == []
    torn.write_bytes(b"")
    assert list(wandb_records(torn)) == []
