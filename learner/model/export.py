"""Owns the export of a run: its policy as an ordinary Hugging Face folder.

Must not be collective: it writes a snapshot, which rank 0 holds whole. Must not know who owns the run: `check` does.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from learner.archive import run_folder
from learner.weight_sync.snapshot import Snapshot
from services.contracts import EvaluationRecord
from services.settings import NO_TEMPLATE
from services.storage.folders import put_folder
from services.storage.models import local_text
from services.storage.places import configured_store

EXPORT = "export"


def export_folder(run: str) -> Path:
    """The folder for the export, in the folder of the run."""
    return run_folder(run) / EXPORT


def stored(folder: Path, run: str, check: Callable[[], None]) -> str:
    """Upload the export to the store and return its address; without a store, return its `folder`.

    `check` is called before each write, and raises an error if this learner must not publish. Raises StoreError,
    OSError.
    """
    at = configured_store()
    if at is None:
        return str(folder)
    put_folder(at / run / EXPORT, folder, check)
    return str(at / run / EXPORT)


def tokenizer_of(source: Path, chat_template: str | None, files: Mapping[str, str]) -> Any:
    """The tokenizer of the initial model, with the chat template that formatted the prompts of the run.

    `files`: the texts of the files that the run was submitted with, by name (`./chat.jinja`). Raises StoreError for a
    template that may not be read.
    """
    tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    if chat_template not in (None, NO_TEMPLATE):
        tokenizer.chat_template = local_text(str(chat_template), "model.chat_template", files)
    return tokenizer


def export(
    causal_lm: Any,
    snapshot: Snapshot,
    tokenizer: Any,
    folder: Path,
    evaluations: Sequence[EvaluationRecord],
    check: Callable[[], None],
) -> Path:
    """Write weights, config, generation config and tokenizer to `folder`, completely or not at all.

    `evaluations`, the records of the exported version, are written to `evaluation.json` as a list. `causal_lm` provides
    config and names; its parameters are not read. Replaces an earlier export, right after `check` was called, which
    raises an error if this learner must not publish.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".export-", dir=folder.parent))
    written = partial / EXPORT
    try:
        causal_lm.save_pretrained(written, state_dict=dict(snapshot.tensors()))
        tokenizer.save_pretrained(written)
        records = [evaluation.model_dump(mode="json") for evaluation in evaluations]
        (written / "evaluation.json").write_text(json.dumps(records, indent=2) + "\n")
        written.chmod(0o755)
        check()
        # Renamed rather than deleted first, which takes long: a newer learner may exist by then.
        if folder.exists():
            folder.rename(partial / "earlier")
        written.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
