"""Log-probs, entropies and gradients never hold more logits than those of a chunk, measured in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AFRESH = ("sh", "-c", '"$@"; exit $?', "sh")
"""A process inherits the peak memory of its parent, and that of pytest may exceed the measured one. The peak of a shell
is small; the `exit` after the command prevents the shell from being replaced by the command."""


@pytest.mark.conformance(formula="never [tokens, vocabulary] at once, forward or backward", setting="CHUNK_TOKENS")
@pytest.mark.parametrize("vocabulary", [40_000, pytest.param(150_000, marks=pytest.mark.slow)])
def test_memory_stays_far_below_the_full_logits(vocabulary: int) -> None:
    """4,096 tokens, forward and backward: the full logits alone would take 655 MB and 2,458 MB.

    The logits of a chunk must exceed 32 MiB, because glibc keeps smaller blocks when they are freed.
    """
    program = [sys.executable, str(ROOT / "benchmarks/learner/memory/logprobs.py")]
    size = ["--tokens", "4096", "--vocabulary", str(vocabulary), "--hidden", "16"]
    # Threads do not change sizes, and a second thread spins while other processes use the cores.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [*AFRESH, *program, *size, "--raw"], env=environment, capture_output=True, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stderr
    assert 0 < float(finished.stdout) < 0.5 * 4096 * vocabulary * 4
