"""Owns replay: run recorded optimizer steps again from a run's folder alone, and compare the results with the records.

Must not need a gateway, Redis or the run's other services. As a program, it is one rank; `replay` starts all ranks on
this machine. Does not write to the run's folder; files of a run in a store are fetched to a folder of their own.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from learner.archive import FACTS, FIRST_STEP, ArchiveError, RunArchive, RunFacts, read_message
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import Checkpoint
from learner.recovery.start import archived_payloads, archiving_ranks, other_weights
from services.contracts import OptimizerStepRecord, StepRecord, Value
from services.storage.errors import StoreError
from services.storage.mirror import NO_MIRROR, Mirror, run_mirror
from services.storage.models import ModelUnavailableError, local_model, models_folder

if TYPE_CHECKING:
    from learner.training.trainer import Trainer

RELATIVE_TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 1e-2}
"""The tolerated difference as a share of the recorded value, or of SMALLEST_SCALE if that is larger, by learner.dtype.

Sums over ranks and on a GPU may be computed in a different order.
"""
SMALLEST_SCALE = 0.1
"""A loss may be near zero although its terms are not."""
POLL_S = 0.1
EXIT_S = 10.0


class ReplayError(RuntimeError):
    """A replay could not start or did not finish. The text is one line for the user."""


class ReplayedStep(Value):
    """The result of one replayed rollout step, as rank 0 reports it to its parent process."""

    step: int
    optimizer: tuple[OptimizerStepRecord, ...]


@dataclass(frozen=True)
class Plan:
    """The `steps` to replay, from the `start` checkpoint, or from the run's model if it is None."""

    facts: RunFacts
    start: Checkpoint | None
    steps: tuple[int, ...]
    skipped: tuple[str, ...]
    """Nearer checkpoints that are damaged, one line per checkpoint."""
    recorded_ranks: int = 1
    """The largest number of ranks that trained one of the steps; a run may resume with a different number."""

    @property
    def exact(self) -> bool:
        """Whether loss and norm must be bit-equal, because the run and the replay both use one CPU rank."""
        return self.facts.ranks == self.recorded_ranks == 1 and self.facts.device == "cpu"

    @property
    def tolerance(self) -> float:
        """The tolerated difference, as in RELATIVE_TOLERANCE; 0 if the values must be equal."""
        return 0.0 if self.exact else RELATIVE_TOLERANCE[self.facts.recipe.learner.dtype]


@dataclass(frozen=True)
class Comparison:
    """One optimizer step, `index` counted from 1 in its rollout step. A side that does not have it is None."""

    step: int
    index: int
    recorded: OptimizerStepRecord | None
    replayed: OptimizerStepRecord | None
    equal: bool


def open_run(runs: Path, run: str) -> tuple[Path, Mirror]:
    """The folder with a run's archive, and the mirror from which missing files are fetched.

    Without a store it is the run's folder below `runs`; with one, a folder of its own. Raises ReplayError, StoreError.
    """
    mirror, folder = run_mirror(run), runs / "replays" / run
    if not mirror.remote:
        return runs / run, mirror
    archive = RunArchive(folder, mirror)
    for path in archive.facts_files():  # from an earlier replay
        path.unlink()
    archive.clear_scratch()
    archive.sync_with_store()
    Checkpoints(archive).stored.fetch_manifests()
    if not (folder / FACTS).is_file():
        place = mirror.location("", folder)
        raise ReplayError(f"RUN: {run!r} is not valid: expected a run with an archive in {place} (PENSTOCK_STORE)")
    return folder, mirror


def plan_replay(folder: Path, step: int, mirror: Mirror = NO_MIRROR) -> Plan:
    """Find the nearest intact start of a replay of rollout step `step`, and fetch the files that it needs.

    Raises ArchiveError, ReplayError, StoreError.
    """
    archive = RunArchive(folder, mirror)
    if not (folder / "run.json").is_file():
        known = ", ".join(sorted(path.parent.name for path in folder.parent.glob("*/run.json"))) or "none"
        raise ReplayError(
            f"RUN: {folder.name!r} is not valid: expected a run with an archive in {folder.parent} ({known})"
        )
    facts = archive.facts()
    try:
        model = local_model(facts.model_path, models_folder())
    except (ModelUnavailableError, StoreError) as error:
        raise ReplayError(f"the model of run {facts.run!r} cannot be loaded from {facts.model_path}: {error}") from None
    if not (model / "config.json").is_file():
        raise ReplayError(f"the model of run {facts.run!r} is missing: {facts.model_path} has no config.json")
    archived = archive.trained().keys()
    starts: list[Checkpoint | None] = [None, *Checkpoints(archive).complete()]
    reachable = {end for end in archived if any(_leads_to(end, start, archived) for start in starts)}
    if step not in reachable:
        accepted = _ranges(sorted(reachable))
        raise ReplayError(f"STEP: {step} is not valid: expected a step that run {facts.run!r} has archived: {accepted}")
    skipped: list[str] = []
    for start in reversed(starts):
        if not _leads_to(step, start, archived):
            continue
        try:
            if start is not None:
                _check_start(archive, start)
        except ArchiveError as error:
            skipped.append(str(error))
            continue
        steps = tuple(range(_first(start), step + 1))
        _check_batches(archive, steps)
        ranks = max(len(archiving_ranks(archive, replayed, archive.trained()[replayed])) for replayed in steps)
        return Plan(facts, start, steps, tuple(skipped), ranks)
    raise ArchiveError("; ".join(skipped))


def _first(start: Checkpoint | None) -> int:
    return start.step + 1 if start else FIRST_STEP


def _leads_to(step: int, start: Checkpoint | None, archived: Set[int]) -> bool:
    return step in archived and _first(start) <= step and archived >= set(range(_first(start), step))


def _check_start(archive: RunArchive, start: Checkpoint) -> None:
    """Fetch the files of a checkpoint. Raises ArchiveError if one is damaged, or if it is not of the run's history."""
    record = archive.record(start.step)
    if record is not None and (what := other_weights(start, record)):
        raise ArchiveError(f"{archive.checkpoints / start.name}: {what}")
    Checkpoints(archive).check(start)


def _ranges(steps: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


def _check_batches(archive: RunArchive, steps: tuple[int, ...]) -> None:
    """Raise ArchiveError before any rank starts, because the others would wait for a rank that fails alone."""
    writers = archive.trained()
    for step in steps:
        archived_payloads(archive, archive.batch(step, writers[step]), writers[step])


def replay(folder: Path, plan: Plan, deadline_s: float, report: Callable[[str], None]) -> list[Comparison]:
    """Replay the planned steps on as many rank processes as the run had, and compare them with the records.

    Calls `report` with one line per replayed step. Kills all ranks after at most `deadline_s` seconds. Raises
    ReplayError, ArchiveError.
    """
    archive = RunArchive(folder)
    with tempfile.TemporaryDirectory(prefix="penstock-replay-") as scratch:
        out = Path(scratch) / "steps.jsonl"
        logs = [Path(scratch) / f"rank-{rank}.log" for rank in range(plan.facts.ranks)]
        ranks = _start(folder, plan, out, logs, deadline_s)
        try:
            for done in _follow(ranks, out, logs, deadline_s):
                report(f"step {done.step} of {plan.steps[0]}-{plan.steps[-1]} replayed")
        finally:
            _kill(ranks)
        replayed = _read(out)
    return [row for result in replayed for row in _compare(archive.record(result.step), result, plan.tolerance)]


def _start(folder: Path, plan: Plan, out: Path, logs: list[Path], deadline_s: float) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = [
        *(sys.executable, "-m", "learner.recovery.replay", str(folder)),
        *("--steps", str(plan.steps[0]), str(plan.steps[-1])),
        *("--port", str(port), "--out", str(out), "--deadline", str(deadline_s)),
        *(("--start", plan.start.name) if plan.start else ()),
    ]
    ranks = []
    for rank, path in enumerate(logs):
        with path.open("wb") as log:
            command = [*common, "--rank", str(rank)]
            environment = _environment(plan.facts, rank)
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return ranks


def _environment(facts: RunFacts, rank: int) -> dict[str, str]:
    """A rank's environment: the run's number of threads, and its own device if the run used devices."""
    threads = str(facts.recipe.learner.threads)
    devices = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    own = devices[rank] if rank < len(devices) else str(rank)
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))
    return os.environ | {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": own if facts.device == "cuda" else "",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }


def _follow(
    ranks: list[subprocess.Popen[bytes]], out: Path, logs: list[Path], deadline_s: float
) -> Iterator[ReplayedStep]:
    """Each step once rank 0 has written it, until all ranks have exited with 0. Raises ReplayError."""
    ends = time.monotonic() + deadline_s
    reported = 0
    while True:
        running = [rank.poll() is None for rank in ranks]
        found = _read(out)
        yield from found[reported:]
        reported = len(found)
        faults = [_fault(number, rank.returncode, logs[number]) for number, rank in enumerate(ranks) if rank.returncode]
        if faults:
            raise ReplayError("; ".join(faults))
        if not any(running):
            return
        if time.monotonic() > ends:
            raise ReplayError(f"the replay did not finish within {deadline_s:g} s (--timeout)")
        time.sleep(POLL_S)


def _fault(number: int, status: int, path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return f"rank {number} of the replay exited with status {status}: {lines[-1] if lines else 'its log is empty'}"


def _read(out: Path) -> list[ReplayedStep]:
    if not out.exists():
        return []
    # The last line may be incomplete.
    lines = out.read_text().split("\n")[:-1]
    return [ReplayedStep.model_validate_json(line) for line in lines]


def _kill(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait(EXIT_S)


def _compare(record: StepRecord | None, replayed: ReplayedStep, tolerance: float) -> Iterator[Comparison]:
    recorded = record.optimizer if record else ()
    # A rollout step without optimizer steps has a row too: all its responses were masked, or it has no record.
    for index in range(max(len(recorded), len(replayed.optimizer), 1)):
        before = recorded[index] if index < len(recorded) else None
        after = replayed.optimizer[index] if index < len(replayed.optimizer) else None
        equal = record is not None and _equal(before, after, tolerance)
        yield Comparison(replayed.step, index + 1, before, after, equal)


def _equal(recorded: OptimizerStepRecord | None, replayed: OptimizerStepRecord | None, tolerance: float) -> bool:
    if recorded is None or replayed is None:
        return recorded is replayed
    return recorded.applied == replayed.applied and all(
        _close(before, after, tolerance)
        for before, after in ((recorded.loss, replayed.loss), (recorded.gradient_norm, replayed.gradient_norm))
    )


def _close(recorded: float | None, replayed: float | None, tolerance: float) -> bool:
    if recorded is None or replayed is None:
        return recorded is replayed
    return abs(recorded - replayed) <= tolerance * max(abs(recorded), SMALLEST_SCALE)


def run_rank(
    folder: Path, start: str | None, steps: tuple[int, int], rank: int, port: int, out: Path, deadline_s: float
) -> None:
    """One rank of a replay: load the `start` checkpoint and train the steps. Rank 0 writes the results to `out`."""
    from learner.training.process_group import Ranks, keep_freed_memory
    from learner.training.trainer import Trainer, leave

    archive = RunArchive(folder)
    facts = archive.facts()
    keep_freed_memory()
    ranks = Ranks(rank, facts.ranks, "127.0.0.1", port, timeout_s=deadline_s)
    try:
        if ranks.device.type != facts.device:
            raise ReplayError(f"the run trained on {facts.device}, but this machine has only {ranks.device.type}")
        trainer = Trainer(local_model(facts.model_path, models_folder()), facts.recipe, ranks)
        if start is not None:
            Checkpoints(archive).load(trainer, start)
        _train(trainer, archive, steps, rank, out)
        trainer.close()
    finally:
        leave(ranks)


def _train(trainer: Trainer, archive: RunArchive, steps: tuple[int, int], rank: int, out: Path) -> None:
    # As the first learner found the recipe, before any edit: records of earlier releases do not state their rate.
    writers, first_rate = archive.trained(), read_message(archive.folder / FACTS, RunFacts).recipe.learner.learning_rate
    for step in range(steps[0], steps[1] + 1):
        record = archive.record(step)  # without one, the step has the rate of the previous one
        rate = (record.learning_rate or first_rate) if record else None
        batch = archive.batch(step, writers[step])
        plans = trainer.plan(batch)
        payloads = archived_payloads(archive, batch, writers[step])
        own = {sample.payload: payloads[sample.payload] for plan in plans for sample in plan.shares[rank]}
        trained = trainer.train(plans, own, learning_rate=rate)
        if rank == 0:
            with out.open("a") as file:
                file.write(ReplayedStep(step=step, optimizer=trained.optimizer).model_dump_json() + "\n")


def main(argv: list[str] | None = None) -> int:
    """`python -m learner.recovery.replay`: one rank; `replay` starts them."""
    parser = argparse.ArgumentParser(prog="python -m learner.recovery.replay", description="One rank of a replay.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, nargs=2, required=True, metavar=("FIRST", "LAST"))
    parser.add_argument("--start", metavar="CHECKPOINT", help="the name of its folder; default: the run's model")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    given = parser.parse_args(argv)
    run_rank(given.folder, given.start, tuple(given.steps), given.rank, given.port, given.out, given.deadline)
    return 0


if __name__ == "__main__":
    from learner.training.process_group import end_with

    end_with(main)
