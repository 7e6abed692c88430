"""Owns the settings of dynamic sampling: which groups are kept, which prompts drawn, what happens when few are kept.

Must not hold a rule; services.sampler does.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from services.settings.base import Positive, Section


class SelectionSettings(Section):
    """Which prompts are drawn. `uniform`: each once a pass (the paper).

    `boundary` prefers prompts whose groups are likely to be mixed, by a posterior of each prompt's pass rate whose
    evidence halves every `half_life` policy versions; `exploration` of its draws go on with the uniform walk. `screen`
    draws as `uniform`, has `screen_samples` of a group judged first, and generates the rest only where they are mixed:
    cheaper, but it trains hard and easy prompts less often than the paper does (docs/sampling.md has the figures).
    """

    strategy: Literal["uniform", "boundary", "screen"] = "uniform"
    exploration: Annotated[float, Field(gt=0, le=1)] = 0.1
    half_life: Annotated[float, Field(gt=0)] = 16.0
    screen_samples: Annotated[int, Field(ge=2)] = 4


class StarvationSettings(Section):
    """What happens when kept groups come too slowly: one rung after another, each after so many judged groups.

    They are counted since a whole batch was last at hand, in batches (groups_per_step groups); the published script
    gives up after 30 (10 generation batches of 3). null leaves a rung out. `widen_after`:
    as many groups are under way as limits.max_inflight_groups lets in. `boundary_after`: prompts are drawn as
    selection.strategy = boundary would. `partial_after`: what was kept is trained as a smaller batch, normalised by
    what it holds. `pause_after`: with nothing to train, the run is paused, and an alert shows the groups' accuracies.
    """

    widen_after: Positive | None = 4
    boundary_after: Positive | None = 8
    partial_after: Positive | None = 16
    pause_after: Positive | None = 32

    @model_validator(mode="after")
    def _rungs_rise(self) -> StarvationSettings:
        rungs = [getattr(self, name) for name in type(self).model_fields]
        given = [rung for rung in rungs if rung is not None]
        if given != sorted(set(given)):
            raise ValueError(f"starvation: {rungs} must rise from widen_after to pause_after")
        return self


class DynamicSamplingSettings(Section):
    """Keep a group iff 0 < correct < known; `min_known` defaults to the whole group.

    `continuous` refills as groups are judged; `generation_batches` draws `generation_batch_factor` x groups_per_step
    groups, waits for all of them, and is starving after `max_generation_batches` for one batch (0: no limit): a partial
    batch then, or a pause. `consumption`: which kept group is trained first, by the oldest version that wrote it or
    (fifo) by when it was kept.
    """

    enabled: bool = True
    min_known: Positive | None = None
    refill: Literal["continuous", "generation_batches"] = "continuous"
    generation_batch_factor: Positive = 3
    max_generation_batches: Annotated[int, Field(ge=0)] = 10
    consumption: Literal["oldest_first", "newest_first", "fifo"] = "oldest_first"
    selection: SelectionSettings = SelectionSettings()
    starvation: StarvationSettings = StarvationSettings()
