"""Owns ranks that are forked from a server which has imported what a rank needs: to import it takes five seconds.

Must not be used by tests of how a process starts or ends.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.harness.free_ports import free_port

NEEDED = (
    *("tests.harness.members", "tests.learner.cases", "tests.conformance.dense"),
    *("deepspeed", "deepspeed.runtime.zero.stage3", "transformers.models.llama.modeling_llama", "accelerate"),
)
"""What the server imports: the rank's own modules, and what they import when they are first used."""
VARIABLES = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
Work = Callable[[int, int, int], None]
"""(rank, world, port) -> None: a rank's work, a function of a module or a partial of one. It ends the process."""


class ForkedRank:
    """A process that does a rank's work and writes what it prints to a file."""

    def __init__(self, work: Work, rank: int, world: int, port: int, variables: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(NEEDED))
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115 - it stays readable after the process
        weakref.finalize(self, self._log.close)
        environment = dict(os.environ) | VARIABLES | variables
        self._process = context.Process(target=_do, args=(work, rank, world, port, self._log.name, environment))
        self._process.start()

    def wait(self, deadline_s: float) -> int | None:
        """Its exit status; None if it still runs after the deadline."""
        self._process.join(deadline_s)
        return self._process.exitcode

    def end(self) -> None:
        """Kill it, if it still runs."""
        self._process.kill()
        self._process.join(60)

    def output(self) -> str:
        """What it has printed so far."""
        return Path(self._log.name).read_text(errors="replace")


def check_ranks_succeed(work: Work, world: int, deadline_s: float, **variables: str) -> None:
    """Have `world` processes do the work together. Each must end with 0; `variables` are theirs."""
    port = free_port()
    ranks = [ForkedRank(work, rank, world, port, variables) for rank in range(world)]
    try:
        ended = [rank.wait(deadline_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    assert ended == [0] * world, "\n".join(rank.output() for rank in ranks)


def _do(work: Work, rank: int, world: int, port: int, log: str, environment: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with open(log, "ab", buffering=0) as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    work(rank, world, port)
