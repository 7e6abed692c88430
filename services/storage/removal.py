"""Owns the deletion of a run's files: in the store, and in the run's folder on this node.

Must not delete anything of another run, or outside the runs folder.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from services.storage.mirror import run_mirror


def delete_run_files(runs: Path, run: str) -> None:
    """Delete all that the store holds of the run, and its folder in `runs`. May be repeated.

    A link to a folder elsewhere is deleted, not what it names; so is a plain file. Raises StoreError, OSError.
    """
    mirror = run_mirror(run)
    mirror.delete(list(mirror.listed()))
    folder = runs / run
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
