"""A group ends whole, also when its leader has ended before; the leader keeps its number until then."""

import subprocess
import sys

import psutil
import pytest

from tests.harness.process_trees import until_gone
from verifier.processes.group import GroupLeader

MEMBER = "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); {then}"


def leading(then):
    process = subprocess.Popen(
        [sys.executable, "-c", MEMBER.format(then=then)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout as out:
        return GroupLeader(process), int(out.readline())


@pytest.mark.parametrize(
    ("then", "status"), [("sys.exit(3)", 3), ("sys.stdin.read(); import time; time.sleep(600)", -9)]
)
async def test_a_group_ends_whole(then, status):
    leader, member = leading(then)
    ended = leader.wait(20.0 if status == 3 else 0.1)
    assert ended == (status == 3) == (not leader.runs())
    assert psutil.Process(leader.pid).pid, "it is not reaped: no other process can have its number"
    assert leader.end() == status
    await until_gone([member], 10.0)
    assert not psutil.pid_exists(leader.pid)


def test_a_number_that_is_free_again_gets_no_signal(monkeypatch):
    leader, _ = leading("sys.exit(3)")
    assert leader.end() in (3, -9)
    monkeypatch.setattr("os.killpg", lambda *_: pytest.fail("a signal to another group"))
    assert leader.end() in (3, -9)
    assert not leader.runs()
    assert leader.wait(60.0)
