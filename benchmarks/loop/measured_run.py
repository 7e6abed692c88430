"""Owns a measured run: `penstock up` with its embedded Redis, one recipe from submission to its end, its CPU time.

Must not judge, nor know what is compared. The stack is ended in every case.

The stack runs in a session of its own on a free port, and all its processes on the given cores. This process only asks
the API once a second, and reads /proc as often; what that costs is in no figure, but it shares the cores if the machine
has no others.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.loop.cpu_seconds import CpuMeter, CpuSeries, Roles
from benchmarks.report.report import positive
from deploy.cli.common import open_api
from penstock_client.client import Client
from penstock_client.errors import ApiError, NotThePlatformError
from penstock_client.models import Evaluation, LedgerOfRun, RolloutStep, Run
from penstock_client.transport import is_passing
from services.contracts import BEFORE
from tests.harness.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
DEMO = Path("deploy") / "recipes" / "smollm2-chain-sum.yaml"
CORES = 2
DEADLINE_S = 1800.0
LOOK_S = 1.0
MISSED_LOOKS = 30
ROLES = (
    (re.compile(r"valkey-server"), "redis"),
    (re.compile(r"ray::Gateway"), "gateway"),
    (re.compile(r"VLLM::"), "engine"),
    (re.compile(r"/ray/|deploy\.local\.head"), "ray"),
    (re.compile(r"penstock up"), "stack"),
)
"""What is found in the command line of a process, and its role. The API tells the roles of a run's own processes."""


class MeasuredRunError(RuntimeError):
    """The run failed, was cancelled, or did not end in time; the text says why."""


@dataclass(frozen=True)
class MeasuredStep:
    """One rollout step. Times in Unix seconds: of its groups' generation, and of its optimizer steps.

    `publish_s`: the seconds until the fleet held the new version, which begin after the last optimizer step.
    """

    step: int
    generation_started: float
    generation_finished: float
    learning_started: float
    learning_finished: float
    publish_s: float
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, record: RolloutStep) -> MeasuredStep:
        """What the API says of a step."""
        extra: dict[str, Any] = record.model_extra or {}
        return cls(
            record.step,
            extra["generation_started_at"],
            extra["generation_finished_at"],
            extra["learning_started_at"],
            record.learning_finished_at,
            record.metrics["publish_seconds"],
            record.metrics,
        )


@dataclass(frozen=True)
class MeasuredRun:
    """A run that has succeeded. Moments in Unix seconds: when the stack was started, ready, the run submitted, ended.

    `cpu`: of all processes of the stack, by role. `folder`: the run's, with its archive and its export. `ledger`: None
    from an older release, whose API has none.
    """

    run: str
    folder: Path
    started: float
    ready: float
    submitted: float
    ended: float
    view: Run
    steps: tuple[MeasuredStep, ...]
    ledger: LedgerOfRun | None
    cpu: CpuSeries

    @property
    def first_dispatch(self) -> float:
        """When the first response of the first batch began. Raises IndexError for a run without rollout steps."""
        return self.steps[0].generation_started

    @property
    def last_update(self) -> float:
        """When the last optimizer step was done. Raises IndexError for a run without rollout steps."""
        return self.steps[-1].learning_finished

    @property
    def evaluated_before(self) -> float:
        """When the evaluation of the initial policy, beside the first steps, ended. Raises ValueError without one."""
        return max(float((found.model_extra or {})["at"]) for found in self.view.evaluations if found.name == BEFORE)

    @property
    def tokens(self) -> Mapping[str, int]:
        """The tokens that were generated, by use. Raises MeasuredRunError if the API does not say."""
        if self.ledger is None:
            raise MeasuredRunError(f"{self.run}: this release has no ledger of tokens")
        return self.ledger.tokens

    def cpu_s(self, start: float, end: float) -> float:
        """The CPU seconds of the whole stack between two moments."""
        return sum(self.cpu.between(start, end).values())

    def evaluation(self, name: str, held_out: str = "held-out") -> Evaluation:
        """The scores of a set, by the name of the evaluation: `before`, `step-N`, `after`. Raises KeyError."""
        for found in self.view.evaluations:
            if (found.name, found.set) == (name, held_out):
                return found
        raise KeyError(f"run {self.run} has no evaluation {name!r} of {held_out!r}")

    def summary(self) -> dict[str, Any]:
        """What a report's JSON keeps: moments since the start, steps, evaluations, tokens, CPU seconds by phase."""
        moments = {"ready": self.ready, "submitted": self.submitted, "ended": self.ended}
        phases = {"start": (self.started, self.submitted), "whole": (self.started, self.ended)}
        if self.steps:
            moments |= {"first dispatch": self.first_dispatch, "last update": self.last_update}
            phases["preparation"] = (self.submitted, self.first_dispatch)
            phases["steps"] = (self.first_dispatch, self.last_update)
            phases["end"] = (self.last_update, self.ended)
        return {
            "run": self.run,
            "seconds": {name: round(at - self.started, 3) for name, at in moments.items()},
            "cpu seconds": {name: _rounded(self.cpu.between(*phase)) for name, phase in phases.items()},
            "evaluations": [found.model_dump(mode="json") for found in self.view.evaluations],
            "tokens": self.tokens if self.ledger else {},
            "steps": [
                {
                    "step": step.step,
                    "generation": [round(at - self.started, 3) for at in _generation(step)],
                    "learning": [round(at - self.started, 3) for at in _learning(step)],
                    "publishing": round(step.publish_s, 3),
                    "metrics": dict(step.metrics),
                }
                for step in self.steps
            ],
        }


def _generation(step: MeasuredStep) -> tuple[float, float]:
    return step.generation_started, step.generation_finished


def _learning(step: MeasuredStep) -> tuple[float, float]:
    return step.learning_started, step.learning_finished


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {role: round(value, 2) for role, value in sorted(seconds.items()) if value >= 0.005}


def demo_document(checkout: Path = ROOT, **sections: Mapping[str, Any] | Any) -> dict[str, Any]:
    """The demo's recipe of a checkout, as it is submitted. `sections`: values that replace or add to its own."""
    return changed(yaml.safe_load((checkout / DEMO).read_text()), **sections)


def changed(document: Mapping[str, Any], **sections: Mapping[str, Any] | Any) -> dict[str, Any]:
    """A recipe's document with other values; those of a section replace or add to its own."""
    made = dict(document)
    for name, values in sections.items():
        made[name] = made.get(name, {}) | dict(values) if isinstance(values, Mapping) else values
    return made


def measure(
    document: Mapping[str, Any],
    folder: Path,
    *,
    cores: Sequence[int] | None = None,
    checkout: Path = ROOT,
    files: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> MeasuredRun:
    """Start a stack, submit a recipe, follow the run to its end, and stop the stack.

    `folder`: for runs, models and logs; what an earlier stack prepared there is used again. `cores`: where all
    processes run; default: the first CORES of this process's. `checkout`: whose code runs. `files`: the texts of the
    files beside the recipe, by name. `environment`: more variables of the stack. `deadline_s`: for the run, from its
    submission on. Call it from the main thread. Raises MeasuredRunError, StackDownError, ApiError.
    """
    started = time.time()
    with pinned(first_cores() if cores is None else cores):
        stack = Stack(folder.absolute(), environment=environment, checkout=checkout)
    with CpuMeter(stack.process.pid, Roles(role_of)) as meter, stack:
        ready = time.time()
        with open_api(f"http://127.0.0.1:{stack.port}") as client:
            submitted = time.time()
            run = client.submit(document, files=files).id

            def look(view: Run) -> None:
                stack.check()
                meter.name({process.pid: process.service for process in view.processes})

            view, records = _follow(client, run, look, time.monotonic() + deadline_s)
            ended = time.time()
            ledger = _ledger(client, run)
    steps = tuple(MeasuredStep.of(record) for record in records)
    return MeasuredRun(
        run, folder.absolute() / run, started, ready, submitted, ended, view, steps, ledger, meter.series
    )


def _ledger(client: Client, run: str) -> LedgerOfRun | None:
    try:
        return client.ledger(run)
    except NotThePlatformError:  # it has no such route
        return None


def _follow(client: Client, run: str, look: Callable[[Run], None], ends: float) -> tuple[Run, list[RolloutStep]]:
    """The last view of the run and all its steps, once it has succeeded. Raises MeasuredRunError, ApiError."""
    steps: list[RolloutStep] = []
    missed, state = 0, "not visible"
    while True:
        try:
            view = client.show(run)
            state = f"{view.state}: {view.reason}" if view.reason else view.state
            steps += client.steps(run, steps[-1].id if steps else "0-0")
            missed = 0
        except ApiError as error:
            missed += 1
            if missed > MISSED_LOOKS or not is_passing(error):
                raise
        else:
            look(view)
            if view.state == "succeeded":
                return view, steps
            if view.ended:
                raise MeasuredRunError(f"{run} {view.state}: {view.reason}")
        if time.monotonic() > ends:
            raise MeasuredRunError(f"{run} did not end in time: it has {len(steps)} rollout steps, and is {state}")
        time.sleep(LOOK_S)


def role_of(command: str) -> str:
    """The role of a process of the stack, from its command line; "" if that does not tell."""
    return next((role for pattern, role in ROLES if pattern.search(command)), "")


def first_cores(count: int = CORES) -> tuple[int, ...]:
    """The first cores on which this process may run. Raises ValueError if it has fewer."""
    own = sorted(os.sched_getaffinity(0))
    if len(own) < count:
        raise ValueError(f"cores: this process may use {len(own)}: expected at least {count}")
    return tuple(own[:count])


def core_list(text: str) -> tuple[int, ...]:
    """Cores by number, such as `0,1`, for argparse."""
    own = os.sched_getaffinity(0)
    numbers = {int(part) for part in text.split(",") if part.isdecimal()}
    if not numbers or not numbers <= own or len(numbers) != text.count(",") + 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: expected numbers of {sorted(own)}, such as 0,1")
    return tuple(sorted(numbers))


def add_run_options(parser: argparse.ArgumentParser, steps: int = 12) -> argparse.ArgumentParser:
    """Add the options that benchmarks of whole runs share; returns the parser."""
    parser.add_argument("--steps", type=positive, default=steps, help=f"rollout steps of a run ({steps})")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first repeat (0)")
    parser.add_argument("--cores", type=core_list, help="where all processes run, such as 0,1 (the first two)")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help=f"seconds of a run ({DEADLINE_S:g})")
    return parser


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """This thread, and what it starts, runs on these cores for the body; what was started stays there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
