"""A warm parent may die at any moment, lack pidfds, or hold a user's file that lies about its processes."""

import os
import re
import signal
import subprocess
from unittest.mock import patch

import psutil
import pytest

from services.contracts import Outcome
from services.settings.rewards.reward import parse_text
from tests.harness.process_trees import alive
from tests.verifier.sandbox.judged import matching, until
from verifier.sandbox import parents
from verifier.sandbox.pool import Sandbox
from verifier.sandbox.warm_parent import WarmParent
from verifier.verifiers.base import Candidate

LIES = """
import json, os, socket, sys
def announce(control, child):
    descriptors = [os.pidfd_open({held})] if {held} else []
    socket.send_fds(control, [json.dumps({line}).encode() + b"\\n"], descriptors)
sys.modules["__main__"]._announce = announce
def score(prompt, response, reference, metadata):
    return True
"""
NO_PIDFD = """import os, sys
def absent(pid): raise OSError(38, "Function not implemented")
os.pidfd_open = absent
from verifier.sandbox import server
server.main(sys.argv[1:])
"""


FAILS_ONCE = """import os, sys
from verifier.sandbox import server
def confine():
    os.rename({first!r}, {first!r} + "-gone")
    raise OSError(11, "Resource temporarily unavailable")
if os.path.exists({first!r}):
    server.confine = confine
server.main(sys.argv[1:])
"""


@pytest.fixture
def bystander():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        assert process.poll() is None
        process.kill()


def signals_to_processes_alone():
    """Fail at a signal to a group, which would end these tests and what started them."""
    kill = os.kill

    def checked(pid, number):
        assert pid > 0, f"signal {number} to {pid}"
        kill(pid, number)

    return patch.object(os, "kill", checked)


async def lied(line, held):
    files = {"./lies.py": LIES.format(line=line, held=held)}
    with Sandbox(1, 5.0, files=files) as sandbox:
        found = await sandbox.judge(parse_text("python:./lies.py:score"), Candidate("x", {"answer": "x"}))
    assert found.outcome is Outcome.UNKNOWN
    return found.reason


async def test_a_file_cannot_have_another_process_killed(bystander):
    assert "none of its own" in await lied({"pid": bystander.pid}, bystander.pid)
    assert "none of its own" in await lied({"pid": bystander.pid}, 0)


@pytest.mark.parametrize(
    "line", [{"pid": 0}, {"pid": -1}, {}, {"gaps": []}, {"pid": 1 << 40}, {"pid": 5, "refused": "no"}], ids=str
)
async def test_a_file_cannot_have_the_verifiers_group_killed(line):
    """Signals to 0 and -1 go to groups: the verifier with all that started it, and every process."""
    with signals_to_processes_alone():
        assert re.search("invalid forked|it has ended|none of its own", await lied(line, 0))


async def test_a_start_is_never_taken_for_a_fork():
    """A thread forks while others start the warm parent again, at any moment."""
    parent = WarmParent("pattern", {"kind": "pattern", "function": "", "files": {}}, "verifier.sandbox.server")

    class Restarted:
        """A lock that lets the others restart between two of this thread's uses of it."""

        def __init__(self, lock):
            self.lock, self.restarted = lock, False

        def __enter__(self):
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()
            if not self.restarted:
                self.restarted = True
                parent.restart()

    parent.start()
    try:
        parent.ready(60.0)
        parent._lock = Restarted(parent._lock)
        process = parent.fork(60.0)
        with signals_to_processes_alone():
            process.close()
        assert process.pid > 0
    finally:
        parent.close()


async def test_without_pidfds_texts_are_judged_and_hangs_killed(tmp_path, monkeypatch):
    (tmp_path / "no_pidfd_judging.py").write_text(NO_PIDFD)
    monkeypatch.syspath_prepend(str(tmp_path))
    hang = "def score(prompt, response, reference, metadata):\n    while True: pass\n"
    with Sandbox(1, 0.5, files={"./hang.py": hang}, program="no_pidfd_judging") as sandbox:
        assert (await sandbox.judge(*matching("a"))).outcome is Outcome.CORRECT
        found = await sandbox.judge(parse_text("python:./hang.py:score"), Candidate("x", {"answer": "x"}))
        assert found.reason == "./hang.py:score: no judgement within 0.5 s of CPU time"


@pytest.mark.parametrize("moment", ["idle", "before a fork"])
async def test_a_warm_parent_that_dies_is_started_again(monkeypatch, moment):
    started = []

    class Watched(WarmParent):
        def start(self):
            super().start()
            started.append(self._leader.pid)

    monkeypatch.setattr(parents, "WarmParent", Watched)
    with Sandbox(1, 20.0) as sandbox:
        assert (await sandbox.judge(*matching("a"))).outcome is Outcome.CORRECT
        if moment == "idle":
            left = psutil.Process(started[0]).children()
            os.kill(started[0], signal.SIGKILL)
            await until(lambda: not any(map(alive, left)), "its judging processes have died with it")
        else:  # it dies with a request that it has not read
            os.kill(started[0], signal.SIGSTOP)
            os.killpg(started[0], signal.SIGKILL)
        assert (await sandbox.judge(*matching("a"))).outcome is Outcome.CORRECT
    assert len(started) == 2


async def test_a_start_that_failed_is_repeated(tmp_path, monkeypatch):
    first = tmp_path / "first"
    first.touch()
    (tmp_path / "failing_judging.py").write_text(FAILS_ONCE.format(first=str(first)))
    monkeypatch.syspath_prepend(str(tmp_path))
    with Sandbox(1, 20.0, program="failing_judging") as sandbox:
        assert (await sandbox.judge(*matching("a"))).outcome is Outcome.CORRECT
    assert not first.exists()


@pytest.mark.parametrize("text", ["Answer: \ud800", "\ud83d"])
async def test_half_a_surrogate_pair_is_only_a_wrong_answer(text):
    echo = "def score(prompt, response, reference, metadata):\n    return {'score': 0, 'reason': response}\n"
    with Sandbox(1, 20.0, files={"./echo.py": echo}) as sandbox:
        for reward in ("answer-line", "python:./echo.py:score"):
            found = await sandbox.judge(parse_text(reward), Candidate(text, {"answer": "5"}))
            assert found.outcome is Outcome.WRONG, found


@pytest.mark.parametrize(
    ("source", "start_s", "reason"),
    [("while True: pass", 1.0, "not ready within 1 s"), ("import os; os._exit(4)", 60.0, "status 4")],
)
async def test_a_file_that_is_never_loaded_is_loaded_once(source, start_s, reason):
    reward = parse_text("python:./file.py:score")
    with Sandbox(1, 5.0, files={"./file.py": source}, start_s=start_s) as sandbox:
        for _ in range(2):
            found = await sandbox.judge(reward, Candidate("x", {"answer": "x"}))
            assert (found.outcome, found.fault) == (Outcome.UNKNOWN, "died")
            assert reason in found.reason
