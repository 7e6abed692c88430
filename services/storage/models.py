"""Owns the names of models in run records, and the folder of each on this node.

Must not read a model, nor import torch: the program `python -m learner.model.source` prepares a packaged model on each
node, because nodes may share no disk.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from services.retry import Retry
from services.storage.errors import StoreError, StoreOutageError
from services.storage.folders import local_copy
from services.storage.hub.address import is_pinned
from services.storage.hub.copies import hub_copy
from services.storage.mirror import exclusive
from services.storage.places import is_remote, runs_folder
from services.storage.roots.allowed import BESIDE, fault_text
from services.storage.roots.opening import check_address, place_of, read_text

log = logging.getLogger(__name__)

PACKAGE = "package:"
PREPARE_S = 600.0
OUTAGE_S, RETRY_S = 120.0, 2.0
"""How long an unavailable store is retried when a process starts, and the pause between retries, in seconds."""


class ModelUnavailableError(RuntimeError):
    """A run's model cannot be prepared on this node; the text says why."""


def models_folder() -> Path:
    """The folder of the models that this node has prepared."""
    return runs_folder() / "models"


def packaged_folder(package: str, cache: Path) -> Path:
    """The folder of a package's model, once it is prepared: fp32 weights."""
    return cache / f"{package}-fp32"


def inputs_folder() -> Path:
    """The folder of the data that this node has fetched."""
    return runs_folder() / "inputs"


def local_model(name: str, cache: Path) -> Path:
    """The folder on this node of a model by its name in the record: a folder, package:NAME, s3://...#mark, hf://...#digest.

    Fetched or prepared if it is not there yet, once per node. A folder, or an address, must be below an allowed root.
    Raises ModelUnavailableError, StoreError, OSError.
    """
    if name.startswith(PACKAGE):
        return _packaged(name.removeprefix(PACKAGE), cache)
    if is_pinned(name):
        return _patiently(lambda: hub_copy(name, "model.path", "model", cache))
    return _fetched(name, "model.path", cache) if is_remote(name) else place_of(name, "model.path")


def local_file(path: str, field: str) -> Path:
    """A file or folder that a recipe's `field` names, on this node, below an allowed root, its links resolved.

    Raises StoreError, OSError.
    """
    return _fetched(path, field, inputs_folder()) if is_remote(path) else place_of(path, field)


def local_text(path: str, field: str, files: Mapping[str, str]) -> str:
    """The text of a small file that a recipe's `field` names: one of the run's `files` (`./NAME`), a path, an address.

    Raises StoreError, which holds nothing of the text, and OSError.
    """
    if path.startswith(BESIDE):
        if path not in files:
            raise StoreError(fault_text(field, path, "the name of a file that the run was submitted with"))
        return files[path]
    return read_text(str(_fetched(path, field, inputs_folder())) if is_remote(path) else path, field)


def local_data(path: str, field: str) -> Path:
    """A file or folder with data, on this node; unlike `local_file` also of the hub. Raises StoreError, OSError."""
    if is_pinned(path):
        return Path(os.path.realpath(_patiently(lambda: hub_copy(path, field, "dataset", inputs_folder()))))
    return Path(os.path.realpath(local_file(path, field)))


def _fetched(text: str, field: str, cache: Path) -> Path:
    check_address(text, field)
    return _patiently(lambda: local_copy(text, field, cache))


def _patiently(fetch: Callable[[], Path]) -> Path:
    """A copy on this node. An unavailable store is retried, because a failure would only restart this process."""
    return Retry(lambda error: isinstance(error, StoreOutageError), RETRY_S, OUTAGE_S).run(fetch)


def _packaged(package: str, cache: Path) -> Path:
    folder = packaged_folder(package, cache)
    if (folder / "config.json").is_file():
        return folder
    with exclusive(folder):
        if not (folder / "config.json").is_file():
            command = [sys.executable, "-m", "learner.model.source", package, str(cache)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=PREPARE_S, check=False)
            except subprocess.TimeoutExpired:
                raise ModelUnavailableError(f"{PACKAGE}{package} was not prepared within {PREPARE_S:g} s") from None
            if done.returncode:
                lines = done.stderr.strip().splitlines()
                raise ModelUnavailableError(lines[-1] if lines else f"{PACKAGE}{package} could not be prepared")
    return folder
