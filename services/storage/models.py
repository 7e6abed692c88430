"""Owns the names by which a run's record calls its model, and the folder that each is on this node.

Must not read a model, nor import torch: a packaged one is made ready by a program, `python -m learner.model.source`,
for every node has the package and the program, though not the same disk.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

from services.storage.errors import StoreAwayError
from services.storage.folders import local_copy
from services.storage.mirror import alone
from services.storage.places import is_remote, runs_folder

log = logging.getLogger(__name__)

PACKAGE = "package:"
PREPARE_S = 600.0
AWAY_S, AGAIN_S = 120.0, 2.0
"""Seconds for which what a process needs to begin is asked of a store that is away, and seconds in between."""


class ModelUnavailableError(RuntimeError):
    """A run's model cannot be made ready on this node; the text says why."""


def models_folder() -> Path:
    """Where this node keeps the models that it has made ready."""
    return runs_folder() / "models"


def packaged_folder(package: str, cache: Path) -> Path:
    """Where a package's model is, or will be once it is ready: fp32 weights."""
    return cache / f"{package}-fp32"


def local_model(name: str, cache: Path) -> Path:
    """The folder on this node of a model by its name in the record: a folder, `package:NAME`, or `s3://...#mark`.

    Fetched or made ready where it is not there yet, once a node. Raises ModelUnavailableError, StoreError, OSError.
    """
    if name.startswith(PACKAGE):
        return _packaged(name.removeprefix(PACKAGE), cache)
    return _patiently(name, "model.path", cache) if is_remote(name) else Path(name)


def local_file(path: str, field: str) -> Path:
    """A file or folder that a recipe's `field` names, on this node. Raises StoreError, OSError."""
    return _patiently(path, field, runs_folder() / "inputs") if is_remote(path) else Path(path)


def _patiently(text: str, field: str, cache: Path) -> Path:
    """A process that ends for want of the store would only be started to look for it again."""
    ends = time.monotonic() + AWAY_S
    while True:
        try:
            return local_copy(text, field, cache)
        except StoreAwayError as error:
            if time.monotonic() > ends:
                raise
            log.warning("%s; trying again in %g s", error, AGAIN_S)
        time.sleep(AGAIN_S)


def _packaged(package: str, cache: Path) -> Path:
    folder = packaged_folder(package, cache)
    if (folder / "config.json").is_file():
        return folder
    with alone(folder):
        if not (folder / "config.json").is_file():
            command = [sys.executable, "-m", "learner.model.source", package, str(cache)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=PREPARE_S, check=False)
            except subprocess.TimeoutExpired:
                raise ModelUnavailableError(f"{PACKAGE}{package} was not made ready in {PREPARE_S:g} s") from None
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                raise ModelUnavailableError(lines[-1] if lines else f"{PACKAGE}{package} could not be made ready")
    return folder
