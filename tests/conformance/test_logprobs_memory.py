"""Log-probs, entropies and their gradients never hold more than a chunk's logits; measured, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AFRESH = ("sh", "-c", '"$@"; exit $?', "sh")
"""A process inherits the peak of the one that starts it, and pytest's may be higher than what is measured; a shell's is
small, and `exit` behind the command keeps it from turning into the command."""


@pytest.mark.conformance(formula="never [tokens, vocabulary], forward or backward", setting="CHUNK_TOKENS")
@pytest.mark.parametrize("vocabulary", [40_000, pytest.param(150_000, marks=pytest.mark.slow)])
def test_memory_stays_far_below_the_full_logits(vocabulary: int) -> None:
    """4,096 tokens, forward and backward: full logits alone would take 655 MB, and 2,458 MB.

    A chunk's have to take more than 32 MiB, for what is smaller glibc keeps when it is freed.
    """
    program = [sys.executable, str(ROOT / "benchmarks/logprobs_memory.py")]
    size = ["--tokens", "4096", "--vocabulary", str(vocabulary), "--hidden", "16"]
    # Threads change no size, and a second one spins where other processes hold the cores.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [*AFRESH, *program, *size, "--raw"], env=environment, capture_output=True, text=True, timeout=280
    )
    assert finished.returncode == 0, finished.stderr
    assert 0 < float(finished.stdout) < 0.5 * 4096 * vocabulary * 4
