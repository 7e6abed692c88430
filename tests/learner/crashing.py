"""Owns a process that dies before every single call by which writing a checkpoint changes the disk.

Must not be used outside tests. Must not import torch: children of a process with its threads cannot be forked safely.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from learner.archive import RunArchive
from learner.checkpoint.manager import Checkpoints
from learner.checkpoint.manifest import CheckpointHeader

CALLS = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink")
DIED = 9
NEVER = threading.Event()


class Bytes:
    """A state of which any content will do."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def chunks(self) -> Iterator[memoryview]:
        yield from (memoryview(bytes([self._seed]) * 1000) for _ in range(3))


def write(folder: Path, step: int, ranks: int = 2) -> None:
    """A whole checkpoint, and those before the last two deleted."""
    checkpoints = Checkpoints(RunArchive(folder))
    name = checkpoints.partial.start(step)
    for rank in range(ranks):
        checkpoints.partial.write(name, rank, Bytes(step), NEVER)
    cut = CheckpointHeader(step=step, version=step, ranks=ranks, zero_stage=1, dtype="float32")
    checkpoints.commit(name, cut, NEVER, sampler="{}")
    checkpoints.prune(2)


def note(calls: list[str], dies_at: int) -> None:
    """From now on keep the names of CALLS, and die instead of making the call number `dies_at`, counted from 0."""

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
    """Raise AssertionError unless what is left is as good as before the write, or as after it: the steps."""
    checkpoints = Checkpoints(RunArchive(folder))
    steps = [checkpoint.step for checkpoint in checkpoints.complete()]
    for checkpoint in checkpoints.complete():
        checkpoints.check(checkpoint)
    newest, _ = checkpoints.newest_intact(3)
    assert steps in ([1, 2], [1, 2, 3], [2, 3]), steps
    assert newest is not None
    assert newest.step == steps[-1], newest
    # Replay goes on from the oldest, so the batches after it must be there.
    assert RunArchive(folder).steps()[-3 + steps[0] :] == list(range(steps[0] + 1, 4))
    checkpoints.clear_interrupted()
    write(folder, 3)
    assert [checkpoint.step for checkpoint in checkpoints.complete()] == [2, 3]
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert left == [checkpoint.name for checkpoint in checkpoints.complete()], left
    return ",".join(map(str, steps))


def main(folder: Path) -> None:
    """Print the steps found after each death, one line each, and the calls of a write that nobody interrupted."""
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
    raise AssertionError("it never came to its end")


if __name__ == "__main__":
    assert "torch" not in sys.modules
    main(Path(sys.argv[1]))
