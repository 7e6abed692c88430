"""Owns `penstock bench start-up`: from `penstock up` to the first token and the first optimizer step, by phase.

Must not tune, nor compare with other systems.

For each repeat, `penstock up` is started twice in a session and a temporary folder of its own, on two cores. The first
time the folder is empty, so that the packaged model has to be prepared (de-quantised): "empty folder". The second time
it is there: "model there". Each time one recipe is submitted as soon as the API is ready: the demo's, with one rollout
step of one optimizer step, one held-out prompt with one sample (the least that a recipe allows), and no checkpoint;
`--recipe` takes another file as it is. When the record of the first rollout step is there, the stack is stopped.

The moments are what the API says: of the run's events (services asked for, model prepared, sampler and learner ready,
engine up), of its states (running: a replica holds the first version), and of the record of the first step (first
response: the first start of a response of the first batch; first update: the end of its optimizer steps). The services
start side by side, so their phases overlap, and the shortest way to the first response is not their sum.

The engine's share is the time from the request for services until the engine is up, of the time from `penstock up`
until the first response. The parts of the engine's start are those that its event states. CPU-seconds are those of all
processes of the stack until the first response, by role; what asks the API (twice a second) and reads /proc is not
among them, but shares the cores if the machine has no others.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.loop.cpu_seconds import CpuMeter, Roles
from benchmarks.loop.measured_run import ROOT, MeasuredRunError, core_list, demo_document, first_cores, pinned, role_of
from benchmarks.loop.start_up.moments import ORDER, RESPONSE, engine_parts, engine_share, moments_of, phases
from benchmarks.report.figures import Figure
from benchmarks.report.picture import Panel, Series
from benchmarks.report.report import Report, options
from deploy.cli.common import open_api
from penstock_client.client import Client
from penstock_client.errors import ApiError
from penstock_client.models import RolloutStep, Run
from penstock_client.transport import is_passing
from tests.harness.stack import Stack

NAME = "start-up"
EMPTY, THERE = "empty folder", "model there"
DEADLINE_S = 600.0
LOOK_S = 0.5
RAY_NAMES = {
    "ray::prepare": "preparation",
    "ray::check_fit": "preparation",
    "ray::RoleActor": "sampler and learner",
    "multiprocessing.forkserver": "rollout",
    "multiprocessing.spawn": "rollout",
}
"""What is in the command line of a process, and its role: those that `role_of` does not know apart."""


def part_of(command: str) -> str:
    """The role of a process of the stack, from its command line; Ray names those of its actors and tasks."""
    return next((role for text, role in RAY_NAMES.items() if text in command), "") or role_of(command)


@dataclass(frozen=True)
class Start:
    """One start: its moments (seconds since `penstock up`), the engine's parts (s), CPU seconds by role."""

    moments: Mapping[str, float]
    engine: Mapping[str, float]
    cpu: Mapping[str, float]


def document(checkout: Path, seed: int) -> dict[str, Any]:
    """The demo's recipe, as small as it can be."""
    return demo_document(
        checkout,
        name=f"start-up-{seed}",
        seed=seed,
        limits={"rollout_steps": 1},
        learner={"mini_batch_groups": 8, "checkpoint_every": 0},
        data={"held_out": 1},
        evaluation={"samples": 1},
    )


def measure(recipe: Mapping[str, Any], folder: Path, cores: Sequence[int], checkout: Path) -> Start:
    """Start a stack, and a run in it until its first step is committed. Raises MeasuredRunError, StackDownError."""
    started = time.time()
    with pinned(cores):
        stack = Stack(folder.absolute(), checkout=checkout)
    with CpuMeter(stack.process.pid, Roles(part_of)) as meter, stack:
        ready = time.time()
        with open_api(f"http://127.0.0.1:{stack.port}") as client:
            submitted = time.time()
            run = client.submit(recipe).id
            view, first = _first_step(client, run, stack)
        meter.look()
        stack.cancel_all()
    moments = moments_of(started, ready, submitted, view, first)
    return Start(moments, engine_parts(view.events), meter.series.until(started + moments[RESPONSE]))


def _first_step(client: Client, run: str, stack: Stack) -> tuple[Run, RolloutStep]:
    """The run and its first rollout step, once there is one."""
    ends = time.monotonic() + DEADLINE_S
    while True:
        stack.check()
        try:
            steps, view = client.steps(run), client.show(run)
        except ApiError as error:
            if not is_passing(error):
                raise
        else:
            if steps:
                return view, steps[0]
            if view.ended:
                raise MeasuredRunError(f"{run} {view.state}: {view.reason}")
        if time.monotonic() > ends:
            raise MeasuredRunError(f"{run} has no rollout step after {DEADLINE_S:g} s")
        time.sleep(LOOK_S)


Starts = Mapping[str, Sequence[Start]]
"""The starts by case, one per repeat."""


def figures(starts: Starts) -> list[Figure]:
    """Every figure, by case."""
    found = []
    for case, of in starts.items():
        shown = [phases(start.moments) for start in of]
        found += [Figure(f"{case}: {name}", tuple(each[name] for each in shown), "s") for name in shown[0]]
        found += [
            Figure(f"{case}: engine, {part}", tuple(start.engine.get(part, 0.0) for start in of), "s")
            for part in of[0].engine
        ]
        shares = tuple(engine_share(start.moments) for start in of)
        found.append(Figure(f"{case}: the engine's share of the way to the first response", shares))
        until = f"{case}: CPU until the first response"
        roles = sorted({role for start in of for role in start.cpu})
        found += [Figure(f"{until}, {role}", tuple(start.cpu.get(role, 0.0) for start in of), "s") for role in roles]
        found.append(Figure(until, tuple(sum(start.cpu.values()) for start in of), "s"))
    return found


def panels(starts: Starts) -> list[Panel]:
    """The moments of each start in their order, and the CPU seconds by role."""
    places = tuple(map(float, range(len(ORDER))))
    named = ", ".join(f"{number} {name}" for number, name in enumerate(ORDER))
    found = []
    for case, of in starts.items():
        lines = [
            Series(f"repeat {number}", tuple(start.moments[name] for name in ORDER), places)
            for number, start in enumerate(of)
        ]
        found.append(Panel(case, "s since `penstock up`", _wrapped(named), tuple(lines)))
    return found


def _wrapped(text: str) -> str:
    parts = text.split(", ")
    return ",\n".join(", ".join(parts[at : at + 3]) for at in range(0, len(parts), 3))


def main(arguments: Sequence[str]) -> int:
    """Measure and report."""
    parser = options(NAME, __doc__)
    parser.add_argument("--recipe", type=Path, help="a recipe file instead of the demo's")
    parser.add_argument("--cores", type=core_list, help="where all processes run, such as 0,1 (the first two)")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the checkout whose code is started (this one)")
    given = parser.parse_args(arguments)
    checkout = given.checkout.resolve()
    starts: dict[str, list[Start]] = {EMPTY: [], THERE: []}
    for repeat in range(given.repeats):
        recipe = yaml.safe_load(given.recipe.read_text()) if given.recipe else document(checkout, repeat)
        with tempfile.TemporaryDirectory(prefix="penstock-start-up-") as folder:
            for case, of in starts.items():
                of.append(measure(recipe, Path(folder), given.cores or first_cores(), checkout))
                first, total = of[-1].moments[RESPONSE], sum(of[-1].cpu.values())
                print(f"repeat {repeat}, {case}: first response after {first:.1f} s, {total:.1f} CPU s", flush=True)
    details = {case: [asdict(each) for each in of] for case, of in starts.items()}
    notes = [f"Code of {checkout.name}."] if checkout != ROOT else []
    return Report(NAME, figures(starts), panels(starts), details, notes).finish(given.out)
