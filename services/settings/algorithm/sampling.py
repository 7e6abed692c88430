"""Owns the settings of dynamic sampling: which groups are kept, which prompts are drawn, what to do when few are kept.

Must not hold a rule; services.sampler does.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.settings.base import Positive, Section
from services.settings.faults import invalid


class SelectionSettings(Section):
    """Which prompts are drawn. `uniform`: each once per pass (the paper).

    `boundary` prefers prompts whose groups are likely to be mixed, by a posterior of each prompt's pass rate whose
    evidence halves every `half_life` rollout steps; a share of `exploration` of its draws are uniform. `screen` draws
    like `uniform`, has `screen_samples` of a group judged first, and generates the rest only if they are mixed:
    cheaper, but it trains hard and easy prompts less often than the paper does (docs/sampling.md has the figures).
    """

    strategy: Literal["uniform", "boundary", "screen"] = "uniform"
    exploration: Annotated[float, Field(gt=0, le=1)] = 0.1
    half_life: Annotated[float, Field(gt=0)] = 16.0
    screen_samples: Annotated[int, Field(ge=2)] = 4


class StarvationSettings(Section):
    """The escalation when too few groups are kept: one level after another, each after a number of judged groups.

    Judged groups are counted since the last whole batch, in batches (groups_per_step groups); the published script
    fails after 30 (10 generation batches of 3). null skips a level. `widen_after`: as many groups are in flight as
    limits.max_inflight_groups allows. `boundary_after`: prompts are drawn as with selection.strategy = boundary;
    skipped with the filter `spread`, of which a pass rate says nothing. `partial_after`: the kept groups are trained as
    a smaller batch, normalised by its own size. `pause_after`: with nothing to train, the run is paused, and an alert
    shows the groups' accuracies.
    """

    widen_after: Positive | None = 4
    boundary_after: Positive | None = 8
    partial_after: Positive | None = 16
    pause_after: Positive | None = 32

    @model_validator(mode="after")
    def _levels_rise(self) -> StarvationSettings:
        levels = [(name, getattr(self, name)) for name in type(self).model_fields]
        given = [(name, after) for name, after in levels if after is not None]
        for (lower, below), (higher, after) in pairwise(given):
            if after <= below:
                raise ValueError(invalid(higher, after, f"more than {lower} = {below}"))
        return self


class DynamicSamplingSettings(Section):
    """Which groups are kept; `min_known` known verdicts at least (null: the whole group).

    `filter`: `accuracy` keeps a group if and only if 0 < correct < known, `spread` if and only if its highest known
    score is at least `min_spread` above its lowest (null: `accuracy`, or `spread` with algorithm.reward = score).
    `continuous` refills as groups are judged; `generation_batches` draws `generation_batch_factor` x groups_per_step
    groups and waits for all of them; after `max_generation_batches` of them for one batch (0: no limit), a partial
    batch is trained, or the run is paused. `consumption`: which kept group is trained first, by the oldest
    version that wrote it or (fifo) by the time it was kept.
    """

    enabled: bool = True
    filter: Literal["accuracy", "spread"] | None = None
    min_spread: Annotated[float, Field(gt=0, le=1)] = 0.05
    min_known: Positive | None = None
    refill: Literal["continuous", "generation_batches"] = "continuous"
    generation_batch_factor: Positive = 3
    max_generation_batches: Annotated[int, Field(ge=0)] = 10
    consumption: Literal["oldest_first", "newest_first", "fifo"] = "oldest_first"
    selection: SelectionSettings = SelectionSettings()
    starvation: StarvationSettings = StarvationSettings()
