"""Owns `penstock bench demo`: how long the demo takes, what it costs, and what the model learns, over several seeds.

Must not change the demo's recipe, except for its seed and, on request, its number of steps.

Each repeat starts `penstock up` in a new folder, so that the packaged model is prepared as it is for a first-time user,
submits the demo's recipe with the repeat's number as its seed, and follows the run to its end. All processes run on two
cores. The parts of a run, on the wall clock:

    up         from the start of `penstock up` until its API is ready
    prepare    from the submission until the first response begins: the model, engine and learner
    steps      from there until the last optimizer step is done
    end        from there until the run has ended: publishing, the last evaluation, the export
    whole      from the start of `penstock up` until the run has ended; the stop of the stack is not counted

CPU-seconds are those of all processes of the stack, Ray and Redis among them, and during the steps also those of the
parts that use most. What the learner waits for a publication is the step metric `commit_wait_seconds`: its weights
change again only once the fleet holds the last version and that is recorded; a checkpoint waits for it, too. The gain
is avg@4 on the held-out questions after training, less that before it.

With --before CHECKOUT another checkout of the project runs in turn with this one, with the same seed, with its own
recipe, in its own environment (CHECKOUT/.venv) if it has one, and else in this one's. Which of the two is first turns
from repeat to repeat. The ratios after / before compare the two runs of one repeat, so that a machine that becomes
slower with time changes both.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.loop.measured_run import ROOT, MeasuredRun, add_run_options, demo_document, measure
from benchmarks.report.figures import Figure, Target, ratio
from benchmarks.report.picture import Panel, Series
from benchmarks.report.report import Report, options

NAME = "demo"
SEEDS, STEPS = 5, 12
STEPS_S, WHOLE_S = 270.0, 420.0
"""The targets for STEPS rollout steps and for the whole demo, on the reference machine."""
WAIT_S = 0.5
"""The target for what the learner waits for a publication per step, on average."""
REFERENCE = (
    f"The targets of {STEPS_S:g} s and {WHOLE_S:g} s belong to the reference machine, two cores with AVX2 and no newer "
    "vector instructions, and to 12 steps; elsewhere they say little."
)
SECONDS: Mapping[str, Callable[[MeasuredRun], float]] = {
    "up": lambda run: run.ready - run.started,
    "prepare": lambda run: run.first_dispatch - run.submitted,
    "steps": lambda run: run.last_update - run.first_dispatch,
    "end": lambda run: run.ended - run.last_update,
    "whole": lambda run: run.ended - run.started,
}
"""The parts of a run, in seconds."""
CPU_SECONDS: Mapping[str, Callable[[MeasuredRun], float]] = {
    "steps": lambda run: run.cpu_s(run.first_dispatch, run.last_update),
    "whole": lambda run: run.cpu_s(run.started, run.ended),
}
"""The CPU-seconds of parts."""
ROLES = ("learner", "engine", "ray", "controller", "rollout", "sampler", "verifier", "redis")
"""The processes whose CPU-seconds during the steps are shown, by role."""
WAIT = "commit_wait_seconds"


def gain(run: MeasuredRun) -> float:
    """By how much the held-out accuracy rose."""
    return run.evaluation("after").accuracy - run.evaluation("before").accuracy


def figures(runs: Sequence[MeasuredRun], before: Sequence[MeasuredRun], *, with_targets: bool) -> list[Figure]:
    """The figures of these runs, and, with runs of another checkout, the ratios to those."""
    targets = {"steps": Target(most=STEPS_S), "whole": Target(most=WHOLE_S)} if with_targets else {}
    found = [Figure(name, tuple(map(of, runs)), "s", targets.get(name)) for name, of in SECONDS.items()]
    found += [Figure(f"CPU, {name}", tuple(map(of, runs)), "CPU-s") for name, of in CPU_SECONDS.items()]
    spent = [run.cpu.between(run.first_dispatch, run.last_update) for run in runs]
    found += [Figure(f"CPU, steps: {role}", tuple(run.get(role, 0.0) for run in spent), "CPU-s") for role in ROLES]
    found += _waits(runs, Target(most=WAIT_S) if with_targets else None)
    found += _scores("", runs)
    if before:
        found += [
            ratio(f"{name}, after / before", list(map(of, runs)), list(map(of, before))) for name, of in SECONDS.items()
        ]
        found += [
            ratio(f"CPU, {name}, after / before", list(map(of, runs)), list(map(of, before)))
            for name, of in CPU_SECONDS.items()
        ]
        found += _scores(" (the other checkout)", before)
    return found


def _waits(runs: Sequence[MeasuredRun], target: Target | None) -> list[Figure]:
    waits = [[step.metrics[WAIT] for step in run.steps] for run in runs]
    return [
        Figure("the learner waits for a publication, mean of the steps", tuple(map(fmean, waits)), "s", target),
        Figure("the learner waits for a publication, longest", tuple(map(max, waits)), "s"),
    ]


def _scores(of: str, runs: Sequence[MeasuredRun]) -> list[Figure]:
    accuracies = [Figure(f"held-out accuracy {when}{of}", _accuracies(runs, when)) for when in ("before", "after")]
    return [*accuracies, Figure(f"gain{of}", tuple(map(gain, runs)))]


def _accuracies(runs: Sequence[MeasuredRun], when: str) -> tuple[float, ...]:
    return tuple(run.evaluation(when).accuracy for run in runs)


def spread(runs: Sequence[MeasuredRun]) -> str:
    """The mean gain and its standard deviation over the runs, in words."""
    gains = list(map(gain, runs))
    deviation = f", standard deviation {stdev(gains):.3f}" if len(gains) > 1 else ""
    return f"gain over {len(gains)} seed{'s' * (len(gains) > 1)}: mean {fmean(gains):+.3f}{deviation}"


def panels(runs: Sequence[MeasuredRun], before: Sequence[MeasuredRun]) -> list[Panel]:
    """When each step ended, and the accuracy on the training prompts, a line per run."""
    return [
        Panel("end of each step", "rollout step", "s since the first dispatch", tuple(_lines(runs, before, _ends))),
        Panel("accuracy before filtering", "rollout step", "share", tuple(_lines(runs, before, _accuracy))),
    ]


def _lines(
    runs: Sequence[MeasuredRun], before: Sequence[MeasuredRun], of: Callable[[MeasuredRun], tuple[float, ...]]
) -> list[Series]:
    kinds = (("", "o-", runs), ("before, ", "s--", before))
    return [
        Series(f"{what}repeat {number}", tuple(float(step.step) for step in run.steps), of(run), style)
        for what, style, found in kinds
        for number, run in enumerate(found)
    ]


def _ends(run: MeasuredRun) -> tuple[float, ...]:
    return tuple(step.learning_finished - run.first_dispatch for step in run.steps)


def _accuracy(run: MeasuredRun) -> tuple[float, ...]:
    return tuple(step.metrics.get("accuracy", float("nan")) for step in run.steps)


def main(arguments: Sequence[str]) -> int:
    """Measure and report; exit status 1 if a target was missed."""
    parser = add_run_options(options(NAME, __doc__, repeats=SEEDS), STEPS)
    parser.add_argument("--before", type=_checkout, metavar="CHECKOUT", help="another checkout, to compare with")
    given = parser.parse_args(arguments)
    checkouts = {"after": ROOT} | ({"before": given.before} if given.before else {})
    runs: dict[str, list[MeasuredRun]] = {name: [] for name in ("after", "before")}
    for repeat in range(given.repeats):
        for name in sorted(checkouts, reverse=bool(repeat % 2)):
            runs[name].append(_run(repeat, name, checkouts[name], given))
    after, before = runs["after"], runs["before"]
    details = {name: [run.summary() for run in found] for name, found in runs.items()}
    notes = [spread(after), *([f"before: {spread(before)}"] if before else []), REFERENCE]
    report = Report(
        NAME, figures(after, before, with_targets=given.steps == STEPS), panels(after, before), details, notes
    )
    return report.finish(given.out)


def _run(repeat: int, name: str, checkout: Path, given: argparse.Namespace) -> MeasuredRun:
    seed = given.first_seed + repeat
    document = demo_document(checkout, seed=seed, limits={"rollout_steps": given.steps})
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        run = measure(document, Path(folder), cores=given.cores, checkout=checkout, deadline_s=given.deadline)
    parts = ", ".join(f"{part} {of(run):.1f} s" for part, of in SECONDS.items())
    print(f"seed {seed}, {name}: {parts}, gain {gain(run):+.3f}", flush=True)
    return run


def _checkout(text: str) -> Path:
    found = Path(text).absolute()
    if not (found / "deploy" / "cli" / "main.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not valid: expected a checkout of the repository")
    return found
