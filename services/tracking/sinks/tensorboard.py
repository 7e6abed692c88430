"""Owns the sink for TensorBoard: event files in a folder below the run's folder, written by tensorboardX.

Must not be the only place where a number is kept: TensorBoard shows a sample of long curves.

One record of a file is one row with its cursor, so a process that dies leaves whole rows. A session-log record hides
what older records have from its step on: that is how TensorBoard itself treats a program that restarts earlier.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from services.settings.sections import TensorBoardSettings
from services.tracking.rows import RowKind, RunEnding, TrackCursor, TrackedFacts, TrackedRow

CURSOR = "penstock/cursor"
"""The tag of the cursors. Their plugin is none that TensorBoard has, so it does not show them."""
LENGTH_BYTES, CHECKSUM_BYTES = 8, 4
MOST_BYTES = 2**26
"""A longer record is not one of ours."""


class TensorBoardSink:
    """Writes scalars by the names of metrics, and texts under `run/`."""

    def __init__(self, settings: TensorBoardSettings) -> None:
        self._settings = settings
        self._writer: Any = None

    def open(self, facts: TrackedFacts) -> TrackCursor | None:
        """Start an event file. Raises OSError."""
        from tensorboardX.event_file_writer import EventsWriter

        folder = facts.folder / self._settings.folder
        folder.mkdir(parents=True, exist_ok=True)
        held = _newest_cursor(folder)
        # The library's own names repeat within a second, and it empties a file that exists.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        if held is None:
            recipe = json.dumps(dict(facts.recipe), indent=2)
            self._write(0, facts.created_at, [_text("run/recipe", f"```json\n{recipe}\n```")])
        self._writer.flush()
        return held

    def log(self, rows: Sequence[TrackedRow]) -> None:
        """Write rows, and hand them to the operating system. Raises OSError."""
        for row in rows:
            if row.kind is RowKind.REWIND:
                self._hide_after(row.step, row.at)
            values = [_scalar(name, value) for name, value in row.values.items()]
            if row.text:
                values.append(_text(f"run/{row.kind.value}", row.text))
            self._write(row.step, row.at, [*values, _cursor(row.cursor)])
        self._writer.flush()

    def close(self, ending: RunEnding | None) -> None:
        """Write how the run ended, and close the file. Raises OSError."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        try:
            if ending:
                text = f"{ending.state.value}: {ending.reason}" + (
                    f"; export: {ending.export}" if ending.export else ""
                )
                writer.write_event(_event(0, time.time(), [_text("run/end", text)]))
        finally:
            writer.close()

    def _write(self, step: int, at: float, values: list[Any]) -> None:
        self._writer.write_event(_event(step, at, values))

    def _hide_after(self, step: int, at: float) -> None:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._writer.write_event(Event(step=step + 1, wall_time=at, session_log=SessionLog(status=SessionLog.START)))


def _event(step: int, at: float, values: list[Any]) -> Any:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    return Event(step=step, wall_time=at, summary=Summary(value=values))


def _scalar(name: str, value: float) -> Any:
    from tensorboardX.proto.summary_pb2 import Summary

    return Summary.Value(tag=name, simple_value=value)


def _text(tag: str, text: str, plugin: str = "text") -> Any:
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboardX.proto.tensor_pb2 import TensorProto
    from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _cursor(cursor: TrackCursor) -> Any:
    return _text(CURSOR, cursor.model_dump_json(), plugin="penstock")


def _newest_cursor(folder: Path) -> TrackCursor | None:
    """The last cursor in the newest event file that has one."""
    for file in sorted(folder.glob("events.out.tfevents.*"), reverse=True):
        found = None
        for record in _records(file):
            found = _cursor_in(record) or found
        if found:
            return TrackCursor.model_validate_json(found)
    return None


def _cursor_in(record: bytes) -> bytes | None:
    from tensorboardX.proto.event_pb2 import Event

    values = Event.FromString(record).summary.value
    return values[-1].tensor.string_val[0] if values and values[-1].tag == CURSOR else None


def _records(file: Path) -> Iterator[bytes]:
    """The records of an event file (TFRecord: length, checksum, data, checksum), to the first that was cut off."""
    with file.open("rb") as content:
        while len(header := content.read(LENGTH_BYTES + CHECKSUM_BYTES)) == LENGTH_BYTES + CHECKSUM_BYTES:
            length = int.from_bytes(header[:LENGTH_BYTES], "little")
            data = content.read(min(length, MOST_BYTES))
            if len(data) != length or len(content.read(CHECKSUM_BYTES)) != CHECKSUM_BYTES:
                return
            yield data
