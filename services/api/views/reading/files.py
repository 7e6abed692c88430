"""Owns how the files of a run are shown: checkpoints and its export.

Must not read a file.
"""

from __future__ import annotations

from pydantic import BaseModel


class FileView(BaseModel):
    """A file: its name, its size in bytes, and its SHA-256; null where none is recorded."""

    name: str
    size: int
    sha256: str | None


class FileList(BaseModel):
    """The files of a run's export, by name; none before it is exported. `place`: where they are."""

    place: str | None
    files: list[FileView]


class CheckpointView(BaseModel):
    """A checkpoint: the policy after rollout `step`, as it was published as `version`."""

    name: str
    step: int
    version: int
    files: list[FileView]


class CheckpointList(BaseModel):
    """The whole checkpoints of a run, by step."""

    checkpoints: list[CheckpointView]
