"""Owns what a run's folder, or its place in the store, still says of a run that has no record any more.

Must not write anything, nor know what a checkpoint's tensors hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError

from services.contracts import Batch, SamplerSnapshot, StepRecord, Value
from services.settings import Recipe
from services.storage.errors import MissingObjectError
from services.storage.mirror import Mirror

FACTS, MANIFEST, SAMPLER = "run.json", "checkpoint.json", "sampler.json"
WRITER = r"(?:\.e(?P<epoch>[0-9]{4,})-(?P<owner>[\w-]*))?"
OF_FACTS = re.compile(rf"run{WRITER}\.json", re.ASCII)
OF_RECORD = re.compile(rf"records/step-(?P<step>[0-9]{{6,}}){WRITER}\.json", re.ASCII)
OF_BATCH = re.compile(rf"batches/step-(?P<step>[0-9]{{6,}}){WRITER}\.json", re.ASCII)
OF_CHECKPOINT = re.compile(
    rf"checkpoints/(?P<name>step-(?P<step>[0-9]{{6,}}){WRITER}[\w.-]*)/checkpoint\.json", re.ASCII
)
SHOWN_CHARACTERS = 200

V = TypeVar("V", bound=Value)


class RemainsError(RuntimeError):
    """The files are not a run's, or not of this release; the text names the file and the reason."""


class KeptFacts(Value):
    """What a learner wrote of the run; see learner.archive. `project`, `created_at`: None of an earlier release."""

    run: str
    project: str | None = None
    recipe: Recipe
    model_path: str
    created_at: float | None = None
    inputs: dict[str, str] = Field(default_factory=dict)


class KeptCheckpoint(Value):
    """What a checkpoint's manifest says of it; see learner.checkpoint."""

    step: int
    version: int
    name: str
    weights: str = ""
    files: dict[str, Value] = Field(default_factory=dict)


@dataclass(frozen=True)
class RunRemains:
    """`records`: of the committed steps, from 1 on without a gap. `checkpoints`: those of that history, by step.

    `snapshot`: the sampler's of the newest checkpoint. `last_batch`: the newest archived batch.
    """

    facts: KeptFacts
    records: tuple[StepRecord, ...]
    checkpoints: dict[int, KeptCheckpoint]
    snapshot: SamplerSnapshot | None
    last_batch: Batch | None

    @property
    def step(self) -> int:
        """The step of the newest checkpoint; 0: there is none."""
        return max(self.checkpoints, default=0)


def read_remains(folder: Path, mirror: Mirror, run: str) -> RunRemains:
    """What is left of a run in its folder and in the store. Raises RemainsError, StoreError, OSError."""
    files = _Files(folder, mirror)
    facts = _facts(files, run)
    by_step: dict[int, tuple[int, str]] = {}
    for name, found in files.matching(OF_RECORD):
        by_step[int(found["step"])] = max(by_step.get(int(found["step"]), (-1, "")), (int(found["epoch"] or 0), name))
    records: list[StepRecord] = []
    while (known := by_step.get(len(records) + 1)) is not None:
        records.append(files.read(known[1], StepRecord))
    weights = {record.step: record.weights for record in records}
    checkpoints: dict[int, KeptCheckpoint] = {}
    for name, _ in files.matching(OF_CHECKPOINT):
        found_one = files.read(name, KeptCheckpoint)
        own = weights.get(found_one.step)
        whole = all(f"checkpoints/{found_one.name}/{file}" in files.names for file in found_one.files)
        if own is not None and whole and (not found_one.weights or not own or found_one.weights == own):
            checkpoints[found_one.step] = found_one
    newest = checkpoints.get(max(checkpoints, default=0))
    sampler = f"checkpoints/{newest.name}/{SAMPLER}" if newest else ""
    snapshot = files.read(sampler, SamplerSnapshot) if sampler in files.names else None
    batches = max(
        ((int(found["step"]), int(found["epoch"] or 0), name) for name, found in files.matching(OF_BATCH)), default=None
    )
    return RunRemains(facts, tuple(records), checkpoints, snapshot, files.read(batches[2], Batch) if batches else None)


def _facts(files: _Files, run: str) -> KeptFacts:
    found = [(int(match["epoch"] or 0), name) for name, match in files.matching(OF_FACTS)]
    if not found:
        raise RemainsError(f"{files.where(FACTS)}: missing: expected the folder of a run that has started to train")
    facts = files.read(max(found)[1], KeptFacts)
    if facts.run != run:
        raise RemainsError(f"{files.where(max(found)[1])}: is of run {facts.run[:SHOWN_CHARACTERS]!r}, not {run!r}")
    return facts


class _Files:
    """The files of a run by name, on this node or in the store."""

    def __init__(self, folder: Path, mirror: Mirror) -> None:
        self._folder = folder
        self._mirror = mirror
        local = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        self.names = frozenset({*(str(path.relative_to(folder)) for path in local), *mirror.listed()})

    def matching(self, pattern: re.Pattern[str]) -> Iterator[tuple[str, re.Match[str]]]:
        for name in sorted(self.names):
            if found := pattern.fullmatch(name):
                yield name, found

    def where(self, name: str) -> str:
        path = self._folder / name
        return str(path) if path.is_file() else self._mirror.location(name, self._folder)

    def read(self, name: str, kind: type[V]) -> V:
        try:
            path = self._folder / name
            content = path.read_bytes() if path.is_file() else self._mirror.read(name)
            return kind.model_validate_json(content)
        except MissingObjectError:
            raise RemainsError(f"{self.where(name)}: missing") from None
        except ValidationError as error:
            fault = error.errors()[0]
            place = ".".join(str(part) for part in fault["loc"])
            reason = f"{place}: {fault['msg']}"[:SHOWN_CHARACTERS]
            raise RemainsError(f"{self.where(name)}: this release cannot read it: {reason}") from None
