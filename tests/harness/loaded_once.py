"""Owns what the services of a test process load once instead of once per run: the warm parents of verifiers, and the
libraries that read references.

Must not be used by tests of a verifier's start or of the trial of references.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO

import pytest

from services.sampler.data import references
from verifier.references import fault_of
from verifier.sandbox import pool
from verifier.sandbox.parents import WarmParents
from verifier.sandbox.pool import START_S


class LastingParents(WarmParents):
    """Warm parents that live on when a sandbox ends; the sandbox still ends the processes that judged for it."""

    def stop(self) -> None:
        """Leave them as they are."""

    close = stop

    def end(self) -> None:
        """End them at the end of the tests."""
        super().stop()
        super().close()


class LoadedOnce:
    """Verifiers whose rewards need no file share their warm parents, and references are read in this process."""

    def __init__(self) -> None:
        self._lasting: dict[str, LastingParents] = {}

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Let the services use them until the patch is undone."""
        patch.setattr(pool, "WarmParents", self._parents)
        patch.setattr(references, "_run", _read_here)

    def end(self) -> None:
        """End all warm parents."""
        for parents in self._lasting.values():
            parents.end()

    def _parents(self, files: Mapping[str, str], start_s: float, program: str) -> WarmParents:
        if files:
            return WarmParents(files, start_s, program)
        if program not in self._lasting:
            self._lasting[program] = LastingParents({}, START_S, program)
        return self._lasting[program]


def _read_here(asked: IO[bytes], answers: IO[bytes], errors: IO[bytes], deadline_s: float) -> int:
    """Answer as the program does, without a process of its own for references that a test has made itself."""
    for request in map(json.loads, asked):
        fault = fault_of(request["verifier"], request["reference"])
        answers.write(json.dumps({"fault": fault} if fault else {}).encode() + b"\n")
    return 0
