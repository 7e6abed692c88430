"""Owns a small separate disk for a run's checkpoints, so that it can be filled.

Must not leave a mount behind.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

log = logging.getLogger(__name__)

MIB = 96
"""Room for a dozen checkpoints of the tiny model, master weights and Adam's moments."""
COMMAND_S = 20
BLOCK = b"x" * 4096


class MountError(RuntimeError):
    """Mounting failed on this machine; the text is the error of `mount`."""


def _mount(folder: Path) -> None:
    options = ["-t", "tmpfs", "-o", f"size={MIB}m", "penstock-chaos", str(folder)]
    try:
        done = subprocess.run(["mount", *options], capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except FileNotFoundError:
        raise MountError("`mount` is not installed") from None
    if done.returncode:
        raise MountError(done.stderr.strip() or f"mount: {done.returncode}")


def _unmount(folder: Path) -> None:
    # Lazy: a process that is exiting may hold a file open.
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, timeout=COMMAND_S, check=True)


@cache
def refusal() -> str | None:
    """Why this machine cannot mount a disk (it needs root or CAP_SYS_ADMIN); None if it can."""
    with TemporaryDirectory() as folder:
        try:
            _mount(Path(folder))
        except MountError as error:
            return f"mounting a tmpfs failed: {error}"
        _unmount(Path(folder))
    return None


def free(folder: Path) -> None:
    """Unmount the disks that an interrupted campaign left in the runs of `folder`."""
    for path in folder.glob("*/checkpoints"):
        if path.is_mount():
            log.warning("unmounting %s, left by an interrupted run", path)
            _unmount(path)


@contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """Mount a disk of MIB MiB at `folder` while the body runs; its content is lost. Raises MountError."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount(folder)
    try:
        yield
    finally:
        _unmount(folder)
        log.info("%s is unmounted", folder)


def fill(folder: Path, left_kib: int) -> Path:
    """Another program's file on the disk at `folder`, beside which at most so many KiB are left."""
    path, disk = folder / "filler", os.statvfs(folder)
    with path.open("wb", buffering=0) as file, suppress(OSError):  # what others write meanwhile is no longer free
        for _ in range(disk.f_bavail * disk.f_frsize // len(BLOCK) - left_kib * 1024 // len(BLOCK)):
            file.write(BLOCK)
    return path
