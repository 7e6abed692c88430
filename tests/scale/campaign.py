"""Owns the scale campaign: with 2,048 pending groups and 200 heartbeats, each role is killed and has to come back.

Must not run a model. `python -m tests.scale.campaign` prints a table; its exit status is 1 if a bound is exceeded.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import lookups
from tests.chaos.server import Server
from tests.harness.stack import StackDownError, end_with_us, send
from tests.harness.stubs.stack import ROOT, StubStack
from tests.harness.stubs.workload import recipe, write_questions
from tests.scale.scene import WORK, Connections, ScaledRun, seconds_until

PENDING, SAMPLES, HEARTBEATS, ANNOUNCERS = 2048, 16, 200, 4
STALENESS = 7
BACK_S, MOST_CONNECTIONS = 30.0, 200
FILLING_S = 180.0
RUN = "scale"


@dataclass(frozen=True)
class Comeback:
    """How a role came back: seconds from its process start until ready, and until it worked; None: too late.

    `connections`: the most that the server had meanwhile; `pending`: the groups at the kill.
    """

    role: str
    pending: int
    ready_s: float | None
    work_s: float | None
    connections: int
    log: str = ""

    @property
    def fault(self) -> str | None:
        """What is wrong; None if nothing is."""
        if self.ready_s is None:
            return f"the {self.role} was not ready within {BACK_S:g} s of its start: {self.log}"
        if self.work_s is None:
            return f"the {self.role} did no work within {BACK_S:g} s of its start: {self.log}"
        if self.connections >= MOST_CONNECTIONS:
            return f"{self.connections} connections while the {self.role} came back: expected fewer than 200"
        return None


@dataclass(frozen=True)
class Result:
    """All roles that were killed, and the most connections before the first kill."""

    comebacks: list[Comeback]
    filling: int

    @property
    def faults(self) -> list[str]:
        """What is wrong; a role that was not killed, because the run had stopped, is too."""
        found = [comeback.fault for comeback in self.comebacks if comeback.fault]
        if self.filling >= MOST_CONNECTIONS:
            found.append(f"{self.filling} connections before the first kill: expected fewer than {MOST_CONNECTIONS}")
        missing = WORK.keys() - {comeback.role for comeback in self.comebacks}
        return found + [f"the {role} was not killed" for role in sorted(missing)]

    def __str__(self) -> str:
        def cell(seconds: float | None) -> str:
            return "never" if seconds is None else f"{seconds:.1f}"

        lines = ["role       | pending | ready s | work s | connections"]
        lines.append(f"(filling)  | {'':7} | {'':7} | {'':6} | {self.filling}")
        lines += [
            f"{each.role:10} | {each.pending:7} | {cell(each.ready_s):>7} | {cell(each.work_s):>6} | {each.connections}"
            for each in self.comebacks
        ]
        return "\n".join(lines)


@contextmanager
def scaled_run(folder: Path) -> Iterator[tuple[ScaledRun, Connections]]:
    """A run that has PENDING groups in flight and HEARTBEATS heartbeats."""
    groups = PENDING // (STALENESS + 1)
    document = recipe(
        write_questions(folder / "questions.jsonl", 2 * PENDING),
        2 * PENDING - 8,
        rollout_steps=1000,
        groups_per_step=groups,
        max_inflight_groups=PENDING,
        max_staleness=STALENESS,
        group_size=SAMPLES,
    )
    with ExitStack() as held:
        server = held.enter_context(Server(folder / "valkey"))
        connections = held.enter_context(Connections(server.url))
        stack = held.enter_context(StubStack(folder / "runs", server.url))
        raw = lookups.client(server.url)
        held.callback(raw.close)
        stack.submit(document, RUN)
        for _ in range(ANNOUNCERS):
            held.enter_context(_announcer(server.url, HEARTBEATS // ANNOUNCERS))
        run = ScaledRun(stack, RUN, raw)
        _until(run, lambda: run.announced() >= HEARTBEATS, "the heartbeats")
        _until(run, lambda: run.step() >= 1, "the first rollout step")
        yield run, connections


@contextmanager
def _announcer(url: str, count: int) -> Iterator[None]:
    command = [sys.executable, "-m", "tests.scale.heartbeats", str(count), "--run", RUN, "--redis", url]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, preexec_fn=end_with_us)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _until(run: ScaledRun, fact: Callable[[], bool], what: str) -> None:
    if seconds_until(fact, time.time(), FILLING_S) is None:
        run.stack.check()
        raise StackDownError(f"{what} did not happen within {FILLING_S:g} s")


def kill(run: ScaledRun, role: str, connections: Connections) -> Comeback:
    """Kill the process of a role while PENDING groups are pending, and watch the next one come back."""
    _until(run, lambda: run.pending() >= PENDING, f"{PENDING} pending groups")
    connections.restart()
    kept, pending = run.kept(role), run.pending()
    victim, starts = kept.pid, kept.started
    assert victim is not None, f"the {role} is down before it is killed"
    send(victim, signal.SIGKILL)
    _until(run, lambda: kept.started > starts and kept.pid is not None, f"the start of another {role}")
    began = kept.at
    ready = seconds_until(lambda: kept.pid is not None and run.ready(role, kept.pid), began, BACK_S)
    done = WORK[role](run)
    work = seconds_until(lambda: WORK[role](run) > done, began, BACK_S) if ready is not None else None
    log = "" if work is not None else _last_error(run, role)
    return Comeback(role, pending, ready, work, connections.most, log)


def _last_error(run: ScaledRun, role: str) -> str:
    folder = run.stack.folder
    path = folder / "gateway.log" if role == "controller" else folder / RUN / "logs" / f"{role}-0.log"
    lines = path.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if "Error" in line), "its log has no error")


def play(folder: Path) -> Result:
    """Kill every role in turn; stops at the first that does not come back, because nothing moves without it."""
    with scaled_run(folder) as (run, connections):
        filling, comebacks = connections.most_ever, []
        for role in WORK:
            comebacks.append(kill(run, role, connections))
            if comebacks[-1].work_s is None:
                break
    return Result(comebacks, filling)


def main() -> int:
    """Play, print the table; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="folder of the run and its logs; default: deleted afterwards")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-scale-") as folder:
        if given.runs:
            given.runs.mkdir(parents=True, exist_ok=True)
        result = play(given.runs or Path(folder))
    print(result)
    for fault in result.faults:
        print(f"FAILED: {fault}")
    return 1 if result.faults else 0


if __name__ == "__main__":
    sys.exit(main())
