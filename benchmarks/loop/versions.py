"""Owns the weights of a run's steps, after the run: its archived batches are trained again, and weights are saved.

Must not be timed, nor run beside what is. Run as a program:

    python -m benchmarks.loop.versions RUN --every K --out FOLDER

RUN is the folder of a run of one learner rank on CPU that wrote no checkpoint. Each K-th step and the last one get a
folder FOLDER/step-N, as the run's export would be. The digest of the weights of every step has to be the recorded one:
what is saved is what the run had, bit by bit.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path

from benchmarks.report.report import positive


class OtherWeightsError(RuntimeError):
    """Training a step again gave other weights than the run had."""


def due(step: int, every: int, last: int) -> bool:
    """Whether the weights after a step are saved."""
    return step % every == 0 or step == last


def save_versions(run: Path, every: int, out: Path) -> list[Path]:
    """Train the run's steps again, and save weights. Returns the folders. Raises OtherWeightsError, ArchiveError."""
    from learner.archive import RunArchive
    from learner.model.export import export, tokenizer_of
    from learner.recovery.start import archived_payloads
    from learner.training.process_group import Ranks, keep_freed_memory
    from learner.training.trainer import Trainer, leave
    from learner.weight_sync.snapshot import make_manifest, take_snapshot
    from services.storage.models import local_model, models_folder

    archive = RunArchive(run)
    facts, writers, folders = archive.facts(), archive.trained(), []
    keep_freed_memory()
    ranks = Ranks(0, 1, "127.0.0.1", _free_port(), timeout_s=60.0)
    try:
        model = local_model(facts.model_path, models_folder())
        trainer = Trainer(model, facts.recipe, ranks)
        manifest = make_manifest(trainer, facts.recipe.weights.bucket_mib)
        tokenizer = tokenizer_of(model, facts.recipe.model.chat_template, {})
        for step in sorted(writers):
            record, batch = archive.record(step), archive.batch(step, writers[step])
            payloads, plans = archived_payloads(archive, batch, writers[step]), trainer.plan(batch)
            own = {sample.payload: payloads[sample.payload] for plan in plans for sample in plan.shares[0]}
            trainer.train(plans, own, learning_rate=record.learning_rate if record else None)
            snapshot = take_snapshot(trainer, manifest, step, keep=True)
            if record is None or snapshot is None or snapshot.digest != record.weights:
                raise OtherWeightsError(f"step {step} of {run.name}: the weights are not those that the run had")
            if due(step, every, max(writers)):
                folder = out / f"step-{step}"
                folders.append(export(trainer.causal_lm, snapshot, tokenizer, folder, [], lambda: None))
        trainer.close()
    finally:
        leave(ranks)
    return folders


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loop.versions", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--every", type=positive, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    # Where the run's own processes found the model.
    os.environ.setdefault("PENSTOCK_RUNS", str(given.run.absolute().parent))
    for folder in save_versions(given.run.absolute(), given.every, given.out.absolute()):
        print(folder, flush=True)
    return 0


if __name__ == "__main__":
    from learner.training.process_group import end_with

    end_with(main)
