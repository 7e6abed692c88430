"""Owns the test that all descendants of a process are ended, even if the process itself was suspended meanwhile.

Must not end descendants of the test's process: the program under test runs in a new process.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import itertools, subprocess, sys, types
from deploy import process_tree

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
child.stdout.readline()
clock = itertools.count(step=10.0)  # at each call much time has passed, as if this process had been suspended
process_tree.time = types.SimpleNamespace(monotonic=lambda: next(clock))
killed = process_tree.end_descendants(0.2)
print(len(killed), f"(pid {child.pid})" in killed[0], process_tree.descendants())
"""


def test_stubborn_processes_are_killed_after_a_suspension() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert done.stdout == "1 True []\n"
