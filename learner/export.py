"""Owns what a run leaves behind: its policy as an ordinary Hugging Face folder.

Must not be collective: it writes a snapshot, which rank 0 holds whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from learner.snapshot import Snapshot


def export_folder(run: str) -> Path:
    """Where the run's export goes: below PENSTOCK_RUNS, by default ./runs."""
    return Path(os.environ.get("PENSTOCK_RUNS", "runs")).absolute() / run / "export"


def export(causal_lm: Any, snapshot: Snapshot, source: Path, folder: Path) -> Path:
    """Write weights, config, generation config and `source`'s tokenizer to `folder`, whole or not at all.

    `causal_lm` gives the config and the names; its parameters are not read. Replaces an earlier export.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".export-", dir=folder.parent))
    try:
        causal_lm.save_pretrained(partial, state_dict=dict(snapshot.tensors()))
        AutoTokenizer.from_pretrained(source).save_pretrained(partial)
        partial.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
