"""Owns the processes of one measurement: a Valkey server, a run record, and the run's services, one by one.

Must not measure anything but CPU time and counters; the programs of this package do.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from services.settings import parse_recipe
from services.streams.connection.client import connect
from services.streams.state.runs import RunRecords
from tests.harness.process_trees import end_tree
from tests.harness.servers.redis_servers import start_server
from tests.harness.stubs.stack import PROGRAMS
from tests.harness.stubs.workload import recipe, write_questions

POLL_S = 0.02
DEADLINE_S = 300.0


class Bench:
    """A server, and one run on it. Use as a context manager. `limits`: those of the recipe, see the stubs' workload."""

    def __init__(self, folder: Path, run: str, questions: int, fsync: str = "always", **limits: Any) -> None:
        self.run, self._folder = run, folder / run
        self._folder.mkdir(parents=True)
        self.limits = limits
        self._questions = questions
        self._fsync = fsync
        self._services: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Bench:
        # As the charts and `penstock up` start it; no file is rewritten in the middle of a measurement.
        options = ("--appendfsync", self._fsync, "--auto-aof-rewrite-percentage", "0", "--enable-debug-command", "no")
        self._server = start_server(self._folder, *options)
        self.url = f"redis://127.0.0.1:{self._server.port}/0"
        self.redis = self._server.client()
        data = write_questions(self._folder / "questions.jsonl", self._questions)
        document = recipe(data, self._questions - 8, **self.limits)
        asyncio.run(_create(self.url, self.run, document))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for name in list(self._services):
            self.kill(name)
        self.redis.close()
        self._server.stop()

    @property
    def port(self) -> int:
        """The server's port."""
        return self._server.port

    def start(self, service: str, *arguments: str, url: str = "", program: str = "") -> None:
        """Start a service of the run; `program`: a stub in its place; `url`: another way to the server."""
        module = (program,) if program else PROGRAMS[service]
        command = [*module, *arguments, "--run", self.run, "--redis", url or self.url]
        environment = os.environ | {"PENSTOCK_RUNS": str(self._folder), "PENSTOCK_LOG_LEVEL": "WARNING"}
        with (self._folder / f"{service}.log").open("ab") as log:
            self._services[service] = subprocess.Popen(
                [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def kill(self, service: str) -> None:
        """End a service at once, with what it started."""
        end_tree(self._services.pop(service))

    def signal(self, service: str, number: int) -> None:
        """Send a signal to a service, not to what it started."""
        self._services[service].send_signal(number)

    def pid(self, name: str) -> int:
        """The process of a service, or of the server, `valkey`."""
        return self._server.process.pid if name == "valkey" else self._services[name].pid

    def cpu_s(self, *, children: bool = True) -> dict[str, float]:
        """User and system seconds so far, by service, with the `children` that it started; and of the server."""
        pids = {name: process.pid for name, process in self._services.items()}
        return {name: cpu_s(pid, children) for name, pid in {**pids, "valkey": self._server.process.pid}.items()}

    def key(self, name: str) -> str:
        """The key called `name` in the run."""
        return f"penstock:{{{self.run}}}:{name}"

    def counter(self, name: str) -> int:
        """A counter of the training lane."""
        return int(self.redis.hget(self.key("counters"), name) or 0)

    def traffic(self) -> tuple[int, int]:
        """Bytes that the server has received and sent so far."""
        stats: Any = self.redis.info("stats")
        return stats["total_net_input_bytes"], stats["total_net_output_bytes"]

    def entries(self, stream: str) -> int:
        """How many entries a stream has ever had."""
        return int(self.redis.xinfo_stream(self.key(stream))["entries-added"]) if self._exists(stream) else 0

    def acked(self, stream: str) -> int:
        """How many entries the stream's only consumer group has read and acked."""
        groups = self.redis.xinfo_groups(self.key(stream)) if self._exists(stream) else []
        return int(groups[0]["entries-read"] or 0) - int(groups[0]["pending"]) if groups else 0

    def _exists(self, stream: str) -> bool:
        return bool(self.redis.exists(self.key(stream)))

    def until(self, fact: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait for a fact. Raises RuntimeError when a service has ended or after the deadline, naming the log."""
        ends = time.monotonic() + deadline_s
        while not fact():
            for name, process in self._services.items():
                if process.poll() is not None:
                    raise RuntimeError(f"the {name} ended: {self.tail(name)}")
            if time.monotonic() > ends:
                raise RuntimeError(f"{what} did not happen within {deadline_s:g} s")
            time.sleep(POLL_S)

    def tail(self, service: str) -> str:
        """The end of a service's log."""
        return (self._folder / f"{service}.log").read_text(errors="replace")[-2000:]


async def _create(url: str, run: str, document: dict[str, Any]) -> None:
    redis = await connect(url)
    try:
        await RunRecords(redis).create(run, parse_recipe(document))
    finally:
        await redis.aclose()


def cpu_s(pid: int, children: bool = False) -> float:
    """User and system seconds of a process, and of its living descendants, which takes milliseconds to find out."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in (process, *(process.children(recursive=True) if children else ())):
            with suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                total += times.user + times.system
    return total


def ran_s(pid: int) -> float:
    """Seconds that the threads of a process have run, as the scheduler counts them: exact where `cpu_s` has ticks.

    A thread that has ended is not counted.
    """
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9
