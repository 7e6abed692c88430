"""Owns finding the runs whose files are here or in the store, and whose record Redis has lost.

Must not write anything; `adopt_run` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.storage import objects
from services.storage.errors import StoreError
from services.storage.kept_files import read_kept_files
from services.storage.mirror import files_place, run_mirror
from services.storage.places import SHARED_FOLDERS, configured_store, runs_folder
from services.streams.connection.client import Redis
from services.streams.keys import RunKeys
from services.streams.runs.remains import FACTS, RemainsError, RunRemains, read_remains
from services.streams.state.runs import RunRecords, UnknownRunError

HERE = "`penstock recover` where the files are: on a cluster, in the cpu pod"


@dataclass(frozen=True)
class LeftRun:
    """What is left of a run. `files`: the texts of the user's files; `place`: where all of it is."""

    remains: RunRemains
    files: dict[str, str]
    place: str


def read_left(run: str) -> LeftRun:
    """What the runs folder or the store has of a run. Blocks. Raises RemainsError, StoreError."""
    runs, mirror = runs_folder(), run_mirror(run)
    if not mirror.remote and not runs.is_dir():
        raise RemainsError(f"{runs}: missing: this process has no storage of runs; use {HERE}")
    try:
        remains = read_remains(runs / run, mirror, run)
        return LeftRun(remains, read_kept_files(runs / run, mirror), files_place(runs))
    except OSError as error:
        raise StoreError(f"{runs / run}: cannot be read ({error.strerror})") from None


def names_here() -> list[str]:
    """The names of all runs that have started to train and left files here. Blocks. Raises StoreError, OSError."""
    if at := configured_store():
        names = [name for name in objects.folders(at) if objects.head(at / name / FACTS)]
    else:
        names = [path.parent.name for path in runs_folder().glob(f"*/{FACTS}")]
    return sorted(name for name in names if name not in SHARED_FOLDERS and _is_name(name))


def _is_name(name: str) -> bool:
    try:
        RunKeys(name)
    except ValueError:
        return False
    return True


async def is_lost(redis: Redis, run: str) -> bool:
    """Whether Redis has no record of the run, or only that which a controller left when Redis had lost the run."""
    try:
        record = await RunRecords(redis).get(run)
    except UnknownRunError:
        return True
    return record.state.ended and not record.closing and not await redis.exists(RunKeys(run).policy)
