"""Owns the measurement of one run's control path while another run beside it fails: the same requests, before and then.

Must not compare with other machines: the ratios are of one stack, within minutes.

`python -m benchmarks.api.two_runs [--seconds 40]` starts `penstock up` and two runs of a tiny model. When both train,
it asks the first one's routes, pauses and resumes it, for that many seconds; then it kills each learner of the second
one until that run fails, and goes on asking meanwhile and afterwards. Takes about five minutes on two cores.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.small_run import recipe_document
from tests.harness.stack import Stack
from tests.harness.tiny_model import write_tiny_model
from tests.harness.workload import write_questions

HEALTHY, DOOMED = "healthy", "doomed"
READ = {"view": "", "events": "/events?limit=100&after=", "waits": "/waits"}
"""By name: the routes of a run that are asked, below its own."""
PAUSED, RESUMED = "pause acknowledged", "resume acknowledged"
TRAINING_S, FAILING_S, ACKNOWLEDGED_S, SUCCESS_S = 900.0, 600.0, 60.0, 600.0
LOOK_S, KILL_S = 0.05, 0.2
ENDLESS = 100_000
"""Rollout steps of the run that fails: it must not succeed before."""
LEFT = 3
"""Rollout steps that must be left for the healthy run to be resumed: it must not end before it was measured."""


def document(model: Path, questions: Path, steps: int) -> dict[str, Any]:
    """A recipe small enough that two runs train on two cores."""
    return recipe_document(
        model,
        data={"source": "jsonl", "path": str(questions), "train": 44, "held_out": 12, "options": {}},
        rollout={"cpus": 0.3},
        learner={"cpus": 0.3, "learning_rate": 1e-4},
        limits={"rollout_steps": steps, "max_staleness": 1, "startup_timeout_s": 800},
        algorithm={"overlong": {"cache": 4}},
    )


class Killer(threading.Thread):
    """Kills every learner of a run as soon as its heartbeat is seen, until the run has failed.

    For the run's controller the kill of a learner that was ready does not count; those of its successors do.
    """

    def __init__(self, stack: Stack, run: str) -> None:
        super().__init__(name="killer", daemon=True)
        self._stack = stack
        self._run = run
        self.killed: set[int] = set()
        self.state = ""
        self.start()

    def run(self) -> None:
        """Kill until the run has ended, or FAILING_S have passed."""
        ends = time.monotonic() + FAILING_S
        while time.monotonic() < ends:
            view = self._stack.view(self._run)
            self.state = view["state"]
            if self.state in ("failed", "cancelled", "succeeded"):
                return
            for process in view["processes"]:
                if process["service"] == "learner" and process["pid"] not in self.killed:
                    self.killed.add(process["pid"])
                    _kill(process["pid"])
            time.sleep(KILL_S)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # its heartbeat outlives it by some seconds


@dataclass
class Findings:
    """What was seen of the healthy run. `seconds`: by phase and route or acknowledgement; the others must be empty.

    `late`: its waits beyond their deadline, as the API showed them. `foreign`: texts of its events that name the other.
    """

    seconds: dict[str, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    late: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)

    def table(self) -> Iterator[str]:
        """One line per route and phase: requests, p50, p99 in ms, and the p99 as a multiple of the first phase's."""
        first = next(iter(self.seconds.values()))
        for phase, routes in self.seconds.items():
            for name, values in routes.items():
                p50, p99 = _percentile(values, 0.5), _percentile(values, 0.99)
                ratio = p99 / _percentile(first[name], 0.99) if name in first else float("nan")
                yield f"{phase:<8} {name:<20} {len(values):>5}  p50 {p50:>6.0f}  p99 {p99:>6.0f} ms  {ratio:>5.2f} x"


def _percentile(values: Sequence[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] * 1000


class ControlPath:
    """The control path of one run: its routes, and its controller, which acknowledges a pause by the run's state."""

    def __init__(self, stack: Stack, run: str, others: Sequence[str]) -> None:
        self._stack = stack
        self._run = run
        self._others = others
        self._after = "start"
        self.findings = Findings()

    def ask(self, phase: str, holds: Callable[[], bool]) -> None:
        """Ask, pause and resume as long as `holds` is true, and once at least."""
        seconds = self.findings.seconds[phase]
        while True:
            self._look(seconds)
            if self._may_resume():
                self._change(seconds, "pause", "paused", PAUSED)
                self._change(seconds, "resume", "running", RESUMED)
            if not holds():
                return
            time.sleep(LOOK_S)

    def _may_resume(self) -> bool:
        view = self._stack.view(self._run)
        return bool(view["state"] == "running" and view["rollout_steps"] + LEFT < view["rollout_steps_total"])

    def _look(self, seconds: dict[str, list[float]]) -> None:
        answers = {}
        for name, path in READ.items():
            address = f"/v1/runs/{self._run}{path}" + (self._after if name == "events" else "")
            with _timed(seconds[name]):
                answers[name] = self._stack.api.get(address).raise_for_status().json()
        stalled = [wait for wait in answers["waits"] if wait["stalled"]]
        self.findings.late += [f"{wait['service']}: {wait['waits_for']} ({wait['seconds']:.0f} s)" for wait in stalled]
        self._after = answers["events"]["next"]
        texts = [str(event) for event in answers["events"]["events"]]
        self.findings.foreign += [text for text in texts if any(other in text for other in self._others)]

    def _change(self, seconds: dict[str, list[float]], action: str, state: str, name: str) -> None:
        with _timed(seconds[name]):
            with _timed(seconds[action]):
                self._stack.api.post(f"/v1/runs/{self._run}/{action}").raise_for_status()
            ends = time.monotonic() + ACKNOWLEDGED_S
            while (found := self._stack.view(self._run)["state"]) != state:
                if time.monotonic() > ends:
                    raise TimeoutError(f"{action}: the run is {found} after {ACKNOWLEDGED_S:g} s, not {state}")
                time.sleep(LOOK_S)


@contextmanager
def _timed(into: list[float]) -> Iterator[None]:
    started = time.monotonic()
    yield
    into.append(time.monotonic() - started)


def measure(stack: Stack, recipe: dict[str, Any], seconds: float) -> tuple[Findings, Killer]:
    """Train two runs, let the second one fail, and wait for the first one's success. `recipe`: of the first one."""
    endless = recipe | {"limits": recipe["limits"] | {"rollout_steps": ENDLESS}}
    stack.submit(recipe, HEALTHY)
    stack.submit(endless, DOOMED)
    for run in (HEALTHY, DOOMED):
        stack.until(run, lambda view: (view["policy_version"] or 0) >= 1, "the first policy version", TRAINING_S)
    path = ControlPath(stack, HEALTHY, [DOOMED])
    ends = time.monotonic() + seconds
    path.ask("before", lambda: time.monotonic() < ends)
    killer = Killer(stack, DOOMED)
    path.ask("failing", killer.is_alive)
    ends = time.monotonic() + seconds
    path.ask("after", lambda: time.monotonic() < ends)
    stack.until(HEALTHY, lambda view: bool(view["state"] == "succeeded"), "success", SUCCESS_S)
    return path.findings, killer


def main() -> int:
    """Measure on a stack of its own, and print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.api.two_runs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="before the failure, and after it")
    parser.add_argument("--steps", type=int, default=150, help="rollout steps of the run that is asked")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, questions = write_tiny_model(folder / "model", scale=0.2), write_questions(folder / "questions.jsonl")
        environment = {"PENSTOCK_ROOTS": name}
        with Stack(folder / "runs", environment=environment) as stack:
            findings, killer = measure(stack, document(model, questions, options.steps), options.seconds)
            reason = stack.view(DOOMED)["reason"]
    print(f"the other run {killer.state} after {len(killer.killed)} kills: {reason}")
    for line in findings.table():
        print(line)
    print(f"waits beyond their deadline: {findings.late or 'none'}; events of the other: {findings.foreign or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
