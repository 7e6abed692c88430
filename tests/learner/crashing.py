"""Owns a process that dies before each of the calls with which a checkpoint's write changes the disk.

Must not be used outside tests. Must not import torch: children of a process with its threads cannot be forked safely.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from learner.archive import RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import CheckpointHeader
from tests.learner.committed import WRITER

CALLS = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink")
DIED = 9
NEVER = threading.Event()


class Bytes:
    """A state with arbitrary content."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def chunks(self) -> Iterator[memoryview]:
        yield from (memoryview(bytes([self._seed]) * 1000) for _ in range(3))


class Endless:
    """A state that never ends."""

    def chunks(self) -> Iterator[memoryview]:
        while True:
            yield memoryview(bytes(1 << 18))
            time.sleep(0.01)


def write_forever(folder: str) -> None:
    """The work of a process that a test kills: the checkpoint of step 4, which never ends."""
    checkpoints = Checkpoints(RunArchive(Path(folder)))
    name = checkpoints.partial.start(4, WRITER)
    checkpoints.partial.write(name, 0, Endless(), NEVER)


def write(folder: Path, step: int, ranks: int = 2) -> None:
    """Write a complete checkpoint, and delete all but the last two."""
    checkpoints = Checkpoints(RunArchive(folder))
    name = checkpoints.partial.start(step, WRITER)
    for rank in range(ranks):
        checkpoints.partial.write(name, rank, Bytes(step), NEVER)
    cut = CheckpointHeader(
        step=step, version=step, ranks=ranks, zero_stage=1, dtype="float32", epoch=WRITER.epoch, owner=WRITER.owner
    )
    checkpoints.commit(name, cut, NEVER, sampler="{}")
    checkpoints.prune(2, step, WRITER)


def note(calls: list[str], dies_at: int) -> None:
    """Record the names of all CALLS, and die instead of making call number `dies_at`, counted from 0."""

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            if len(calls) == dies_at:
                os._exit(DIED)
            calls.append(name)
            return call(*given, **named)

        return noted

    for name in CALLS:
        setattr(os, name, noting(name, getattr(os, name)))


def check(folder: Path) -> str:
    """The steps left. Raises AssertionError unless they are as usable as before or after the write."""
    checkpoints = Checkpoints(RunArchive(folder))
    steps = [checkpoint.step for checkpoint in checkpoints.complete()]
    for checkpoint in checkpoints.complete():
        checkpoints.check(checkpoint)
    newest, _ = checkpoints.newest_intact(3)
    assert steps in ([1, 2], [1, 2, 3], [2, 3]), steps
    assert newest is not None
    assert newest.step == steps[-1], newest
    # Replay starts from the oldest checkpoint, so the batches after it must exist.
    assert list(RunArchive(folder).trained())[-3 + steps[0] :] == list(range(steps[0] + 1, 4))
    checkpoints.clear_interrupted(WRITER)
    write(folder, 3)
    assert [checkpoint.step for checkpoint in checkpoints.complete()] == [2, 3]
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == [checkpoint.name for checkpoint in checkpoints.complete()], left
    return ",".join(map(str, steps))


def main(folder: Path) -> None:
    """Print the steps found after each death, one line each, and the calls of an uninterrupted write."""
    for dies_at in range(200):
        copy = folder.with_name(f"copy-{dies_at}")
        shutil.copytree(folder, copy)
        child = os.fork()
        if child == 0:
            calls: list[str] = []
            note(calls, dies_at)
            write(copy, 3)
            print(*calls, flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            return
        assert os.waitstatus_to_exitcode(status) == DIED, status
        print(check(copy), flush=True)
    raise AssertionError("the write did not end")


if __name__ == "__main__":
    assert "torch" not in sys.modules
    main(Path(sys.argv[1]))
