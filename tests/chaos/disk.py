"""Owns the disk that a run's checkpoints are written to: a small one of its own, so that it can be full.

Must not leave a mount behind.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

log = logging.getLogger(__name__)

MIB = 96
"""Room for a dozen checkpoints of the tiny model, master weights and Adam's moments."""
COMMAND_S = 20


class MountError(RuntimeError):
    """This machine does not let us mount; the text says what it said."""


def _mount(folder: Path) -> None:
    options = ["-t", "tmpfs", "-o", f"size={MIB}m", "penstock-chaos", str(folder)]
    try:
        done = subprocess.run(["mount", *options], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except FileNotFoundError:
        raise MountError("there is no `mount`") from None
    if done.returncode:
        raise MountError(done.stderr.strip() or f"mount: {done.returncode}")


def _unmount(folder: Path) -> None:
    # Lazy: a process that still ends may hold a file open.
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, timeout=COMMAND_S, check=True)


@cache
def refusal() -> str | None:
    """Why a disk of our own cannot be had on this machine (it takes root, or CAP_SYS_ADMIN); None where it can."""
    with TemporaryDirectory() as folder:
        try:
            _mount(Path(folder))
        except MountError as error:
            return f"a tmpfs cannot be mounted: {error}"
        _unmount(Path(folder))
    return None


def free(folder: Path) -> None:
    """Unmount what an interrupted campaign has left in the runs of `folder`."""
    for path in folder.glob("*/checkpoints"):
        if path.is_mount():
            log.warning("unmounting %s, left by an interrupted run", path)
            _unmount(path)


@contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """`folder` is a disk of MIB MiB while the body works. Nothing of it stays. Raises MountError."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount(folder)
    try:
        yield
    finally:
        _unmount(folder)
        log.info("%s is no disk of its own any more", folder)
