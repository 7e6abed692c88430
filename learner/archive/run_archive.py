"""Owns a run's folder on disk: its facts, the batch and payloads of each rollout step, and the record of each step.

Must not know the format of a batch's files, nor what a checkpoint holds.
With a store (the mirror), a file counts once the store holds it, and the folder is the scratch space of this node.

    run.json                             the recipe, the model's folder, the number of ranks; of the first learner
    run.e0002-OWNER.json                 the same as a later learner found it; the one with the highest epoch counts
    batches/step-000012.e0002-OWNER.json             the batch message, written by rank 0 before training
    batches/step-000012.e0002-OWNER.rank-0.parquet   the payloads of rank 0's share; every rank writes its own before
    batches/differs-...                              set aside: it names other groups than the step's committed record
    records/step-000012.e0002-OWNER.json             the step record, written after its commit
    failures/step-000012.e0002-OWNER.json            the record of a step that failed the run, never committed

Every file is written completely or not at all. Ranks on several machines need one shared folder, or a store.

A learner that was replaced may be stopped for any time and then go on. So each file has the name of the learner that
wrote it, its epoch and its id, and no learner deletes or renames what one of its successors wrote (Fence.may_delete).
The step's record names the learner whose batch counts. A learner starts with an epoch above all that the folder names,
even if Redis lost the epochs of its predecessors. Names of older releases have no learner and count as epoch 0.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pydantic import Field

from learner.archive.batch_files import read_batch_file, read_share_file, write_batch_file, write_share_file
from learner.archive.files import ArchiveError, read_message, write_message
from learner.archive.names import (
    BATCHES,
    CHECKPOINTS,
    DIFFERS,
    FACTS,
    FAILURES,
    RECORDS,
    facts_by,
    facts_name,
    newest_epoch,
    owned_name,
    step_name,
    written_by,
)
from services.contracts import UNOWNED, Batch, Fence, StepRecord, Value
from services.settings import Recipe
from services.storage.mirror import NO_MIRROR, Mirror
from services.storage.places import runs_folder
from services.streams.delivery.payloads import SamplePayload


class RunOrigin(Value):
    """The part of run.json that says which run it is of, as ids are used again. None: of an earlier release."""

    created_at: float | None = None


class RunFacts(RunOrigin):
    """What a replay needs besides the batches. `versions`: of the libraries used in training.

    `inputs`: the data of the hub with commit and digest, by its text in the recipe. `project`: whose run it is; None:
    of an earlier release.
    """

    run: str
    project: str | None = None
    recipe: Recipe
    model_path: str
    ranks: int
    device: str
    versions: dict[str, str]
    inputs: dict[str, str] = Field(default_factory=dict)


def run_folder(run: str) -> Path:
    """The folder for the run's files, below PENSTOCK_RUNS, by default ./runs."""
    return runs_folder() / run


class RunArchive:
    """The archive in a run's folder. Writes block until the file is durable; nothing is cached.

    Methods that write, fetch or delete also raise StoreError.
    """

    def __init__(self, folder: Path, mirror: Mirror = NO_MIRROR) -> None:
        self.folder = folder
        self.mirror = mirror
        self.checkpoints = folder / CHECKPOINTS
        self._batches = folder / BATCHES
        self._records = folder / RECORDS
        self._failures = folder / FAILURES

    def clear_scratch(self) -> None:
        """Delete the batches and records that an earlier process left on this node, if the store holds the run.

        Every rank calls it before it joins the others, so that none reads a step that was rewound meanwhile.
        """
        if self.mirror.remote and FACTS in self.mirror.listed():
            for part in (self._batches, self._records, self._failures):
                shutil.rmtree(part, ignore_errors=True)

    def sync_with_store(self, created_at: float | None = None) -> None:
        """Fetch facts, batch messages and records from the store; shares and checkpoints are fetched when needed.

        If the store does not hold the run yet, because it started without a store, upload its folder. Rank 0 only.
        Raises ArchiveError if the folder is of a run that was not created at `created_at`.
        """
        if not self.mirror.remote:
            return
        stored = self.mirror.listed()
        if FACTS not in stored and (self.folder / FACTS).is_file():
            if read_message(self.folder / FACTS, RunOrigin).created_at not in (None, created_at):
                raise ArchiveError(
                    f"{self.folder}: holds files of an earlier run with this id, which the store no longer has; "
                    "move the folder away, or submit the run under another id"
                )
            # Sorted by name, run.json comes last. Only then does the store hold the run, so an interrupted upload is
            # repeated.
            for path in sorted(path for path in self.folder.rglob("*") if path.is_file()):
                if _is_durable(path.relative_to(self.folder)):
                    self._keep(path)
            return
        small = {
            name: size
            for name, size in stored.items()
            if facts_by(name) or (_is_archived(name) and name.endswith(".json"))
        }
        self.mirror.fetch(small, self.folder)

    def _keep(self, path: Path) -> None:
        self.mirror.put(str(path.relative_to(self.folder)), path)

    def newest_epoch(self) -> int:
        """The highest epoch of a learner that wrote here; 0 if none did."""
        paths = [path for pattern in ("*", "*/*") for path in self.folder.glob(pattern)]
        return newest_epoch([*self.mirror.listed(), *(path.name for path in paths)])

    def start(self, facts: RunFacts, fence: Fence, *, resumed: bool = False) -> None:
        """Start a run's archive, or continue it if `resumed`. Raises ArchiveError if it has records otherwise.

        From now on, a learner that starts with this archive takes an epoch above that of `fence`, the caller's.
        """
        earlier = [path for part in (self._records, self.checkpoints) for path in part.glob("step-*")]
        if earlier and not resumed:
            where = self.mirror.location("", self.folder)
            if self.newest_epoch() >= fence.epoch:  # its own epoch was above all that were named here
                raise ArchiveError(
                    f"{where}: another learner of the run has written here since, so {fence.owner} was replaced"
                )
            raise ArchiveError(
                f"{where}: holds {len(earlier)} records and checkpoints, but Redis has no committed policy of the run. "
                "If they are of an earlier run with this id: move the folder away, or submit the run under another id. "
                "If they are of this run, Redis lost its state: restore the data of Redis and resume the run, or, "
                "without that data, submit it under another id"
            )
        self.prepare()
        self._write(self.folder / facts_name(fence), facts)
        first = self.folder / FACTS
        if not first.exists() or not resumed:
            self._write(first, facts)
        elif FACTS not in self.mirror.listed():  # an attempt that the store interrupted
            self._keep(first)

    def prepare(self) -> None:
        """Create the folders. Every rank does so before it writes."""
        for part in (self._batches, self._records, self._failures, self.checkpoints):
            part.mkdir(parents=True, exist_ok=True)

    def facts(self) -> RunFacts:
        """The run's facts as the newest learner found them. Raises ArchiveError."""
        newest = max(
            self.facts_files(), key=lambda path: (newest_epoch([path.name]), path.name), default=self.folder / FACTS
        )
        return read_message(newest, RunFacts)

    def facts_files(self) -> list[Path]:
        """The files of facts on this node."""
        return [path for path in self.folder.glob("run.*") if facts_by(path.name)]

    def _write(self, path: Path, message: Value) -> None:
        write_message(path, message)
        self._keep(path)

    def write_batch(self, batch: Batch, fence: Fence) -> None:
        """Write the batch message, before it is trained. Rank 0 only; `fence`: its own, as in all that it writes."""
        path = self.batch_path(batch.step, fence)
        write_batch_file(path, batch, fence)
        self._keep(path)

    def write_share(self, batch: Batch, rank: int, payloads: Mapping[str, SamplePayload], fence: Fence) -> None:
        """Write the payloads of a batch that `rank` trains, by key, before they are trained."""
        path = self.share_path(batch.step, rank, fence)
        write_share_file(path, batch, rank, payloads, fence)
        self._keep(path)

    def write_record(self, record: StepRecord) -> None:
        """Write the record of a committed step."""
        self._write(self._records / f"{owned_name(record.step, record.fence)}.json", record)

    def write_failure(self, record: StepRecord) -> None:
        """Write the record of a step that failed the run. Its `version` is the one from which the step started."""
        self._write(self._failures / f"{owned_name(record.step, record.fence)}.json", record)

    def batch_path(self, step: int, fence: Fence) -> Path:
        """The path of the batch message of a step that a learner archived."""
        return self._batches / f"{owned_name(step, fence)}.json"

    def share_path(self, step: int, rank: int, fence: Fence) -> Path:
        """The path of one rank's payloads of a step."""
        return self._batches / f"{owned_name(step, fence)}.rank-{rank}.parquet"

    def fetch_shares(self, step: int, fence: Fence) -> None:
        """Fetch the payloads of all ranks that the store holds for a step to this node."""
        start = f"{BATCHES}/{owned_name(step, fence)}.rank-"
        shares = {name: size for name, size in self.mirror.listed(BATCHES).items() if name.startswith(start)}
        self.mirror.fetch(shares, self.folder)

    def batches(self) -> list[tuple[int, Fence]]:
        """The step of each archived batch message, and the learner that wrote it; of one step, the newest learner last.

        No two learners wrote with one epoch, because each starts above the epochs that it finds.
        """
        found = (written_by(path.name) for path in self._batches.glob("step-*.json"))
        return sorted(filter(None, found), key=lambda written: (written[0], written[1].epoch, written[1].owner))

    def trained(self) -> dict[int, Fence]:
        """By rollout step whose batch is archived, ascending: the learner whose files of it count.

        That is the one which the step's record names; the newest one for a step without a record. Raises ArchiveError.
        """
        records = self._record_files("step-*")
        return {
            step: fence
            for step, fence in self.batches()
            if step not in records or read_message(records[step][-1], StepRecord).fence == fence
        }

    def batch(self, step: int, fence: Fence) -> Batch:
        """The batch message that a learner archived for a step. Raises ArchiveError."""
        return read_batch_file(self.batch_path(step, fence), step, fence)

    def share(self, step: int, rank: int, fence: Fence) -> dict[str, SamplePayload]:
        """The payloads that `rank` trained, by key, without text and version spans. Raises ArchiveError."""
        return read_share_file(self.share_path(step, rank, fence), step, rank, fence)

    def record(self, step: int) -> StepRecord | None:
        """The record of a step, committed or failed; None if neither was written. Raises ArchiveError.

        That of the newest learner, if several wrote one.
        """
        found = self._record_files(f"{step_name(step)}.*").get(step)
        return read_message(found[-1], StepRecord) if found else None

    def outdated_records(self, records: Iterable[StepRecord]) -> list[tuple[StepRecord, str]]:
        """Those of the committed `records` that the archive does not hold as they are, each with what is wrong.

        That is '' for a record that was never written.
        """
        files = self._record_files("step-*")
        found = [(record, self._fault(record, files.get(record.step, []))) for record in records]
        return [(record, fault) for record, fault in found if fault is not None]

    def _fault(self, record: StepRecord, files: list[Path]) -> str | None:
        own = [path for path in files if written_by(path.name) == (record.step, record.fence)] or files
        if not own:
            return ""
        try:
            written = read_message(own[-1], StepRecord)
        except ArchiveError as error:
            return str(error)
        return None if written == record else f"{own[-1]}: is not the committed record"

    def _record_files(self, pattern: str) -> dict[int, list[Path]]:
        """The files of records whose names match, by step; of one step, the newest learner's last."""
        found: dict[int, list[Path]] = {}
        paths = [path for part in (self._failures, self._records) for path in sorted(part.glob(pattern))]
        for path in sorted(paths, key=lambda path: newest_epoch([path.name])):
            if written := written_by(path.name):
                found.setdefault(written[0], []).append(path)
        return found

    def set_aside(self, step: int, writer: Fence, fence: Fence) -> str:
        """Rename the batch message that `writer` wrote, which then no longer counts; its shares keep their names.

        Returns its new place, or '' if the caller, the owner of `fence`, may not rename it.
        """
        if not fence.may_delete(writer):
            return ""
        path = self.batch_path(step, writer)
        aside = f"{BATCHES}/{DIFFERS}{path.name}"
        self.mirror.put(aside, path)
        self.mirror.delete([f"{BATCHES}/{path.name}"])
        path.rename(self.folder / aside)
        return self.mirror.location(aside, self.folder)

    def delete_after(self, step: int, fence: Fence, committed: Mapping[int, Fence]) -> None:
        """Delete what is not in the run's history: batches and records after `step`, and records of replaced learners.

        `committed`: by step, the learner that Redis names. Deletes only what the owner of `fence` may. The facts of
        earlier learners go too, except the first one's.
        """
        for part in (BATCHES, RECORDS, FAILURES):
            self._delete(part, fence, lambda archived, _: archived > step)
        self._delete(RECORDS, fence, lambda archived, by: by not in (committed.get(archived, by), UNOWNED))
        writers = {path: facts_by(path.name) for path in self.facts_files()}
        earlier = [path for path, by in writers.items() if by and by not in (UNOWNED, fence) and fence.may_delete(by)]
        self.mirror.delete([path.name for path in earlier])
        for path in earlier:
            path.unlink(missing_ok=True)

    def delete_batches(self, up_to: int, fence: Fence) -> None:
        """Delete the batches of the steps up to `up_to`, inclusive, that the owner of `fence` may. Records stay."""
        self._delete(BATCHES, fence, lambda archived, _: archived <= up_to)

    def _delete(self, part: str, fence: Fence, selected: Callable[[int, Fence], bool]) -> None:
        """Delete the selected files; a batch's message before its shares, as a step needs its message."""

        def obsolete(name: str) -> bool:
            written = written_by(name.rpartition("/")[2])
            return written is not None and fence.may_delete(written[1]) and selected(*written)

        stored = [name for name in self.mirror.listed(part) if obsolete(name)]
        for messages in (True, False):
            self.mirror.delete([name for name in stored if name.endswith(".json") is messages])
        for path in sorted((self.folder / part).glob("[!.]*")):  # not what is being written
            if obsolete(path.name):
                path.unlink(missing_ok=True)


def _is_archived(name: str) -> bool:
    return name.partition("/")[0] in (BATCHES, RECORDS, FAILURES)


def _is_durable(path: Path) -> bool:
    """Whether a file belongs in the store. Files being written and exports do not."""
    return not any(part.startswith(".") for part in path.parts) and "export" not in path.parts
