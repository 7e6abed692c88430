"""Owns replay: recorded optimizer steps run again from a run's folder alone, and compared with what they gave.

Must not need a gateway, Redis or the run's other services. As a program it is one rank; `replay` starts all of them on
this machine. Nothing of the run's folder is written to; what a store holds of the run is fetched to another one.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from learner.archive import FACTS, FIRST_STEP, ArchiveError, RunArchive, RunFacts
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import Checkpoint
from learner.recovery.start import archived_payloads, archiving_ranks
from services.contracts import OptimizerStepRecord, StepRecord, Value
from services.storage.errors import StoreError
from services.storage.mirror import NO_MIRROR, Mirror, run_mirror
from services.storage.models import ModelUnavailableError, local_model, models_folder

if TYPE_CHECKING:
    from learner.training.trainer import Trainer

RELATIVE_TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 1e-2}
"""What may differ from the recorded value, as a share of it or of 0.1: a loss may be near zero where its terms are not.

By learner.dtype: sums over ranks and on a GPU may come in another order.
"""
SMALLEST_SCALE = 0.1
POLL_S = 0.1
ENDING_S = 10.0


class ReplayError(RuntimeError):
    """A replay that cannot be begun or did not come to its end; one line for people."""


class ReplayedStep(Value):
    """rank 0 -> its parent: what one rollout step gave this time."""

    step: int
    optimizer: tuple[OptimizerStepRecord, ...]


@dataclass(frozen=True)
class Plan:
    """What is run again: `steps`, beginning at the `start` checkpoint or, without one, at the run's model."""

    facts: RunFacts
    start: Checkpoint | None
    steps: tuple[int, ...]
    passed_over: tuple[str, ...]
    """Nearer checkpoints that are damaged, a line each."""
    recorded_ranks: int = 1
    """The most ranks that trained one of the steps; a run may go on with fewer than it began with."""

    @property
    def exact(self) -> bool:
        """Whether loss and norm must be equal bit by bit: on one CPU rank, then and now."""
        return self.facts.ranks == self.recorded_ranks == 1 and self.facts.device == "cpu"

    @property
    def tolerance(self) -> float:
        """Largest difference, as a share of the recorded value or of SMALLEST_SCALE; 0 where it must be equal."""
        return 0.0 if self.exact else RELATIVE_TOLERANCE[self.facts.recipe.learner.dtype]


@dataclass(frozen=True)
class Comparison:
    """One optimizer step (counted from 1 in its rollout step), recorded and replayed; None where there was none."""

    step: int
    index: int
    recorded: OptimizerStepRecord | None
    replayed: OptimizerStepRecord | None
    equal: bool


def run_at_hand(runs: Path, run: str) -> tuple[Path, Mirror]:
    """The folder with a run's archive, and where what it lacks is fetched from: `runs`' own, or without a share in
    the run's work what the store holds. Raises ReplayError, StoreError.
    """
    mirror, folder = run_mirror(run), runs / "replays" / run
    if not mirror.remote:
        return runs / run, mirror
    (folder / FACTS).unlink(missing_ok=True)  # of an earlier replay
    archive = RunArchive(folder, mirror)
    archive.forget_scratch()
    archive.take_in()
    Checkpoints(archive).stored.take_in()
    if not (folder / FACTS).is_file():
        raise ReplayError(f"RUN: {run!r} has no archive in {mirror.location('', folder)} (PENSTOCK_STORE)")
    return folder, mirror


def plan_replay(folder: Path, step: int, mirror: Mirror = NO_MIRROR) -> Plan:
    """Find out how to get to rollout step `step`, and fetch what that takes.

    Raises ArchiveError, ReplayError, StoreError.
    """
    archive = RunArchive(folder, mirror)
    if not (folder / "run.json").is_file():
        known = ", ".join(sorted(one.parent.name for one in folder.parent.glob("*/run.json"))) or "none"
        raise ReplayError(f"RUN: {folder.name!r} has no archive in {folder.parent}; accepted here: {known}")
    facts = archive.facts()
    try:
        model = local_model(facts.model_path, models_folder())
    except (ModelUnavailableError, StoreError) as error:
        raise ReplayError(f"run {facts.run!r} began with the model {facts.model_path}: {error}") from None
    if not (model / "config.json").is_file():
        raise ReplayError(f"run {facts.run!r} began with the model in {facts.model_path}, which is gone")
    archived = set(archive.steps())
    starts: list[Checkpoint | None] = [None, *Checkpoints(archive).complete()]
    if not any(_leads_to(step, one, archived) for one in starts):
        accepted = _ranges(sorted(s for s in archived if any(_leads_to(s, one, archived) for one in starts)))
        expected = f"a step with its batch in run {facts.run!r}: {accepted}"
        raise ReplayError(f"STEP: {step} is not valid: expected {expected}")
    passed_over: list[str] = []
    for start in reversed(starts):
        if not _leads_to(step, start, archived):
            continue
        try:
            if start is not None:
                Checkpoints(archive).check(start)  # which fetches it
        except ArchiveError as error:
            passed_over.append(str(error))
            continue
        steps = tuple(range(_first(start), step + 1))
        _check_batches(archive, steps)
        ranks = max(len(archiving_ranks(archive, one)) for one in steps)
        return Plan(facts, start, steps, tuple(passed_over), ranks)
    raise ArchiveError("; ".join(passed_over))


def _first(start: Checkpoint | None) -> int:
    return start.step + 1 if start else FIRST_STEP


def _leads_to(step: int, start: Checkpoint | None, archived: set[int]) -> bool:
    return step in archived and _first(start) <= step and archived.issuperset(range(_first(start), step))


def _ranges(steps: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return ", ".join("-".join(str(one) for one in run) for run in runs) or "none"


def _check_batches(archive: RunArchive, steps: tuple[int, ...]) -> None:
    """Raise ArchiveError before any rank starts: one that fails alone would leave the others waiting."""
    for step in steps:
        archived_payloads(archive, archive.batch(step))


def replay(folder: Path, plan: Plan, deadline_s: float, say: Callable[[str], None]) -> list[Comparison]:
    """Run the planned steps again, on as many rank processes as the run had. Raises ReplayError, ArchiveError.

    `say` is told each step as it is done. All ranks are ended at the latest after `deadline_s` seconds.
    """
    archive = RunArchive(folder)
    with tempfile.TemporaryDirectory(prefix="penstock-replay-") as scratch:
        out = Path(scratch) / "steps.jsonl"
        logs = [Path(scratch) / f"rank-{rank}.log" for rank in range(plan.facts.ranks)]
        ranks = _start(folder, plan, out, logs, deadline_s)
        try:
            for done in _follow(ranks, out, logs, deadline_s):
                say(f"step {done.step} of {plan.steps[0]}-{plan.steps[-1]} replayed")
        finally:
            _end(ranks)
        replayed = _read(out)
    return [row for one in replayed for row in _compare(archive.record(one.step), one, plan.tolerance)]


def _start(folder: Path, plan: Plan, out: Path, logs: list[Path], deadline_s: float) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = [
        *(sys.executable, "-m", "learner.recovery.replay", str(folder)),
        *("--steps", str(plan.steps[0]), str(plan.steps[-1])),
        *("--port", str(port), "--out", str(out), "--deadline", str(deadline_s)),
        *(("--start", plan.start.name) if plan.start else ()),
    ]  # fmt: skip
    ranks = []
    for rank, path in enumerate(logs):
        with path.open("wb") as log:
            command = [*common, "--rank", str(rank)]
            environment = _environment(plan.facts, rank)
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return ranks


def _environment(facts: RunFacts, rank: int) -> dict[str, str]:
    """A rank's variables: the run's threads, and one device of its own or none, as the run had it."""
    threads = str(facts.recipe.learner.threads)
    devices = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    own = devices[rank] if rank < len(devices) else str(rank)
    root = str(Path(__file__).parents[2])
    return os.environ | {
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": own if facts.device == "cuda" else "",
        "PYTHONPATH": os.pathsep.join(one for one in (root, os.environ.get("PYTHONPATH")) if one),
    }  # fmt: skip


def _follow(
    ranks: list[subprocess.Popen[bytes]], out: Path, logs: list[Path], deadline_s: float
) -> Iterator[ReplayedStep]:
    """Each step as rank 0 writes it, until all ranks have ended well. Raises ReplayError."""
    ends = time.monotonic() + deadline_s
    told = 0
    while True:
        running = [rank.poll() is None for rank in ranks]
        found = _read(out)
        yield from found[told:]
        told = len(found)
        faults = [_fault(number, rank.returncode, logs[number]) for number, rank in enumerate(ranks) if rank.returncode]
        if faults:
            raise ReplayError("; ".join(faults))
        if not any(running):
            return
        if time.monotonic() > ends:
            raise ReplayError(f"the replay was not done within {deadline_s:g} s (--timeout)")
        time.sleep(POLL_S)


def _fault(number: int, status: int, path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return f"rank {number} of the replay ended with status {status}: {lines[-1] if lines else 'it wrote nothing'}"


def _read(out: Path) -> list[ReplayedStep]:
    if not out.exists():
        return []
    # The last line may be half written.
    lines = out.read_text().split("\n")[:-1]
    return [ReplayedStep.model_validate_json(line) for line in lines]


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait(ENDING_S)


def _compare(record: StepRecord | None, replayed: ReplayedStep, tolerance: float) -> Iterator[Comparison]:
    recorded = record.optimizer if record else ()
    # A rollout step without any optimizer step has a row too: all its responses were masked, or nobody recorded it.
    for index in range(max(len(recorded), len(replayed.optimizer), 1)):
        before = recorded[index] if index < len(recorded) else None
        after = replayed.optimizer[index] if index < len(replayed.optimizer) else None
        equal = record is not None and _equal(before, after, tolerance)
        yield Comparison(replayed.step, index + 1, before, after, equal)


def _equal(recorded: OptimizerStepRecord | None, replayed: OptimizerStepRecord | None, tolerance: float) -> bool:
    if recorded is None or replayed is None:
        return recorded is replayed
    return recorded.applied == replayed.applied and all(
        _close(one, other, tolerance)
        for one, other in ((recorded.loss, replayed.loss), (recorded.gradient_norm, replayed.gradient_norm))
    )


def _close(recorded: float | None, replayed: float | None, tolerance: float) -> bool:
    if recorded is None or replayed is None:
        return recorded is replayed
    return abs(recorded - replayed) <= tolerance * max(abs(recorded), SMALLEST_SCALE)


def run_rank(
    folder: Path, start: str | None, steps: tuple[int, int], rank: int, port: int, out: Path, deadline_s: float
) -> None:
    """One rank of a replay: load the `start` checkpoint, train the steps, report them from rank 0."""
    from learner.training.process_group import Ranks, keep_freed_memory
    from learner.training.trainer import Trainer, leave

    archive = RunArchive(folder)
    facts = archive.facts()
    keep_freed_memory()
    ranks = Ranks(rank, facts.ranks, "127.0.0.1", port, timeout_s=deadline_s)
    try:
        if ranks.device.type != facts.device:
            raise ReplayError(f"the run trained on {facts.device}, this machine offers {ranks.device.type}")
        trainer = Trainer(local_model(facts.model_path, models_folder()), facts.recipe, ranks)
        if start is not None:
            Checkpoints(archive).load(trainer, start)
        _train(trainer, archive, steps, rank, out)
        trainer.close()
    finally:
        leave(ranks)


def _train(trainer: Trainer, archive: RunArchive, steps: tuple[int, int], rank: int, out: Path) -> None:
    for step in range(steps[0], steps[1] + 1):
        batch = archive.batch(step)
        plans = trainer.plan(batch)
        payloads = archived_payloads(archive, batch)
        own = {one.payload: payloads[one.payload] for plan in plans for one in plan.shares[rank]}
        trained = trainer.train(plans, own)
        if rank == 0:
            with out.open("a") as file:
                file.write(ReplayedStep(step=step, optimizer=trained.optimizer).model_dump_json() + "\n")


def main(argv: list[str] | None = None) -> int:
    """`python -m learner.recovery.replay`: one rank; `replay` starts them."""
    parser = argparse.ArgumentParser(prog="python -m learner.recovery.replay", description="One rank of a replay.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, nargs=2, required=True, metavar=("FIRST", "LAST"))
    parser.add_argument("--start", metavar="CHECKPOINT", help="its folder's name; without it, the run's model")
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
