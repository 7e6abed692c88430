"""Owns the long suite: hundreds of faults over many runs, resumable, and the table at its end (`make chaos`).

Must not end a process that it did not start. `python -m tests.chaos.campaign --seed N --runs DIR`
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import disk, results
from tests.chaos.episode import Episode
from tests.chaos.faults import DISK, EMBEDDED, FAULTS, PROXY
from tests.chaos.ground import ProxyThread, proxied_server
from tests.harness.stack import Stack
from tests.harness.workload import recipe, write_model, write_questions

FAULTS_WANTED = 200
ENGINE_KILLS_WANTED = 20
HOURS = 4.0
RUNS_A_STACK = 3
FAULTS_A_RUN = 16
AT_ONCE = (2, 3, 1, 3)
"""How many faults overlap, run after run."""
STEPS = 60


@dataclass(frozen=True)
class Shape:
    """How a run is set up: which Redis it has, its replicas and ranks, how stale its samples may be."""

    redis: str
    replicas: int
    ranks: int
    staleness: int


SHAPES = (
    Shape(EMBEDDED, 3, 1, 1),
    Shape(PROXY, 2, 1, 2),
    Shape(EMBEDDED, 2, 2, 1),
    Shape(PROXY, 1, 2, 1),
    Shape(EMBEDDED, 1, 1, 0),
    Shape(PROXY, 2, 1, 0),
)
"""Run after run; a stack serves RUNS_A_STACK runs of one shape."""


class BrokenRunError(RuntimeError):
    """A run could not be played to its end, or not be judged; its results say why."""


class Campaign:
    """The faults that are left, and where their results go."""

    def __init__(self, folder: Path, seed: int, steps: int) -> None:
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
        """Why no disk can be filled here; None where one can."""
        return self._disk_refusal

    def left(self) -> Counter[str]:
        """How often each fault is still to be struck here."""
        wanted = Counter({name: fault.times for name, fault in FAULTS.items()})
        if self._disk_refusal:
            wanted = Counter({name: count for name, count in wanted.items() if FAULTS[name].needs != DISK})
        return wanted - results.read(self._folder).counted

    def open_to(self, shape: Shape) -> list[str]:
        """The faults left that a run of this shape can have, each as often as it is left."""
        return [name for name in self.left().elements() if FAULTS[name].needs in ("", shape.redis, DISK)]

    def deck(self, shape: Shape, number: int) -> list[str]:
        """What may strike the run of this number, in order; it takes as much of it as it lasts for."""
        deck = self.open_to(shape)
        random.Random(f"deck {self._seed} {number}").shuffle(deck)
        return deck[:FAULTS_A_RUN]

    def play(self, stack: Stack, shape: Shape, number: int, direct_url: str, proxy: ProxyThread | None) -> None:
        """One run; its results are in the file afterwards."""
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
        episode = Episode(
            stack, run, document, hash_of(self._seed, number), direct_url, proxy, own_disk=wants_disk, say=say
        )
        try:
            played = episode.play(deck, AT_ONCE[number % len(AT_ONCE)])
        except Exception as error:
            results.add_broken(self._folder, run, f"{type(error).__name__}: {error}")
            say(f"{run}: BROKEN: {error!r}")
            raise BrokenRunError(run) from error
        results.add(self._folder, played)
        say(f"{run}: {played.state} after {played.seconds:.0f} s; {played.judgement}")


def hash_of(seed: int, number: int) -> int:
    """A run's own seed."""
    return random.Random(f"run {seed} {number}").getrandbits(32)


def say(text: str) -> None:
    """Progress, on standard output."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/chaos"), help="where runs and results are kept")
    parser.add_argument("--faults", type=int, default=FAULTS_WANTED, help="how many have to count")
    parser.add_argument("--engine-kills", type=int, default=ENGINE_KILLS_WANTED)
    parser.add_argument("--steps", type=int, default=STEPS, help="rollout steps of each run")
    parser.add_argument("--hours", type=float, default=HOURS, help="begin no further run after so many hours")
    return parser.parse_args()


def done(campaign: Campaign, folder: Path, asked: argparse.Namespace) -> bool:
    """Whether as many faults have counted as were asked for."""
    found = results.read(folder)
    enough = sum(found.counted.values()) >= asked.faults and found.engine_kills >= asked.engine_kills
    return enough or not campaign.left()


def on_one_stack(campaign: Campaign, folder: Path, shape: Shape, number: int, enough: Callable[[], bool]) -> int:
    """Up to RUNS_A_STACK runs on a stack of their own; the number of the run to come after them."""
    with ExitStack() as held:
        direct, proxy = "", None
        if shape.redis == PROXY:
            direct, proxy = held.enter_context(proxied_server(folder / "valkey"))
        stack = held.enter_context(Stack(folder, proxy.url if proxy else None))
        stack.cancel_all()
        for _ in range(RUNS_A_STACK):
            number += 1
            try:
                campaign.play(stack, shape, number - 1, direct or stack.redis_url, proxy)
            except BrokenRunError:
                break  # the next run gets a stack of its own
            if enough():
                break
    if stack.left:
        say(f"LEFT BEHIND: {stack.left}")
        results.add_broken(folder, "the end of a stack", f"left behind: {stack.left}")
    return number


def over(ends: float) -> bool:
    """Whether that moment (monotonic seconds) has passed."""
    return time.monotonic() > ends


def run(campaign: Campaign, folder: Path, asked: argparse.Namespace) -> None:
    """Stack after stack, run after run, until enough has counted or the time is over."""
    ends = time.monotonic() + 3600 * asked.hours
    number, shapes = len(results.read(folder).runs), 0
    while not done(campaign, folder, asked) and not over(ends):
        shape = SHAPES[(number // RUNS_A_STACK + shapes) % len(SHAPES)]
        if not campaign.open_to(shape):
            shapes += 1
            continue
        say(f"a stack for {RUNS_A_STACK} runs: {shape}")
        number = on_one_stack(campaign, folder, shape, number, lambda: done(campaign, folder, asked) or over(ends))


def main() -> int:
    """Run what is left, print the table; 0 when nothing was lost, nothing came twice and every run succeeded."""
    asked = arguments()
    folder = asked.runs.absolute() / f"seed-{asked.seed}"
    disk.free(folder)
    campaign = Campaign(folder, asked.seed, asked.steps)
    if campaign.disk_refusal:
        say(f"SKIPPED: full disk: {campaign.disk_refusal}")
    run(campaign, folder, asked)
    found = results.read(folder)
    print(results.table(found))
    wrong = results.shortcomings(found, asked.faults, asked.engine_kills)
    for shortcoming in wrong:
        print(f"NOT SHOWN: {shortcoming}")
    if not wrong:
        print(f"{len(found.runs)} runs, every one succeeded; nothing was lost, nothing came twice")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
