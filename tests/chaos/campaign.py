"""Owns the long suite (`make chaos`): hundreds of faults over many runs, resumable, with a table of results.

Must not end a process that it did not start. `python -m tests.chaos.campaign --seed N --runs DIR`
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import disk, results
from tests.chaos.episode import Episode
from tests.chaos.faults import DISK, FAULTS, LOCAL, RANKS, STORE
from tests.chaos.ground import EMBEDDED, PROXY, SENTINELS, Ground, ground
from tests.harness.stack import Stack
from tests.harness.workload import recipe, write_model, write_questions

FAULTS_WANTED = 220
ENGINE_KILLS_WANTED = 20
HOURS = 4.0
RUNS_PER_STACK = 3
FAULTS_PER_RUN = 16
AT_ONCE = (2, 3, 1, 3)
"""How many faults overlap, one number per run in turn."""
STEPS = 60


@dataclass(frozen=True)
class Shape:
    """The setup of a run: its Redis, replicas and ranks, limits.max_staleness, and whether its files are in a store."""

    redis: str
    replicas: int
    ranks: int
    staleness: int
    store: bool = False

    @property
    def offers(self) -> frozenset[str]:
        """The needs of faults that a run of this shape satisfies."""
        files = {STORE} if self.store else {LOCAL, DISK}
        return frozenset({"", self.redis, *files, *([RANKS] if self.ranks > 1 else [])})


SHAPES = (
    Shape(EMBEDDED, 3, 1, 1),
    Shape(PROXY, 2, 2, 2),
    Shape(SENTINELS, 2, 1, 1),
    Shape(EMBEDDED, 2, 2, 1, store=True),
    Shape(PROXY, 2, 1, 0),
    Shape(SENTINELS, 1, 2, 0),
    Shape(EMBEDDED, 1, 1, 0),
    Shape(PROXY, 2, 1, 1, store=True),
)
"""One per stack in turn; a stack serves RUNS_PER_STACK runs of its shape."""
RARE = frozenset({SENTINELS, STORE, RANKS})
"""What few shapes offer: the faults that need it come first there, up to half of a run's."""


class BrokenRunError(RuntimeError):
    """A run could not be finished or judged; the results have the reason."""


class Campaign:
    """The faults that remain, and the folder of their results. `only`: inject no faults but those that begin so.

    `most`: inject each fault at most so often.
    """

    def __init__(self, folder: Path, seed: int, steps: int, only: Sequence[str] = (), most: int | None = None) -> None:
        self._only = only
        self._most = most
        self._folder = folder
        self._seed = seed
        self._steps = steps
        self._data = folder / "data"
        self._data.mkdir(parents=True, exist_ok=True)
        self._model = write_model(self._data / "model")
        self._questions = write_questions(self._data / "questions.jsonl")
        self._disk_refusal = disk.refusal()

    @property
    def disk_refusal(self) -> str | None:
        """Why a full disk cannot be tested here; None if it can."""
        return self._disk_refusal

    @property
    def wanted(self) -> Counter[str]:
        """How often each fault is injected on this machine."""
        return Counter(
            {
                name: fault.times if self._most is None else min(fault.times, self._most)
                for name, fault in FAULTS.items()
                if not (self._disk_refusal and fault.needs == DISK)
                and (not self._only or name.startswith(tuple(self._only)))
            }
        )

    def left(self) -> Counter[str]:
        """How often each fault remains to be injected on this machine."""
        return self.wanted - results.read(self._folder).counted

    def shortcomings(self, found: results.Results, faults: int, engine_kills: int) -> list[str]:
        """Why the campaign does not pass; empty if it does. No more is expected than it may inject."""
        kills = sum(times for name, times in self.wanted.items() if FAULTS[name].engine)
        expected = min(faults, self.wanted.total()), min(engine_kills, kills)
        return results.shortcomings(found, *expected, each=self.wanted)

    def open_to(self, shape: Shape) -> list[str]:
        """The remaining faults that a run of this shape can have, each as often as it remains."""
        return [name for name in self.left().elements() if FAULTS[name].needs in shape.offers]

    def deck(self, shape: Shape, number: int) -> list[str]:
        """The faults for run `number`, in order; the run gets as many of them as it has time for."""
        deck = self.open_to(shape)
        rng = random.Random(f"deck {self._seed} {number}")
        rng.shuffle(deck)
        rare = [at for at, name in enumerate(deck) if FAULTS[name].needs in RARE][: FAULTS_PER_RUN // 2]
        others = [at for at in range(len(deck)) if at not in rare]
        chosen = [deck[at] for at in [*rare, *others][:FAULTS_PER_RUN]]
        rng.shuffle(chosen)
        return chosen

    def play(self, stack: Stack, shape: Shape, number: int, stands_on: Ground) -> None:
        """Run one episode and append its results to the file."""
        run = f"chaos-{self._seed}-{number:03d}-{int(time.time()) % 100_000}"
        document = recipe(
            self._model,
            self._questions,
            steps=self._steps,
            replicas=shape.replicas,
            ranks=shape.ranks,
            staleness=shape.staleness,
        )
        deck = self.deck(shape, number)
        wants_disk = any(FAULTS[name].needs == DISK for name in deck)
        episode = Episode(stack, run, document, hash_of(self._seed, number), stands_on, own_disk=wants_disk, say=say)
        try:
            played = episode.play(deck, AT_ONCE[number % len(AT_ONCE)])
        except Exception as error:
            results.add_broken(self._folder, run, f"{type(error).__name__}: {error}")
            say(f"{run}: BROKEN: {error!r}")
            raise BrokenRunError(run) from error
        results.add(self._folder, played)
        say(f"{run}: {played.state} after {played.seconds:.0f} s; {played.judgement}")


def hash_of(seed: int, number: int) -> int:
    """The seed of one run."""
    return random.Random(f"run {seed} {number}").getrandbits(32)


def say(text: str) -> None:
    """Print progress to standard output."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/chaos"), help="folder for runs and results")
    parser.add_argument("--faults", type=int, default=FAULTS_WANTED, help="number of faults that have to count")
    parser.add_argument("--engine-kills", type=int, default=ENGINE_KILLS_WANTED)
    parser.add_argument("--steps", type=int, default=STEPS, help="rollout steps of each run")
    parser.add_argument("--only", action="append", default=[], help="only faults that begin so; may be repeated")
    parser.add_argument("--most", type=int, help="each fault at most so often")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help="only stacks of this shape")
    parser.add_argument("--hours", type=float, default=HOURS, help="start no further run after this many hours")
    return parser.parse_args()


def done(campaign: Campaign, folder: Path, options: argparse.Namespace) -> bool:
    """Whether enough faults have counted, and each at least once; or none remain."""
    found = results.read(folder)
    enough = sum(found.counted.values()) >= options.faults and found.engine_kills >= options.engine_kills
    return (enough and campaign.wanted.keys() <= found.counted.keys()) or not campaign.left()


def on_one_stack(campaign: Campaign, folder: Path, shape: Shape, number: int, enough: Callable[[], bool]) -> int:
    """Play up to RUNS_PER_STACK runs on a new stack; returns the number of the next run."""
    with ExitStack() as held:
        stands_on = held.enter_context(ground(folder, shape.redis, store=shape.store))
        stack = held.enter_context(Stack(folder, stands_on.redis_url, stands_on.environment))
        stack.cancel_all()
        for _ in range(RUNS_PER_STACK):
            number += 1
            try:
                campaign.play(stack, shape, number - 1, stands_on)
            except BrokenRunError:
                break  # the next run gets a new stack
            if enough() or not campaign.open_to(shape):
                break
    if stack.left:
        say(f"LEFT BEHIND: {stack.left}")
        results.add_broken(folder, "stopping a stack", f"left behind: {stack.left}")
    return number


def over(ends: float) -> bool:
    """Whether `ends` (monotonic seconds) has passed."""
    return time.monotonic() > ends


def run(campaign: Campaign, folder: Path, options: argparse.Namespace) -> None:
    """Play runs, stack after stack, until enough faults have counted or the time has run out."""
    ends = time.monotonic() + 3600 * options.hours
    number, shapes = len(results.read(folder).runs), 0
    while not done(campaign, folder, options) and not over(ends):
        at = (number // RUNS_PER_STACK + shapes) % len(SHAPES) if options.shape is None else options.shape
        shape = SHAPES[at]
        if not campaign.open_to(shape):
            if options.shape is not None:
                return
            shapes += 1
            continue
        say(f"starting a stack for up to {RUNS_PER_STACK} runs: {shape}")
        number = on_one_stack(campaign, folder, shape, number, lambda: done(campaign, folder, options) or over(ends))


def main() -> int:
    """Run what remains and print the table; 0 if every run succeeded and nothing was lost or duplicated."""
    options = arguments()
    folder = options.runs.absolute() / f"seed-{options.seed}"
    disk.free(folder)
    campaign = Campaign(folder, options.seed, options.steps, options.only, options.most)
    if campaign.disk_refusal:
        say(f"SKIPPED: full disk: {campaign.disk_refusal}")
    run(campaign, folder, options)
    found = results.read(folder)
    print(results.table(found))
    wrong = campaign.shortcomings(found, options.faults, options.engine_kills)
    for shortcoming in wrong:
        print(f"FAILED: {shortcoming}")
    if not wrong:
        print(f"all {len(found.runs)} runs succeeded; nothing was lost, nothing was duplicated")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
