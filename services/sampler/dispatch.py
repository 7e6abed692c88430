"""Owns what goes out: the next prompts as tasks, continuously or by generation batches; and which are dropped for good.

Must not judge groups; how many go out is decided in pacing.
"""

from __future__ import annotations

from services.contracts import Cause, DeadLetter, Lane, Prompt, SamplerState, Sampling, Task
from services.metrics import PROMPTS_DROPPED
from services.sampler.batching import Window
from services.sampler.data import PromptCursor, PromptsExhaustedError
from services.sampler.ledger import Ledger
from services.sampler.pacing import REFILLS, Bounds
from services.shell import Context
from services.streams.effects import Effects

PROMPT_FAULTS = (Cause.TOO_LONG, Cause.REFUSED)
"""Causes that every further draw of the same prompt would meet again."""


class GenerationBatchesError(RuntimeError):
    """As many generation batches as the recipe allows did not fill one batch."""


class Dispatcher:
    """Draws prompts for the training lane; `state` is where it stands, stored with every task it sends."""

    def __init__(
        self, context: Context, effects: Effects, ledger: Ledger, prompts: tuple[Prompt, ...], state: SamplerState
    ) -> None:
        self._context = context
        self._recipe = context.record.recipe
        self._effects = effects
        self._ledger = ledger
        self._cursor = PromptCursor(prompts, self._recipe.seed, state.cursor)
        self._next_group = state.next_group
        self._waves = state.generation_batches
        self._rule = self._recipe.algorithm.dynamic_sampling
        self._count_dropped()

    @property
    def state(self) -> SamplerState:
        """Enough for a successor to go on; which prompts were dropped, it reads from the dead letters."""
        return SamplerState(
            cursor=self._cursor.position, next_group=self._next_group, generation_batches=self._waves
        )  # fmt: skip

    async def dispatch(self, steps_left: int, survival: float, window: Window) -> None:
        """Send as many groups as are wanted now.

        Raises GenerationBatchesError when they would be one generation batch too many, PromptsExhaustedError when
        every prompt was dropped.
        """
        limits = self._recipe.limits
        bounds = Bounds(
            limits.groups_per_step, limits.max_staleness, steps_left, limits.max_inflight_groups,
            limits.groups_per_step * self._rule.generation_batch_factor,
        )  # fmt: skip
        count = REFILLS[self._rule.refill](self._ledger.flow(survival), bounds)
        if count and self._rule.refill == "generation_batches":
            self._begin_wave(bounds.wave, window)
        for _ in range(count):
            await self._send(self._draw())

    def _begin_wave(self, size: int, window: Window) -> None:
        allowed = self._rule.max_generation_batches
        if 0 < allowed <= self._waves:
            raise GenerationBatchesError(
                f"algorithm.dynamic_sampling.max_generation_batches = {allowed}: {self._waves} generation batches of "
                f"{size} groups left {len(self._ledger.kept)} of the {self._recipe.limits.groups_per_step} groups that "
                f"a rollout step needs; {window.histogram}"
            )
        self._waves += 1

    def _draw(self) -> Prompt:
        try:
            return self._cursor.next()
        except PromptsExhaustedError as error:
            limit = self._recipe.max_prompt_tokens
            raise PromptsExhaustedError(f"{error} (data.max_prompt_tokens, in force: {limit})") from None

    async def _send(self, prompt: Prompt) -> None:
        rollout = self._recipe.rollout
        sampling = Sampling(temperature=rollout.temperature, top_p=rollout.top_p, max_new_tokens=rollout.max_new_tokens)
        name = f"g{self._next_group:08d}"
        task = Task(group=name, prompt=prompt, samples=self._recipe.algorithm.group_size, sampling=sampling)
        self._next_group += 1
        await self._effects.dispatch(Lane.TRAIN, task, self.state)
        self._ledger.dispatched(task)

    def drop(self, letter: DeadLetter) -> bool:
        """Never draw a letter's prompt again if the prompt itself is at fault; whether that is news."""
        if letter.cause not in PROMPT_FAULTS or letter.stream != self._context.keys.lane(Lane.TRAIN).tasks:
            return False
        news = self._cursor.drop(letter.prompt or "", letter.cause.value)
        self._count_dropped()
        return news

    def batch_out(self) -> None:
        """A batch was filled: generation batches are counted anew."""
        self._waves = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Prompts dropped in the whole run, by cause; and the generation batches drawn for the batch at hand."""
        dropped = self._cursor.dropped
        counts = {f"prompts_{cause.value.replace('-', '_')}": float(dropped[cause.value]) for cause in PROMPT_FAULTS}
        if self._rule.refill == "generation_batches":
            counts["generation_batches"] = float(self._waves)
        return counts

    def _count_dropped(self) -> None:
        dropped = self._cursor.dropped
        for cause in PROMPT_FAULTS:
            PROMPTS_DROPPED.labels(self._context.keys.run, cause.value).set(dropped[cause.value])
