"""Owns the simulated machines and tasks, and the settings among which the sweep and tuning choose.

Must not simulate anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.simulation.lengths import Lengths
from benchmarks.simulation.replica import Engine
from services.controller.tuning.knobs import Bounds, Knob, Rules, Values


@dataclass(frozen=True)
class Drift:
    """A quantity that changes evenly over the run, from its first to its last value."""

    first: float
    last: float

    def at(self, progress: float) -> float:
        """Its value after a share of the run, 0 to 1."""
        return self.first + (self.last - self.first) * progress


@dataclass(frozen=True)
class Scenario:
    """A pipeline. `length`: the median response in tokens, `spread` of its logarithm; `longest`: where it is cut.

    `kept`: the share of judged groups that are kept. The learner takes `step_s` per rollout step and trains
    `learner_tokens` per second besides; `publish_s`: until the fleet has its weights. `start`: where tuning begins.
    `gpus`: of the learner, and of a replica.
    """

    name: str
    engine: Engine
    groups_per_step: int
    group_size: int
    length: Drift
    kept: Drift
    step_s: float
    learner_tokens: float
    publish_s: float
    start: Values
    bounds: Mapping[Knob, Bounds]
    staleness: float
    gpus: tuple[float, float]
    spread: float = 0.6
    longest: int = 16384
    steps: int = 160
    warm_up: int = 70

    def lengths(self, progress: float) -> Lengths:
        """The lengths of responses after a share of the run, 0 to 1."""
        return Lengths(self.length.at(progress), self.spread, self.longest)

    @property
    def rules(self) -> Rules:
        """Tuning's rules with the default targets of a recipe, but for the scenario's staleness."""
        return Rules(
            idle_share=0.05,
            staleness=self.staleness,
            cool_down=4,
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
            max_sequences=self.engine.max_sequences,
            bounds=self.bounds,
        )


def _bounds(
    inflight: tuple[int, int], staleness: tuple[int, int], replicas: tuple[int, int] | None
) -> dict[Knob, Bounds]:
    found = {Knob.INFLIGHT: Bounds(*inflight), Knob.STALENESS: Bounds(*staleness)}
    return found | ({Knob.REPLICAS: Bounds(*replicas)} if replicas else {})


_LAPTOP = Engine(peak=900, half=6, max_sequences=32, start_s=40, pause_s=0.5)
_GPU = Engine(peak=9000, half=48, max_sequences=128, start_s=90, pause_s=2)
_LARGE = Engine(peak=7000, half=40, max_sequences=96, start_s=180, pause_s=4)

LAPTOP = Scenario(
    "laptop, generation-bound",
    _LAPTOP,
    groups_per_step=4,
    group_size=4,
    length=Drift(60, 60),
    kept=Drift(0.8, 0.5),
    step_s=1.5,
    learner_tokens=1500,
    publish_s=1,
    start=Values(max_inflight_groups=8, max_staleness=1, replicas=1),
    bounds=_bounds((4, 64), (1, 4), None),
    staleness=2.0,
    gpus=(0, 0),
    longest=256,
)
EIGHT = Scenario(
    "8 GPUs, generation-bound",
    _GPU,
    groups_per_step=16,
    group_size=8,
    length=Drift(900, 900),
    kept=Drift(0.6, 0.6),
    step_s=4,
    learner_tokens=9000,
    publish_s=2,
    start=Values(max_inflight_groups=32, max_staleness=1, replicas=2),
    bounds=_bounds((16, 256), (1, 4), (1, 6)),
    staleness=2.0,
    gpus=(2, 1),
)
LEARNER_BOUND = Scenario(
    "8 GPUs, learner-bound",
    _GPU,
    groups_per_step=16,
    group_size=8,
    length=Drift(900, 900),
    kept=Drift(0.8, 0.8),
    step_s=10,
    learner_tokens=3500,
    publish_s=2,
    start=Values(max_inflight_groups=200, max_staleness=4, replicas=6),
    bounds=_bounds((16, 256), (1, 4), (1, 6)),
    staleness=1.0,
    gpus=(2, 1),
)
DRIFTING = Scenario(
    "8 GPUs, lengths and keep rate drift",
    _GPU,
    groups_per_step=16,
    group_size=8,
    length=Drift(500, 2500),
    kept=Drift(0.8, 0.4),
    step_s=4,
    learner_tokens=9000,
    publish_s=2,
    start=Values(max_inflight_groups=48, max_staleness=1, replicas=2),
    bounds=_bounds((16, 256), (1, 4), (1, 6)),
    staleness=2.0,
    gpus=(2, 1),
)
SIXTY_FOUR = Scenario(
    "64 GPUs, lengths grow",
    _LARGE,
    groups_per_step=48,
    group_size=8,
    length=Drift(1500, 3500),
    kept=Drift(0.6, 0.5),
    step_s=20,
    learner_tokens=20000,
    publish_s=6,
    start=Values(max_inflight_groups=144, max_staleness=2, replicas=6),
    bounds=_bounds((48, 640), (1, 4), (4, 40)),
    staleness=2.0,
    gpus=(24, 1),
)
SCENARIOS = (LAPTOP, EIGHT, LEARNER_BOUND, DRIFTING, SIXTY_FOUR)
