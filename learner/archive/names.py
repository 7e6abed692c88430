"""Owns the names in a run's folder: of its parts, and of the step and the learner to which a file belongs.

Must not read or write a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from services.contracts import UNOWNED, Fence

FACTS, BATCHES, RECORDS, FAILURES, CHECKPOINTS = "run.json", "batches", "records", "failures", "checkpoints"
FIRST_STEP = 1
"""The sampler counts rollout steps from 1; the run's model is step 0."""
DIFFERS = "differs-"
_WRITER = r"(?:\.e(?P<epoch>\d{4,})-(?P<owner>[\w-]*))?"
_OF_A_STEP = re.compile(rf"step-(?P<step>\d{{6,}}){_WRITER}[.-]")
"""In the name of every file and folder that belongs to a step, also while it is written or after it was set aside."""
_OF_FACTS = re.compile(rf"run{_WRITER}\.json")


def step_name(step: int) -> str:
    """The name of a rollout step in file names, which sort in the order of the steps."""
    return f"step-{step:06d}"


def owned_name(step: int, fence: Fence) -> str:
    """The start of the names of what a learner writes for a step."""
    return step_name(step) + _suffix(fence)


def facts_name(fence: Fence) -> str:
    """The name of the file with the facts of the run as a learner found them."""
    return f"run{_suffix(fence)}.json"


def written_by(name: str) -> tuple[int, Fence] | None:
    """The step in the name of a file or folder, and the learner that wrote it; None if it belongs to no step.

    A name of an older release without a learner counts as UNOWNED.
    """
    found = _OF_A_STEP.search(name)
    return (int(found["step"]), _writer(found)) if found else None


def writer_of(name: str) -> Fence:
    """The learner in the name of a file or folder; UNOWNED if it names none."""
    written = written_by(name)
    return written[1] if written else UNOWNED


def facts_by(name: str) -> Fence | None:
    """The learner that wrote this file of facts; None if it is no such file."""
    found = _OF_FACTS.fullmatch(name)
    return _writer(found) if found else None


def newest_epoch(names: Iterable[str]) -> int:
    """The highest epoch in names with folders; 0 if none has one."""
    parts = {part for name in names for part in name.split("/")}
    writers = [written[1] for part in parts if (written := written_by(part))]
    writers += [writer for part in parts if (writer := facts_by(part))]
    return max((writer.epoch for writer in writers), default=0)


def _suffix(fence: Fence) -> str:
    return f".e{fence.epoch:04d}-{fence.owner}" if fence != UNOWNED else ""


def _writer(found: re.Match[str]) -> Fence:
    return Fence(int(found["epoch"]), found["owner"]) if found["epoch"] else UNOWNED
