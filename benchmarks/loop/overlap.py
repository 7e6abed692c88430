"""Owns `penstock bench overlap`: what it brings that generation runs ahead of learning, by limits.max_staleness.

Must not tune, nor compare with other systems.

For each repeat, the demo's recipe is trained once with each staleness bound 0, 1, 2 and 4, with the repeat's number as
its seed and in an order that turns from repeat to repeat. Each run has a stack of its own on two cores, where engine
and learner have one thread each (rollout.max_threads is off). Only the bound differs; limits.max_inflight_groups is
too large to limit a run.

A rollout step takes the time between the ends of two successive steps' optimizer steps. Left out are the first two
steps of a run, in which the pipeline fills, those that begin before the evaluation of the initial policy has ended,
which shares the engine, and the last step, beside which nothing is generated any more.

The bound: with staleness 0 a step is one stage after the other. Its stages are generation (from the first start to the
last end of its batch's responses), learning (of its optimizer steps) and publishing (until the fleet has the new
version). Stages that overlap perfectly take as long as the largest of them. So a run is at most 1 / (that stage's
share) times as fast as with staleness 0: that is the bound, taken from the run with staleness 0 of the same repeat. The
share of the bound is the speed-up over that run, divided by the bound. The speed-up is that of the learner's input
tokens per second (a group's prompt counts once), not of steps: where a policy learns more slowly, its responses stay
longer.

The learner idles while it waits for a batch, the fleet while its engine, of one thread, does not use the processor.
Stale tokens are the response tokens of groups that were dropped because they exceeded the bound, of all that were
generated for training. Held-out accuracy is avg@k after the last step, when runs have trained different numbers of
tokens, which are printed as a ratio. Accuracy at equal tokens is that of the responses to the training prompts, before
filtering, on a straight line between two steps, where a run has trained as many response tokens as the one of its
repeat with the fewest.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.loop.measured_run import (
    DEMO,
    ROOT,
    MeasuredRun,
    MeasuredStep,
    add_run_options,
    changed,
    measure,
)
from benchmarks.report.figures import Figure, Target, ratio
from benchmarks.report.picture import Panel, Series
from benchmarks.report.report import Report, options
from deploy.cli.recipe_files import load_with_files
from learner.archive import RunArchive
from services.contracts import Batch

NAME = "overlap"
BOUNDS = (0, 1, 2, 4)
"""Values of limits.max_staleness; the first one is what the others are compared with."""
INPUTS = "input_tokens"
LEAD, TAIL = 2, 1
"""The steps at the start and at the end of a run that are not measured."""
JUDGED_AT, LEAST_SHARE, MOST_STALE = 2, 0.9, 0.01
"""The bound whose share of the overlap bound has a target, and the targets."""


@dataclass(frozen=True)
class Stages:
    """Mean seconds of a rollout step, and of its stages."""

    step: float
    generation: float
    learning: float
    publishing: float

    @classmethod
    def of(cls, run: MeasuredRun) -> Stages:
        """Those of the measured steps of a run. Raises ValueError without any."""
        inner = measured(run)
        return cls(
            step=step_seconds(run),
            generation=fmean(step.generation_finished - step.generation_started for step in inner),
            learning=fmean(step.learning_finished - step.learning_started for step in inner),
            publishing=fmean(step.publish_s for step in inner),
        )

    @property
    def bound(self) -> float:
        """The largest speed-up by overlap: 1 / (the largest stage's share of the step)."""
        return self.step / max(self.generation, self.learning, self.publishing)


def _first(run: MeasuredRun) -> int:
    """The index of the first measured step: it begins after LEAD steps, and after the evaluation before training."""
    beside = sum(step.learning_finished < run.evaluated_before for step in run.steps)
    return max(LEAD, beside + 1)


def measured(run: MeasuredRun) -> Sequence[MeasuredStep]:
    """The steps that are measured. Raises ValueError if there is none."""
    inner = run.steps[_first(run) : len(run.steps) - TAIL]
    if not inner:
        raise ValueError(
            f"{len(run.steps)} rollout steps are too few: the first {_first(run)} and the last {TAIL} are not measured"
        )
    return inner


def span(run: MeasuredRun) -> tuple[float, float]:
    """When the measured steps begin and end, Unix seconds."""
    return run.steps[_first(run) - 1].learning_finished, measured(run)[-1].learning_finished


def step_seconds(run: MeasuredRun) -> float:
    """Mean seconds of a measured step."""
    begins, ends = span(run)
    return (ends - begins) / len(measured(run))


def token_seconds(run: MeasuredRun) -> float:
    """Mean seconds of a measured input token of the learner; of a run `with_inputs`."""
    begins, ends = span(run)
    return (ends - begins) / sum(step.metrics[INPUTS] for step in measured(run))


def with_inputs(run: MeasuredRun, archive: RunArchive) -> MeasuredRun:
    """The run with the learner's input tokens among the metrics of each step, from its archived batches."""
    writers = archive.trained()
    inputs = {step: input_tokens(archive.batch(step, writer)) for step, writer in writers.items()}
    steps = [replace(step, metrics={**step.metrics, INPUTS: inputs[step.step]}) for step in run.steps]
    return replace(run, steps=tuple(steps))


def input_tokens(batch: Batch) -> int:
    """What the learner's rows hold: each group's prompt once, its responses without their last token."""
    return sum(group.prompt_tokens + sum(sample.tokens - 1 for sample in group.samples) for group in batch.groups)


def stale_share(tokens: Mapping[str, int]) -> float:
    """The share of stale tokens among those generated for training; `tokens`: by use, as in the ledger."""
    generated = tokens["generated"] - tokens.get("evaluated", 0)
    return tokens.get("stale", 0) / generated if generated else 0.0


def learner_idle(run: MeasuredRun) -> float:
    """The share of the measured time in which the learner waited for a batch."""
    begins, ends = span(run)
    return sum(step.metrics["batch_wait_seconds"] for step in measured(run)) / (ends - begins)


def fleet_idle(run: MeasuredRun) -> float:
    """The share of the measured time in which the only engine, of one thread, did not use the processor."""
    begins, ends = span(run)
    return max(0.0, 1.0 - run.cpu.between(begins, ends).get("engine", 0.0) / (ends - begins))


def document(recipe: Mapping[str, Any], bound: int, seed: int, steps: int) -> dict[str, Any]:
    """A recipe as one run has it: no other bound limits its groups in flight, and it saves no checkpoint.

    Nor does the engine take the learner's core while that waits, or stages that overlap would be slower ones.
    """
    limits = {"rollout_steps": steps, "max_staleness": bound, "max_inflight_groups": 256}
    own = {"learner": {"checkpoint_every": 0}, "rollout": {"max_threads": None}}
    return changed(recipe, name=f"overlap-{bound}-{seed}", seed=seed, limits=limits, **own)


def order(repeat: int) -> tuple[int, ...]:
    """The bounds in the order of a repeat: each is first in one of four."""
    start = repeat % len(BOUNDS)
    return BOUNDS[start:] + BOUNDS[:start]


Repeat = Mapping[int, MeasuredRun]
"""The runs of one repeat, by bound."""


def figures(repeats: Sequence[Repeat]) -> list[Figure]:
    """Every figure, by bound."""
    base = [Stages.of(repeat[BOUNDS[0]]) for repeat in repeats]
    found = [
        Figure("bound of the speed-up by overlap", tuple(stages.bound for stages in base)),
        *(
            Figure(f"{stage} at staleness 0", tuple(getattr(stages, stage) for stages in base), "s a step")
            for stage in ("generation", "learning", "publishing")
        ),
    ]
    for bound in BOUNDS:
        found += _of_bound(bound, repeats, base)
    return found


def _of_bound(bound: int, repeats: Sequence[Repeat], base: Sequence[Stages]) -> list[Figure]:
    runs = [repeat[bound] for repeat in repeats]
    first = [repeat[BOUNDS[0]] for repeat in repeats]
    seconds = [step_seconds(run) for run in runs]
    at = f"at staleness {bound}"
    found = [Figure(f"time per step {at}", tuple(seconds), "s")]
    if bound:
        gains = [token_seconds(slow) / token_seconds(fast) for slow, fast in zip(first, runs, strict=True)]
        target = Target(least=LEAST_SHARE) if bound == JUDGED_AT else None
        found += [
            Figure(f"speed-up {at}, tokens/s", tuple(gains)),
            ratio(f"share of the bound {at}", gains, [stages.bound for stages in base], target),
        ]
    equal = tuple(accuracy_at(run, fewest(repeat)) for run, repeat in zip(runs, repeats, strict=True))
    trained, unlike = ([run.tokens["trained"] for run in of] for of in (runs, first))
    stale = tuple(stale_share(run.tokens) for run in runs)
    return [
        *found,
        Figure(f"idle share of the learner {at}", tuple(learner_idle(run) for run in runs)),
        Figure(f"idle share of the fleet {at}", tuple(fleet_idle(run) for run in runs)),
        Figure(f"stale tokens {at}", stale, target=Target(most=MOST_STALE) if bound else None),
        *([ratio(f"trained tokens {at} / at staleness 0", trained, unlike)] if bound else []),
        Figure(f"held-out accuracy {at}", tuple(run.evaluation("after").accuracy for run in runs)),
        Figure(f"accuracy at equal tokens {at}", equal),
    ]


def fewest(repeat: Repeat) -> float:
    """The fewest response tokens that a run of the repeat has trained."""
    return min(trained_tokens(run)[-1] for run in repeat.values())


def trained_tokens(run: MeasuredRun) -> list[float]:
    """The response tokens that were trained until each step's end."""
    return list(accumulate(step.metrics["trained_tokens"] for step in run.steps))


def accuracy_at(run: MeasuredRun, tokens: float) -> float:
    """The accuracy on the training prompts after so many trained response tokens."""
    return float(np.interp(tokens, trained_tokens(run), [step.metrics["accuracy"] for step in run.steps]))


def panels(repeats: Sequence[Repeat]) -> list[Panel]:
    """Time per step, idle shares and accuracy over the bound, a line per repeat."""
    x = tuple(map(float, BOUNDS))

    def lines(of: Any, label: str = "repeat") -> list[Series]:
        return [
            Series(f"{label} {number}", x, tuple(of(repeat[bound]) for bound in BOUNDS))
            for number, repeat in enumerate(repeats)
        ]

    idle = [
        *lines(learner_idle, "learner, repeat"),
        *lines(fleet_idle, "fleet, repeat"),
    ]
    return [
        Panel("time per step", "max_staleness", "s", tuple(lines(step_seconds))),
        Panel("idle shares", "max_staleness", "share", tuple(idle)),
        Panel(
            "held-out accuracy", "max_staleness", "avg@k", tuple(lines(lambda run: run.evaluation("after").accuracy))
        ),
    ]


def main(arguments: Sequence[str]) -> int:
    """Measure and report; exit status 1 if a target was missed."""
    parser = add_run_options(options(NAME, __doc__))
    parser.add_argument("--recipe", type=Path, default=ROOT / DEMO, help="another recipe than the demo's")
    given = parser.parse_args(arguments)
    if given.steps < LEAD + TAIL + 1:
        parser.error(f"--steps: {given.steps} is not valid: expected at least {LEAD + TAIL + 1}")
    with tempfile.TemporaryDirectory(prefix="penstock-overlap-") as folder:
        repeats = [_repeat(number, given, Path(folder)) for number in range(given.repeats)]
    details = {"runs": [{bound: repeat[bound].summary() for bound in BOUNDS} for repeat in repeats]}
    counts = sorted({len(measured(run)) for repeat in repeats for run in repeat.values()})
    notes = [f"Of the {given.steps} rollout steps of a run, {' or '.join(map(str, counts))} are timed."]
    return Report(NAME, figures(repeats), panels(repeats), details, notes).finish(given.out)


def _repeat(number: int, given: argparse.Namespace, folder: Path) -> Repeat:
    recipe, files = load_with_files(given.recipe)
    runs: dict[int, MeasuredRun] = {}
    for bound in order(number):
        made = document(recipe.model_dump(mode="json"), bound, given.first_seed + number, given.steps)
        run = measure(made, folder, cores=given.cores, files=files, deadline_s=given.deadline)
        run = with_inputs(run, RunArchive(run.folder))
        seconds, accuracy = step_seconds(run), run.evaluation("after").accuracy
        print(f"repeat {number}, staleness {bound}: {seconds:.2f} s a step, accuracy {accuracy:.3f}", flush=True)
        runs[bound] = run
    return runs
