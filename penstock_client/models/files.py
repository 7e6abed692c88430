"""Owns the models of a run's checkpoints and its export.

Must not read a file.
"""

from __future__ import annotations

from pydantic import Field

from penstock_client.models.base import ApiModel


class StoredFile(ApiModel):
    """A file of a run: its name, its size in bytes, its SHA-256; None where none is recorded."""

    name: str
    size: int
    sha256: str | None = None


class ExportedFiles(ApiModel):
    """The files of a run's export; none before it is exported. `place`: where they are."""

    place: str | None = None
    files: list[StoredFile] = Field(default_factory=list)


class StoredCheckpoint(ApiModel):
    """A checkpoint: the policy after rollout `step`, as it was published as `version`."""

    name: str
    step: int
    version: int
    files: list[StoredFile] = Field(default_factory=list)


class CheckpointEntries(ApiModel):
    """The whole checkpoints of a run, by step."""

    checkpoints: list[StoredCheckpoint]
