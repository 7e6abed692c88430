"""Ranks form their group however late the last one has its model, and get commands during any wait of rank 0."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.coordinator import run_end, waiting
from learner.rank import worker
from learner.rank.commands import Command
from learner.rank.worker import RankWorker
from learner.training.process_group import nccl_failure_policy
from services.contracts.weight_group import nccl_environment
from services.storage.errors import StoreError
from tests.harness.small_run import recipe_document, service_context
from tests.learner.running import end_ranks, start_programs

pytestmark = pytest.mark.timeout(400)
NCCL = nccl_failure_policy(600.0) | nccl_environment(60.0)


@pytest.mark.slow
def test_a_rank_may_join_after_the_timeout_of_a_collective() -> None:
    code = (
        "import time, torch; from learner.training.process_group import Ranks; time.sleep(20 * {rank}); "
        "ranks = Ranks({rank}, {world}, '127.0.0.1', {port}, timeout_s=15, meet_s=170); "
        "assert ranks.all_reduce(torch.ones(1)) == {world}; ranks.leave()"
    )
    programs = start_programs(code, 2)
    try:
        ended = [program.wait(180) for program in programs]
    finally:
        end_ranks(programs)
    assert ended == [0, 0], "\n".join(program.output() for program in programs)


@pytest.mark.parametrize(
    ("work", "status", "last"),
    [
        pytest.param("lambda: 0", 0, "", marks=pytest.mark.slow),
        pytest.param("lambda: 3", 3, "", marks=pytest.mark.slow),
        ("lambda: int('many')", 1, "ValueError: invalid literal for int() with base 10: 'many'"),
        ("lambda: sys.exit('usage')", 1, "usage\nshut down"),
    ],
)
def test_a_rank_exits_without_the_interpreters_shutdown(work: str, status: int, last: str) -> None:
    code = (
        "import atexit, sys; from learner.training.process_group import end_with; "
        "atexit.register(print, 'shut down', file=sys.stderr); end_with(" + work + ")"
    )
    programs = start_programs(code, 1)
    try:
        ended = programs[0].wait(180)
    finally:
        end_ranks(programs)
    output = programs[0].output().strip()
    assert (ended, output.endswith(last), "shut down" in output) == (status, True, "shut down" in last), output


async def test_rank_0_waits_for_ranks_as_long_as_they_may_start(
    redis: Any, run_id: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    for name in NCCL:
        monkeypatch.setenv(name, "")  # restored after the test

    def meet(*_: Any, **named: Any) -> None:
        given.update(named, policy={name: os.environ[name] for name in NCCL})
        raise ConnectionError("end of the test")

    monkeypatch.setattr(worker, "Ranks", meet)
    document = recipe_document(tiny_model, limits={"startup_timeout_s": 5000.0})
    async with service_context(redis, run_id, document, "learner") as context:
        with pytest.raises(ConnectionError):
            RankWorker(context, 0, 2, ("127.0.0.1", 1))._open()
    assert (given["timeout_s"], given["meet_s"]) == (600.0, 5000.0)
    assert given["policy"] == NCCL, "torch reads the variables when a group is created"


async def test_ranks_receive_idle_commands_while_rank_0_waits(
    redis: Any, run_id: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    async def send(command: Any) -> None:
        sent.append(command.do)

    def rejecting_tokenizer(*_: Any) -> None:
        ends = time.monotonic() + 60
        while len(sent) <= 2 and time.monotonic() < ends:
            time.sleep(0.05)
        raise StoreError("the store rejects the request")

    monkeypatch.setattr(waiting, "TICK_S", 0.1)
    monkeypatch.setattr(run_end, "tokenizer_of", rejecting_tokenizer)
    ours: Any = SimpleNamespace(send=send, model_folder=tiny_model)
    unused: Any = None
    async with service_context(redis, run_id, recipe_document(tiny_model), "learner") as context:
        with pytest.raises(StoreError, match="the store rejects the request"):
            await run_end.RunEnd(context, ours, unused, unused)._export([])
    assert len(sent) > 2
    assert set(sent) == {"idle"}


async def test_a_cancelled_command_ends_for_all_ranks() -> None:
    """Another rank may be in the second collective of `idle`, and would stay there."""
    met: list[str] = []
    told, go_on = threading.Event(), threading.Event()

    def broadcast_bytes(message: bytes) -> bytes:
        met.append("command")
        told.set()
        assert go_on.wait(60)
        return message

    def all_reduce(flag: Any) -> Any:
        met.append("stops")
        return flag

    with ThreadPoolExecutor(1) as thread:

        async def in_order(task: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(thread, task)

        ranks = SimpleNamespace(broadcast_bytes=broadcast_bytes, all_reduce=all_reduce)
        worker: Any = object.__new__(RankWorker)
        worker._rank = SimpleNamespace(world=2, in_order=in_order, ranks=ranks)
        worker._context = SimpleNamespace(stopping=asyncio.Event())
        sending = asyncio.create_task(worker.send(Command(do="idle")))
        await asyncio.to_thread(told.wait, 60)
        sending.cancel()
        await asyncio.wait([sending])
        go_on.set()
    assert met == ["command", "stops"]
