"""Owns the quick campaign (`make chaos-stub`): at least 10,000 groups under faults, with stub engines, in minutes.

Must not load a model. `python -m tests.chaos.stub --seed N --runs DIR`; with `--soak STEPS` a long run without faults.

Real: sampler, verifiers with their sandboxes, the replicas' pull loop and weight follower, controller, API, Redis, the
learner's History, archive and checkpoints. Stubs (tests/harness/stubs): the engine and the learner's training.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos import results, soak
from tests.chaos.campaign import hash_of, say
from tests.chaos.episode import Episode
from tests.chaos.faults import FAULTS as EVERY_FAULT
from tests.chaos.ground import EMBEDDED, PROXY, SENTINELS, Ground, ProxyThread, ground
from tests.chaos.server import Server
from tests.harness.stubs.stack import StubStack
from tests.harness.stubs.workload import recipe, write_questions

GROUPS_WANTED = 10_000
RUNS = 5
FAULTS_WANTED = 40
AT_ONCE = 3
LEASE_S = 2.0
GROUPS_PER_STEP, SAMPLES = 32, 4
QUESTIONS = 400
DELAY_S, TRAIN_S, FILTERED = 0.02, 0.05, 0.25
"""How long a response and a step take, so that there is something to interrupt; and the share of filtered groups."""


@dataclass(frozen=True)
class Shape:
    """The setup of a run."""

    replicas: int
    verifiers: int
    staleness: int
    redis: str = PROXY

    @property
    def offers(self) -> frozenset[str]:
        """The needs of faults that a run of this shape satisfies. The suite restarts its server behind the proxy."""
        return frozenset({"", SENTINELS} if self.redis == SENTINELS else {"", PROXY, EMBEDDED})


SHAPES = (Shape(3, 2, 1), Shape(2, 1, 2), Shape(2, 1, 1, SENTINELS), Shape(1, 2, 0), Shape(2, 2, 1))
"""One per run, in turn."""

FAULTS = {
    "kill rollout replica at work": 2,
    "kill rollout replica in a sync": 1,
    "kill verifier": 2,
    "kill sampler": 2,
    "kill learner rank with a batch": 2,
    "kill learner rank in a sync": 1,
    "kill gateway": 1,
    "kill Redis": 2,
    "stop rollout replica": 1,
    "stop verifier": 1,
    "stop sampler": 1,
    "stop learner rank": 1,
    "stop gateway": 1,
    "stop Redis": 1,
    "drop connections": 2,
    "delay connections": 1,
    "swallow connections": 1,
    "refuse connections": 1,
    "failover that loses a second": 4,
    "resume from an older step": 1,
    "kill sampler in a rewind": 1,
    "kill Redis in a rewind": 1,
    "damaged payload": 1,
    "damaged message": 2,
    "duplicated message": 2,
}
"""How often each fault of tests.chaos.faults is in the deck of a run that offers what it needs.

All but those of engines, Ray, learner ranks, disks and stores.
"""


def document(questions: Path, shape: Shape, groups: int) -> dict[str, Any]:
    """A recipe that trains at least `groups` groups."""
    return recipe(
        questions,
        QUESTIONS - 8,
        rollout_steps=-(-groups // GROUPS_PER_STEP),
        groups_per_step=GROUPS_PER_STEP,
        max_inflight_groups=8 * GROUPS_PER_STEP,
        max_staleness=shape.staleness,
        lease_s=LEASE_S,
        group_size=SAMPLES,
        rollout=shape.replicas,
        verifiers=shape.verifiers,
        checkpoint_every=8,
        every=50,
    )


def play(folder: Path, seed: int, number: int, groups: int) -> None:
    """Run number `number`, on a server and a stack of its own; appends to the results."""
    shape = SHAPES[number % len(SHAPES)]
    run = f"stub-{seed}-{number:03d}-{int(time.time()) % 100_000}"
    possible = [name for name in FAULTS if EVERY_FAULT[name].needs in shape.offers]
    deck = [name for name in possible for _ in range(FAULTS[name])]
    random.Random(f"deck {seed} {number}").shuffle(deck)
    say(f"{run}: {shape}, {groups} groups, {len(deck)} faults at most")
    rollout = ("--filtered", str(FILTERED), "--delay-s", str(DELAY_S), "--seed", str(hash_of(seed, number)))
    arguments = {"rollout": rollout, "learner": ("--train-s", str(TRAIN_S))}
    with ExitStack() as held:
        stands_on, redis_pid = held.enter_context(_ground(folder / f"{run}-redis", shape))
        stack = held.enter_context(StubStack(folder, str(stands_on.redis_url), arguments, redis_pid=redis_pid))
        made = document(write_questions(folder / "questions.jsonl", QUESTIONS), shape, groups)
        episode = Episode(stack, run, made, hash_of(seed, number), stands_on, say=say)
        try:
            played = episode.play(deck, AT_ONCE)
        except Exception as error:  # noqa: BLE001 - the results name it, and the other runs are played
            results.add_broken(folder, run, f"{type(error).__name__}: {error}")
            say(f"{run}: BROKEN: {error!r}")
            return
    if stack.left:
        results.add_broken(folder, run, f"did not drain: {stack.left}")
    results.add(folder, played)
    say(f"{run}: {played.state} after {played.seconds:.0f} s; {played.judgement}")


@contextmanager
def _ground(folder: Path, shape: Shape) -> Iterator[tuple[Ground, Callable[[], int | None]]]:
    """What a run stands on, and the pid of the server that it may kill, which is started again."""
    if shape.redis == SENTINELS:
        with ground(folder, SENTINELS) as made:
            yield made, lambda: None
        return
    with Server(folder) as server, server.kept_alive(), ProxyThread(server.port) as proxy:
        yield Ground(server.url, proxy.url, proxy), lambda: server.pid


def campaign(folder: Path, seed: int, groups: int, faults: int) -> int:
    """Play RUNS runs that together train at least `groups` groups, print the table; the exit status."""
    begun, each = time.monotonic(), -(-groups // RUNS)
    for number in range(len(results.read(folder).runs), RUNS):
        play(folder, seed, number, each)
    found = results.read(folder)
    print(results.table(found))
    wrong = results.shortcomings(found, faults, 0)
    trained, dispatched = (sum(run["figures"].get(name, 0) for run in found.runs) for name in ("trained", "dispatched"))
    if trained < groups:
        wrong.append(f"{trained} groups were trained: expected {groups}")
    for shortcoming in wrong:
        print(f"FAILED: {shortcoming}")
    print(
        f"{len(found.runs)} runs, {dispatched} groups dispatched, {trained} trained; {time.monotonic() - begun:.0f} s"
    )
    return 1 if wrong else 0


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/chaos-stub"), help="folder for runs and results")
    parser.add_argument("--groups", type=int, default=GROUPS_WANTED, help="groups to train under faults")
    parser.add_argument("--faults", type=int, default=FAULTS_WANTED, help="number of faults that have to count")
    parser.add_argument("--soak", type=int, metavar="STEPS", help="so many rollout steps without faults")
    given = parser.parse_args()
    if given.soak:
        return soak.main(given.runs.absolute() / f"soak-{int(time.time())}", given.soak)
    return campaign(given.runs.absolute() / f"seed-{given.seed}", given.seed, given.groups, given.faults)


if __name__ == "__main__":
    sys.exit(main())
