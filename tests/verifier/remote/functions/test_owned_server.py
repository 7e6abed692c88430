"""A functions' server that is a child: it starts, is started again when it dies, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from services.settings.rewards.kinds import PythonReward
from verifier.remote.faults import RemoteSetupError
from verifier.remote.functions.function_judge import FunctionJudge
from verifier.remote.functions.owned_server import FunctionsServer
from verifier.remote.functions.place import FunctionsPlace
from verifier.remote.functions.warm import TextLimits
from verifier.verifiers.base import Candidate, Judgement

SOURCE = b"""
import os, time
def score(prompt, response, reference, metadata):
    if response == "hang":
        open(reference, "w").write(str(os.getpid()))
        time.sleep(600)
    return True
"""


async def until(fact: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not fact():  # noqa: ASYNC110 - about another process
            await asyncio.sleep(0.02)


def judge_at(place: FunctionsPlace) -> FunctionJudge:
    options = PythonReward(function="./rewards.py:score", needs=("network",))
    return FunctionJudge(options, {"./rewards.py": SOURCE}, place, TextLimits(5, 20), first_pause_s=0.01)


async def judged(place: FunctionsPlace) -> object:
    judge = judge_at(place)
    [decision] = await judge.judge_all([Candidate("4", {"answer": "4"})])
    await judge.aclose()
    return decision if isinstance(decision, Judgement) else str(decision)


async def test_a_server_starts_judges_and_ends() -> None:
    server = FunctionsServer()
    async with server as place:
        assert place.socket is not None
        folder = Path(place.socket).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert await judged(place) == Judgement(correct=True, score=1.0)
        assert server.pid is not None
        process = psutil.Process(server.pid)
        family = [process, *process.children(recursive=True)]
    assert [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    assert not folder.exists()


async def test_a_server_that_dies_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    server = FunctionsServer(restarts=1)
    async with server as place:
        first = server.pid
        assert first is not None
        os.kill(first, 9)
        await until(lambda: server.pid not in (None, first))
        await until(lambda: Path(str(place.socket)).exists())
        assert await judged(place) == Judgement(correct=True, score=1.0)
        assert "the functions' server died (status -9); restart 1 of at most 1 within 600 s" in caplog.text
        assert server.pid is not None
        os.kill(server.pid, 9)
        await until(lambda: "it is not started again" in caplog.text)
        assert "functions: no connection: " in str(await judged(place))


async def test_texts_end_with_a_killed_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = Path(tempfile.mkdtemp(prefix="t-"))  # tmp_path is too long for a Unix socket
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    server, pid = FunctionsServer(restarts=0), tmp_path / "pid"
    async with server as place:
        judge = judge_at(place)
        task = asyncio.create_task(judge.judge_all([Candidate("hang", {"answer": str(pid)})]))
        await until(lambda: pid.exists() and pid.read_text() != "")
        assert server.pid is not None
        os.kill(server.pid, 9)
        await until(lambda: not psutil.pid_exists(int(pid.read_text())))
        [decision] = await task
        assert "functions: " in str(decision)
        await judge.aclose()
    os.rmdir(temporary)  # nothing is left in it


async def test_a_start_has_a_deadline() -> None:
    with pytest.raises(RemoteSetupError, match="did not answer within 0 s"):
        await FunctionsServer(start_s=0).start()


async def test_a_socket_path_that_is_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(RemoteSetupError, match="expected a shorter path, for a Unix socket"):
        await FunctionsServer().start()
    assert list(deep.iterdir()) == []
