"""Owns the sink for Weights & Biases, online or in a folder below the run's folder, through its library.

Must not take credentials from the recipe.

The library hands rows to a process of its own, which writes them in blocks of 32 KiB: a machine that dies loses what
it has not written. Each row has its cursor, and an opened sink asks the files (the server, online) which one they hold.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from services.contracts import RunState
from services.settings.sections import WandbSettings
from services.tracking.rows import RunEnding, TrackCursor, TrackedFacts, TrackedRow

QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
CURSOR = "penstock/cursor"
AXIS = "rollout_step"
SECOND_S = 1.1
HEADER_BYTES, BLOCK_BYTES, FRAGMENT_BYTES = 7, 2**15, 7
"""A file of the library is a log of LevelDB behind a header: blocks of fragments, each with checksum, length, type."""
FULL, LAST = 1, 4
"""The types of fragments that end a record."""


class WandbSink:
    """Writes each row as one of the history, with the rollout step as its axis, and the recipe as config."""

    def __init__(self, settings: WandbSettings) -> None:
        self._settings = settings
        self._run: Any = None

    def open(self, facts: TrackedFacts) -> TrackCursor | None:
        """Start a session of the run. Raises wandb.Error."""
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import wandb

        online = self._settings.mode == "online"
        folder = facts.folder / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        held = None if online else _newest_cursor(folder, facts.run)
        _await_new_second(folder, facts.run)
        self._run = wandb.init(
            project=self._settings.project,
            entity=self._settings.entity,
            id=facts.run,
            name=facts.run,
            tags=[facts.project],
            config=dict(facts.recipe),
            dir=str(facts.folder),
            mode=self._settings.mode,
            resume="allow" if online else None,
            settings=_settings(wandb),
        )
        self._run.define_metric(AXIS)
        self._run.define_metric("*", step_metric=AXIS)
        text = self._run.summary.get(CURSOR) if online else held
        return TrackCursor.model_validate_json(text) if text else None

    def log(self, rows: Sequence[TrackedRow]) -> None:
        """Hand rows to the library. Raises wandb.Error."""
        for row in rows:
            text = {f"run/{row.kind.value}": row.text} if row.text else {}
            self._run.log({**row.values, **text, AXIS: row.step, "at": row.at, CURSOR: row.cursor.model_dump_json()})

    def close(self, ending: RunEnding | None) -> None:
        """Write how the run ended, and wait until the library has written everything. Raises wandb.Error."""
        if self._run is None:
            return
        import wandb

        run, self._run = self._run, None
        if ending:
            run.summary.update({"state": ending.state.value, "reason": ending.reason, "export": ending.export})
        try:
            run.finish(exit_code=0 if ending is None or ending.state is RunState.SUCCEEDED else 1)
        finally:
            # Returns when the second process has ended: only then are the last rows in the file, and the run's id free.
            wandb.teardown()


def _settings(wandb: Any) -> Any:
    """Nothing of the machine, the checkout or the console is recorded."""
    return wandb.Settings(
        console="off",
        disable_git=True,
        save_code=False,
        silent=True,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )


def _await_new_second(folder: Path, run: str) -> None:
    """The library names a session by its second, and would write over one that started in the same."""
    newest = max((path.stat().st_ctime for path in folder.glob(f"*run-*-{run}")), default=0.0)
    time.sleep(max(0.0, min(SECOND_S, newest + SECOND_S - time.time())))


def _newest_cursor(folder: Path, run: str) -> str | None:
    """The last cursor in the newest offline session of the run that has one, as JSON."""
    for file in sorted(folder.glob(f"offline-run-*-{run}/run-{run}.wandb"), reverse=True):
        found = None
        for record in _records(file):
            found = _cursor_in(record) or found
        if found:
            return found
    return None


def _cursor_in(record: bytes) -> str | None:
    from wandb.proto.wandb_internal_pb2 import Record

    for item in Record.FromString(record).history.item:
        if CURSOR in (item.key, *item.nested_key):
            return str(json.loads(item.value_json))
    return None


def _records(file: Path) -> Iterator[bytes]:
    """The records of a file, to the first that was cut off."""
    content, parts, at = file.read_bytes(), bytearray(), HEADER_BYTES
    while True:
        if (rest := BLOCK_BYTES - at % BLOCK_BYTES) < FRAGMENT_BYTES:
            at += rest
        head = content[at : at + FRAGMENT_BYTES]
        length = int.from_bytes(head[4:6], "little")
        at += FRAGMENT_BYTES
        if len(head) < FRAGMENT_BYTES or len(content) < at + length:
            return
        parts += content[at : at + length]
        at += length
        if head[6] in (FULL, LAST):
            yield bytes(parts)
            parts.clear()
