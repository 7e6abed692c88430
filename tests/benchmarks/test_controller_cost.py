"""The controller's cost: the benchmark measures a run without and with a past. Slow: it writes that past."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.api.controller_cost import OTHERS

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^(\d+) processes, ([^:]+): (\d+\.\d+)% of a core$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_is_measured_without_and_with_a_past() -> None:
    processes = len(OTHERS) + 2
    command = [sys.executable, "-m", "benchmarks.api.controller_cost", "--processes", str(processes), "--seconds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    found = LINE.findall(done.stdout)
    assert [(int(count), past) for count, past, _ in found] == [
        (processes, "no past"),
        (processes, "1,000 ended runs, 2,000 evaluations, 10,000 events"),
    ]
    assert all(float(share) > 0.0 for *_, share in found)
