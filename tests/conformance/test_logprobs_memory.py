"""Log-probs, entropies and their gradients never hold more than a chunk's logits; measured, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.conformance(formula="never [tokens, vocabulary], forward or backward", setting="CHUNK_TOKENS")
def test_memory_stays_far_below_the_full_logits() -> None:
    """4,096 tokens at a vocabulary of 150,000, forward and backward: full logits alone would take 2,458 MB."""
    finished = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/logprobs_memory.py"), "--tokens", "4096", "--vocabulary", "150000",
         "--hidden", "16", "--raw"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert 0 < float(finished.stdout) < 0.5 * 4096 * 150_000 * 4
