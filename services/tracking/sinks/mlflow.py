"""Owns the sink for MLflow, on a server or in a SQLite file, through MLflow's client.

Must not take credentials from the recipe, nor send those of the platform to a server that the recipe names.

MLflow stores a metric once for each key, step, time and value. Rows have the times of the run's log, so a row that is
sent again after a crash is stored once.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from services.contracts import RunState
from services.settings.faults import invalid
from services.settings.sections import MlflowSettings
from services.tracking.rows import RowKind, RunEnding, TrackCursor, TrackedFacts, TrackedRow, flattened

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
}
SERVER = "MLFLOW_TRACKING_URI"
CREDENTIALS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
CURSOR, RUN, CREATED_AT, EVENTS, STATE = (
    f"penstock.{name}" for name in ("cursor", "run", "created_at", "events", "state")
)
STATUS = {RunState.SUCCEEDED: "FINISHED", RunState.FAILED: "FAILED", RunState.CANCELLED: "KILLED"}
MOST_METRICS, MOST_PARAMS = 900, 100
"""Of one request; MLflow accepts 1000 and 100."""
PARAM_CHARACTERS, TAG_CHARACTERS, EVENTS_SHOWN = 500, 5000, 20


class MlflowSink:
    """Writes metrics by their names, the recipe as params, the last events and the state as tags."""

    def __init__(self, settings: MlflowSettings) -> None:
        self._settings = settings
        self._client: Any = None
        self._run = ""
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)

    def open(self, facts: TrackedFacts) -> TrackCursor | None:
        """Find the run by its tags, or create it. Raises MlflowException, ValueError."""
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        uri = _server(self._settings, facts)
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(uri)
        experiment = self._experiment()
        tags = {RUN: facts.run, CREATED_AT: repr(facts.created_at), "penstock.project": facts.project}
        wanted = " and ".join(f"tags.`{name}` = '{tags[name]}'" for name in (RUN, CREATED_AT))
        [run] = self._client.search_runs([experiment], wanted, max_results=1) or [
            self._client.create_run(experiment, int(facts.created_at * 1000), {**tags, STATE: "running"}, facts.run)
        ]
        self._run = run.info.run_id
        self._events.extend(run.data.tags.get(EVENTS, "").splitlines())
        self._client.update_run(self._run, status="RUNNING")
        self._log_params(facts.recipe, run.data.params)
        held = run.data.tags.get(CURSOR)
        return TrackCursor.model_validate_json(held) if held else None

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._settings.experiment)
        return str(found.experiment_id if found else self._client.create_experiment(self._settings.experiment))

    def _log_params(self, recipe: Mapping[str, Any], known: Mapping[str, str]) -> None:
        """Those that MLflow lacks: a param cannot be changed."""
        from mlflow.entities import Param

        missing = iter([Param(name, text) for name, text in _params(recipe) if name not in known])
        while params := list(islice(missing, MOST_PARAMS)):
            self._client.log_batch(self._run, params=params)

    def log(self, rows: Sequence[TrackedRow]) -> None:
        """Write rows, as many at once as MLflow accepts. Raises MlflowException."""
        metrics: list[Any] = []
        tags: dict[str, str] = {}
        for row in rows:
            if metrics and len(metrics) + len(row.values) > MOST_METRICS:
                self._write(metrics, tags)
                metrics, tags = [], {}
            metrics += _metrics(row)
            if row.kind is RowKind.STATE:
                tags[STATE] = row.text
            if row.text:
                self._events.append(row.text.replace("\n", " "))
                tags[EVENTS] = "\n".join(self._events)[-TAG_CHARACTERS:]
            tags[CURSOR] = row.cursor.model_dump_json()
        self._write(metrics, tags)

    def _write(self, metrics: list[Any], tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        # The metrics first: a cursor without its row would be a gap, and a row without its cursor is sent again.
        self._client.log_batch(self._run, metrics=metrics)
        self._client.log_batch(self._run, tags=[RunTag(name, text) for name, text in tags.items()])

    def close(self, ending: RunEnding | None) -> None:
        """Write how the run ended. Raises MlflowException."""
        if not self._run or ending is None:
            return
        self._client.set_tag(self._run, STATE, f"{ending.state.value}: {ending.reason}"[:TAG_CHARACTERS])
        if ending.export:
            self._client.set_tag(self._run, "penstock.export", ending.export[:TAG_CHARACTERS])
        self._client.set_terminated(self._run, STATUS[ending.state])


def _metrics(row: TrackedRow) -> list[Any]:
    from mlflow.entities import Metric

    return [Metric(name, value, int(row.at * 1000), row.step) for name, value in row.values.items()]


def _params(recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in flattened(recipe).items():
        yield name, (value if isinstance(value, str) else json.dumps(value))[:PARAM_CHARACTERS]


def _server(settings: MlflowSettings, facts: TrackedFacts) -> str:
    """The recipe's server, else the platform's, else a file in the run's folder.

    Raises ValueError where the platform has credentials, which are for its own server.
    """
    own = os.environ.get(SERVER, "")
    if settings.uri and settings.uri != own and own and any(os.environ.get(name) for name in CREDENTIALS):
        expected = f"{SERVER} = {own!r}, or none, because the platform's credentials are for that server"
        raise ValueError(invalid("tracking.mlflow.uri", settings.uri, expected))
    if named := settings.uri or own:
        return named
    folder = facts.folder / "mlflow"
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'mlflow.db'}"
