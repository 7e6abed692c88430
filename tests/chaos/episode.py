"""Owns one run under faults: it is submitted, struck by faults, finished and judged.

Must not choose the faults; the caller does.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from tests.chaos import disk, lookups
from tests.chaos.evidence import collect
from tests.chaos.ground import Ground
from tests.chaos.injector import Outcome, inject
from tests.chaos.oracle import Judgement, judge
from tests.chaos.scene import Scene
from tests.chaos.tail import Tail
from tests.chaos.watch import Watch
from tests.harness.stack import Stack
from tests.harness.stubs.stack import StubStack

log = logging.getLogger(__name__)

START_S = 300.0
SILENCE_S = 300.0
"""A run is considered hung if nothing finishes for this long."""
POLL_S = 0.3
PAUSE_S = (0.2, 2.0)
STEPS_TO_SPARE = 3
"""No faults are injected in the last steps: their recovery could not be observed."""
Say = Callable[[str], None]


class RunHungError(RuntimeError):
    """The run did not reach a state in time, or failed; the text has its view."""


@dataclass
class Played:
    """A finished run. `reason`: the reason of its state in the run's record."""

    run: str
    state: str
    reason: str
    seconds: float
    judgement: Judgement
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Whether the run succeeded and the oracle found nothing."""
        return self.state == "succeeded" and not self.judgement.findings

    def as_json(self) -> dict[str, Any]:
        """One line of the results."""
        return {
            "kind": "run",
            "run": self.run,
            "state": self.state,
            "reason": self.reason,
            "seconds": self.seconds,
            "lost": self.judgement.lost,
            "duplicated": self.judgement.duplicated,
            "findings": [str(finding) for finding in self.judgement.findings],
            "figures": self.judgement.figures,
        }


@dataclass
class Episode:
    """How a run is played. `own_disk`: its checkpoints go to a disk that can be filled; `say` reports progress."""

    stack: Stack | StubStack
    run: str
    recipe: dict[str, Any]
    seed: int
    ground: Ground
    own_disk: bool = False
    say: Say = log.info

    def play(self, faults: Sequence[str], at_once: int) -> Played:
        """Inject the faults in this order, `at_once` at a time, until the run is near its end; then judge the run."""
        folder = self.stack.folder / self.run
        folder.mkdir(parents=True)
        started = time.monotonic()
        url = self.ground.url or self.stack.redis_url
        server = lookups.client(url)
        scene = Scene(self.run, server, self.stack, folder, self.recipe, random.Random(self.seed), self.ground)
        with ExitStack() as held:
            held.callback(server.close)
            if self.own_disk:
                held.enter_context(disk.own_disk(folder / "checkpoints"))
            tail = held.enter_context(Tail(url, self.run, folder / "tail.jsonl"))
            watch = held.enter_context(Watch(server, self.run))
            self.stack.submit(self.recipe, self.run)
            self._until(scene, lambda: scene.step() >= 1, "its first rollout step", START_S)
            outcomes = self._strike(scene, faults, at_once)
            self._finish(scene)
            tail.close()
            watch.close()
            cuts = [cut.as_json() for cut in scene.cuts]
            (folder / "injected.json").write_text(json.dumps({"entries": scene.injected, "cuts": cuts}))
            evidence = collect(server, self.run, folder / "tail.jsonl", watch, scene.files, scene.injected, scene.cuts)
            reason = json.loads(server.hget(lookups.key(self.run, "record"), "history"))[-1]["reason"]
        return Played(self.run, evidence.state, reason, time.monotonic() - started, judge(evidence), outcomes)

    def _strike(self, scene: Scene, faults: Sequence[str], at_once: int) -> list[Outcome]:
        """Each of `at_once` threads injects the next fault as soon as the run has recovered from its previous one."""
        left = deque(enumerate(faults))
        last = self.recipe["limits"]["rollout_steps"]
        outcomes: list[Outcome] = []

        def take() -> None:
            while not scene.ended() and scene.step() < last - STEPS_TO_SPARE:
                try:
                    number, name = left.popleft()
                except IndexError:  # another thread took the last fault
                    return
                # A generator per fault: threads sharing one would make results independent of the seed.
                rng = random.Random(f"{self.seed} {number} {name}")
                time.sleep(rng.uniform(*PAUSE_S))
                outcome = inject(replace(scene, rng=rng), name)
                outcomes.append(outcome)
                result = f"recovered in {outcome.seconds:.1f} s" if outcome.recovered else "NOT RECOVERED"
                shown = result if outcome.counted else f"did not count: {outcome.why}"
                self.say(f"{self.run}: step {scene.step()}: {name}: {shown}")

        with ThreadPoolExecutor(at_once) as threads:
            try:
                for done in [threads.submit(take) for _ in range(at_once)]:
                    done.result()
            except BaseException:  # Ctrl-C too: the other threads must not continue for minutes
                scene.abandoned.set()
                raise
        return outcomes

    def _finish(self, scene: Scene) -> None:
        """Wait for the run's end while it makes progress. A run that hangs is cancelled and judged as it is."""
        endings, since = scene.endings(), time.monotonic()
        while not scene.ended():
            self.stack.check()
            now = scene.endings()
            if now != endings:
                endings, since = now, time.monotonic()
            if time.monotonic() - since > SILENCE_S:
                self.say(f"{self.run}: HUNG: nothing has finished for {SILENCE_S:g} s; cancelling it")
                self.stack.api.post(f"/v1/runs/{self.run}/cancel")
                self._until(scene, scene.ended, "its cancellation", START_S)
            time.sleep(POLL_S)

    def _until(self, scene: Scene, condition: Callable[[], bool], what: str, deadline_s: float) -> None:
        ends = time.monotonic() + deadline_s
        while not condition():
            self.stack.check()
            if time.monotonic() > ends or scene.ended():
                view = self.stack.api.get(f"/v1/runs/{self.run}").json()
                view_text = json.dumps({**view, "recipe": None}, indent=1)[-6000:]
                raise RunHungError(f"{self.run}: {what} did not happen within {deadline_s:g} s\n{view_text}")
            time.sleep(POLL_S)
