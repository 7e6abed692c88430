"""Owns `penstock rescore`: the trained responses of a run judged again, by its own reward or another one.

Must not judge, nor change anything of the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from deploy.cli.common import DEFAULT_RUNS, RunsOption, reported_errors
from deploy.cli.judging.options import OutputOption, ProcessesOption, TimeoutOption
from deploy.cli.judging.progress import shown_count
from penstock_client.cli.commands.arguments import RunArgument
from penstock_client.cli.reporting import EXIT_INTERRUPTED, fail
from penstock_client.cli.terminal import plain, print_line

if TYPE_CHECKING:
    from deploy.cli.judging.local_judging import Asked
    from deploy.cli.judging.rescore.archived import TrainedSample, TrainedSamples
    from deploy.cli.judging.rescore.changes import Rejudged
    from deploy.cli.judging.rescore.other_reward import NewReward
    from services.contracts import Fence

MOST_EXAMPLES = 10
STEPS = re.compile(r"(\d{1,9})(?:-(\d{1,9})?)?")


RewardOption = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        metavar="REWARD",
        help="Judge by this reward, as a recipe writes it: a name of the run's recipe, or one with files of this "
        "folder. Default: the run's own, as this release judges.",
    ),
]
StepsOption = Annotated[
    str | None, typer.Option("--steps", metavar="A-B", help="Only these rollout steps; default: all archived ones.")
]


def rescore(
    run: RunArgument,
    verifier: RewardOption = None,
    runs: RunsOption = DEFAULT_RUNS,
    steps: StepsOption = None,
    processes: ProcessesOption = None,
    timeout: TimeoutOption = None,
    output: OutputOption = None,
) -> None:
    """Judge the trained responses of a run again, and print what changes per rollout step.

    Needs the run's folder, or its copy in PENSTOCK_STORE, its data and its model's tokenizer. With --output, every
    response whose verdict changed is a JSON line. Groups that were filtered out are not in the archive.
    """
    from deploy.cli.judging.local_judging import LocalJudgingError
    from deploy.cli.judging.rescore.archived import trained_samples
    from deploy.cli.judging.rescore.other_reward import new_reward
    from learner.archive import ArchiveError
    from learner.recovery.replay import ReplayError
    from services.sampler.data import DataError, ReferenceTrialError
    from services.storage.models import ModelUnavailableError

    os.environ["PENSTOCK_RUNS"] = str(runs.absolute())  # where models and inputs are found
    try:
        with reported_errors():
            wanted = _range(steps)
            trained = trained_samples(runs.absolute(), run)
            chosen = {step: fence for step, fence in trained.steps.items() if step in wanted}
            if not chosen:
                fail(f"--steps: {steps!r} is not valid: expected archived steps: {_listed(list(trained.steps))}")
            reward = new_reward(trained.facts.recipe, verifier, trained.archive)
            with _target(output) as target:
                work = _Rescoring(trained, chosen, reward, target)
                asyncio.run(work.run(timeout, processes))
            work.report()
    except (ArchiveError, ReplayError, DataError, ReferenceTrialError, LocalJudgingError) as error:
        fail(str(error))
    except (ModelUnavailableError, OSError, ValueError) as error:  # the tokenizer's, and those of files
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _range(steps: str | None) -> range:
    """The rollout steps that --steps names: `7`, `7-9` or `7-`."""
    if steps is None:
        return range(sys.maxsize)
    found = STEPS.fullmatch(steps)
    if not found:
        fail(f"--steps: {steps!r} is not valid: expected A-B, two rollout steps, or a single one")
    first, last = int(found[1]), found[2]
    open_end = sys.maxsize if "-" in steps else first + 1
    return range(first, int(last) + 1 if last else open_end)


def _listed(steps: Sequence[int]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "none"


def _target(output: Path | None) -> AbstractContextManager[TextIO | None]:
    return nullcontext() if output is None else _file(output)


@contextmanager
def _file(output: Path) -> Iterator[TextIO]:
    from learner.archive import atomic_file

    with atomic_file(output) as partial, partial.open("w") as target:
        yield target


class _Rescoring:
    """Judges the responses of some steps again, and prints what changed once all are judged."""

    def __init__(
        self, trained: TrainedSamples, steps: dict[int, Fence], reward: NewReward, target: TextIO | None
    ) -> None:
        from deploy.cli.judging.rescore.changes import VerdictComparison

        self._trained, self._steps, self._reward, self._target = trained, steps, reward, target
        self._comparison = VerdictComparison()
        self._examples: list[str] = []

    async def run(self, timeout: float | None, processes: int | None) -> None:
        """Judge all of them."""
        from deploy.cli.judging.local_judging import local_judges
        from deploy.cli.judging.rescore.changes import rejudged

        recipe, reward = self._trained.facts.recipe, self._reward
        timeout_s = timeout or recipe.verifier.timeout_s
        async with local_judges(reward.rewards, dict(reward.files), timeout_s=timeout_s, processes=processes) as here:
            for gap in here.gaps:
                print(f"penstock: warning: judged texts are not fully confined: {plain(gap)}", file=sys.stderr)
            with shown_count("judged", sys.stdout) as judged:
                async with aclosing(here.judge(self._asked())) as judging:
                    async for found in judging:
                        self._add(rejudged(recipe, found.of, found.finding))
                        judged()

    def _asked(self) -> Iterator[Asked[TrainedSample]]:
        from deploy.cli.judging.local_judging import Asked

        for step, fence in self._steps.items():
            for sample in self._trained.of_step(step, fence):
                yield Asked(sample, self._reward.text(sample.prompt, sample.text))

    def _add(self, found: Rejudged) -> None:
        self._comparison.add(found)
        if not found.changed:
            return
        if self._target is not None:
            print(json.dumps(found.document), file=self._target)
        if len(self._examples) < MOST_EXAMPLES:
            self._examples.append(found.line)

    def report(self) -> None:
        """Print what changed."""
        from deploy.cli.judging.rescore.changes import HEADING

        print_line(HEADING)
        for step, change in self._comparison.steps.items():
            print_line(change.line(str(step)))
        for line in self._comparison.summary():
            print_line(line)
        for line in self._examples:
            print_line(plain(line))
        if (more := self._comparison.total.changed - len(self._examples)) > 0:
            print_line(f"and {more} more; --output FILE writes all of them")
        for cause, count in self._trained.left_out.items():
            print_line(f"{count} trained samples were left out: {cause}")
        print_line("Covered: the samples of trained groups that are archived; filtered groups are in no archive.")
