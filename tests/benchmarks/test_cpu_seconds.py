"""The CPU time of a process tree: processes that end between looks, orphans, moments between looks."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.loop.cpu_seconds import ENDED, CpuAccount, CpuMeter, CpuSeries, Seen, tree

ROOT, WORKER, OTHER = (1, 0.0), (2, 0.0), (3, 0.0)
BURNT_S = 0.1
PARENT = f"""
import subprocess, sys
burn = "import time\\nwhile time.process_time() < {BURNT_S}: pass"
sys.stdin.readline()
for _ in range(2):
    subprocess.run([sys.executable, "-S", "-c", burn])
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_child_that_no_look_saw_is_counted() -> None:
    account = CpuAccount()
    account.look({ROOT: Seen("root", 0, 1.0, 0.0)})
    assert account.look({ROOT: Seen("root", 0, 1.0, 3.0)}) == {"root": 1.0, ENDED: 3.0}


def test_a_child_that_ended_is_counted_once() -> None:
    account = CpuAccount()
    account.look({ROOT: Seen("root", 0, 1.0, 0.0), WORKER: Seen("worker", 1, 2.0, 0.0)})
    found = account.look({ROOT: Seen("root", 0, 1.0, 2.5)})
    assert found == {"root": 1.0, "worker": 2.0, ENDED: 0.5}, "what it used after the last look is found at its parent"


def test_children_of_a_process_that_ended_are_kept() -> None:
    account = CpuAccount()
    both = {ROOT: Seen("root", 0, 1.0, 0.0), WORKER: Seen("worker", 1, 2.0, 4.0)}
    assert account.look(both) == {"root": 1.0, "worker": 2.0, ENDED: 4.0}
    assert account.look({ROOT: Seen("root", 0, 1.0, 6.0)}) == {"root": 1.0, "worker": 2.0, ENDED: 4.0}


def test_a_parent_that_does_not_collect_loses_nothing_seen() -> None:
    account = CpuAccount()
    account.look({ROOT: Seen("raylet", 0, 1.0, 0.0), WORKER: Seen("worker", 1, 2.0, 0.0)})
    assert account.look({ROOT: Seen("raylet", 0, 1.5, 0.0)}) == {"raylet": 1.5, "worker": 2.0, ENDED: 0.0}


def test_an_orphan_is_found_at_who_adopted_it() -> None:
    account = CpuAccount()
    account.look({ROOT: Seen("root", 0, 0.0, 0.0), WORKER: Seen("a", 1, 1.0, 0.0), OTHER: Seen("b", 2, 5.0, 0.0)})
    found = account.look({ROOT: Seen("root", 0, 0.0, 6.0)})
    assert found == {"root": 0.0, "a": 1.0, "b": 5.0, ENDED: 0.0}


def test_a_pid_that_is_used_again_is_another_process() -> None:
    account = CpuAccount()
    account.look({ROOT: Seen("root", 0, 0.0, 0.0), (2, 10.0): Seen("worker", 1, 3.0, 0.0)})
    found = account.look({ROOT: Seen("root", 0, 0.0, 3.0), (2, 20.0): Seen("worker", 1, 0.5, 0.0)})
    assert found == {"root": 0.0, "worker": 3.5, ENDED: 0.0}


def test_a_moment_between_two_looks() -> None:
    series = CpuSeries([10.0, 12.0, 14.0], [{"a": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 3.0, "b": 5.0}])
    assert series.until(11.0) == {"a": 2.0, "b": 0.5}
    assert series.until(9.0) == {}
    assert series.until(10.0) == {"a": 1.0}
    assert series.until(99.0) == {"a": 3.0, "b": 5.0}
    assert series.between(11.0, 13.0) == {"a": 1.0, "b": 2.5}
    assert CpuSeries().until(1.0) == {}


def test_real_processes_that_end_are_counted() -> None:
    program = subprocess.Popen(
        [sys.executable, "-S", "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdin is not None
    assert program.stdout is not None
    with program, CpuMeter(program.pid, lambda command: "root", every_s=60.0) as meter:
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "done\n"
        meter.look()
        spent = meter.series.until(time.time())
        program.stdin.close()
        program.wait()
    ticks = 2 * 0.02  # the kernel counts whole ticks
    assert spent[ENDED] >= 2 * BURNT_S - ticks
    assert meter.series.until(time.time()) == spent, "a tree that has ended keeps its last look"


def test_a_tree_that_has_ended_is_empty() -> None:
    program = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    root = psutil.Process(program.pid)
    found = tree(root, lambda command: "python" if "python" in command else command)
    assert [seen.role for seen in found.values()] == ["python"]
    program.communicate(b"\n")
    assert tree(root, str) == {}
    with pytest.raises(psutil.NoSuchProcess):
        CpuMeter(program.pid, str)
