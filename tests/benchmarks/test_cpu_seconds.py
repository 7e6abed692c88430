"""The CPU time of a process tree: processes that end between looks, orphans, moments between looks."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from benchmarks.loop.cpu_seconds import CpuAccount, CpuMeter, CpuSeries, Roles, Seen, tree

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


def test_a_child_that_no_look_saw_is_its_parents() -> None:
    account = CpuAccount()
    account.look({ROOT: Seen(0, 1.0, 0.0)})
    assert account.look({ROOT: Seen(0, 1.0, 3.0)}) == {ROOT: 4.0}


def test_a_child_that_ended_is_counted_once() -> None:
    account = CpuAccount()
    account.look({ROOT: Seen(0, 1.0, 0.0), WORKER: Seen(1, 2.0, 0.0)})
    found = account.look({ROOT: Seen(0, 1.0, 2.5)})
    assert found == {ROOT: 1.5, WORKER: 2.0}, "what it used after the last look is found at its parent"


def test_children_of_a_process_that_ended_are_kept() -> None:
    account = CpuAccount()
    assert account.look({ROOT: Seen(0, 1.0, 0.0), WORKER: Seen(1, 2.0, 4.0)}) == {ROOT: 1.0, WORKER: 6.0}
    assert account.look({ROOT: Seen(0, 1.0, 6.0)}) == {ROOT: 1.0, WORKER: 6.0}


def test_a_parent_that_does_not_collect_loses_nothing_seen() -> None:
    account = CpuAccount()
    account.look({ROOT: Seen(0, 1.0, 0.0), WORKER: Seen(1, 2.0, 0.0)})
    assert account.look({ROOT: Seen(0, 1.5, 0.0)}) == {ROOT: 1.5, WORKER: 2.0}


def test_an_orphan_is_found_at_who_adopted_it() -> None:
    account = CpuAccount()
    account.look({ROOT: Seen(0, 0.0, 0.0), WORKER: Seen(1, 1.0, 0.0), OTHER: Seen(2, 5.0, 0.0)})
    assert account.look({ROOT: Seen(0, 0.0, 6.0)}) == {ROOT: 0.0, WORKER: 1.0, OTHER: 5.0}


def test_a_pid_that_is_used_again_is_another_process() -> None:
    account, later = CpuAccount(), (2, 20.0)
    account.look({ROOT: Seen(0, 0.0, 0.0), WORKER: Seen(1, 3.0, 0.0)})
    found = account.look({ROOT: Seen(0, 0.0, 3.0), later: Seen(1, 0.5, 0.0)})
    assert found == {ROOT: 0.0, WORKER: 3.0, later: 0.5}


def test_a_moment_between_two_looks() -> None:
    seconds = [{ROOT: 1.0}, {ROOT: 3.0, WORKER: 1.0}, {ROOT: 3.0, WORKER: 5.0}]
    series = CpuSeries([10.0, 12.0, 14.0], seconds, {ROOT: "a", WORKER: "b"})
    assert series.until(11.0) == {"a": 2.0, "b": 0.5}
    assert series.until(9.0) == {}
    assert series.until(10.0) == {"a": 1.0}
    assert series.until(99.0) == {"a": 3.0, "b": 5.0}
    assert series.between(11.0, 13.0) == {"a": 1.0, "b": 2.5}
    assert CpuSeries().until(1.0) == {}
    both = CpuSeries([10.0], [{ROOT: 1.0, WORKER: 2.0}], {ROOT: "a", WORKER: "a"})
    assert both.until(10.0) == {"a": 3.0}


def test_a_role_is_given_told_or_inherited() -> None:
    roles = Roles(lambda command: command.partition(" ")[0] if command[:1].islower() else "")

    def look(worker: str, other: str, given: dict[int, str]) -> list[str]:
        tree = {ROOT: Seen(0, 0.0, 0.0, "ray up"), WORKER: Seen(1, 0.0, 0.0, worker), OTHER: Seen(2, 0.0, 0.0, other)}
        roles.look(tree, given)
        return [roles.found[key] for key in tree]

    assert look("Actor", "Fork", {}) == ["ray", "ray", "ray"]
    assert look("Actor", "Fork", {WORKER[0]: "rollout"}) == ["ray", "rollout", "rollout"]
    assert look("other one", "engine core", {}) == ["ray", "rollout", "engine"]
    assert look("", "", {}) == ["ray", "rollout", "engine"], "a process that ends tells nothing"


def test_real_processes_that_end_are_counted() -> None:
    program = subprocess.Popen(
        [sys.executable, "-S", "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdin is not None
    assert program.stdout is not None
    with program, CpuMeter(program.pid, Roles(lambda command: "root"), every_s=60.0) as meter:
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.readline() == "done\n"
        meter.look()
        spent = meter.series.until(time.time())
        program.stdin.close()
        program.wait()
    ticks = 2 * 0.02  # the kernel counts whole ticks
    assert spent["root"] >= 2 * BURNT_S - ticks
    assert meter.series.until(time.time()) == spent, "a tree that has ended keeps its last look"


def test_a_tree_that_has_ended_is_empty() -> None:
    text = "print(flush=True); input()"
    program = subprocess.Popen([sys.executable, "-S", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    root = psutil.Process(program.pid)
    assert program.stdout is not None
    assert program.stdout.readline() == b"\n"  # Linux shows no command line until the program is loaded
    assert ["input()" in seen.command for seen in tree(root).values()] == [True]
    program.communicate(b"\n")
    assert tree(root) == {}
    with pytest.raises(psutil.NoSuchProcess):
        CpuMeter(program.pid, Roles(str))
