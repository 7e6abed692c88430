"""Owns what goes out: the next prompts as tasks, continuously or by generation batches; and which are dropped for good.

Must not judge groups; how many go out is decided in pacing, which prompts in selection.
"""

from __future__ import annotations

from services.contracts import Cause, DeadLetter, Lane, Prompt, SamplerState, Sampling, Task
from services.metrics import DROPPED_PROMPTS
from services.process import Context
from services.sampler.backpressure import REFILLS, Bounds
from services.sampler.data import PromptsExhaustedError
from services.sampler.groups import Ledger
from services.sampler.queue.starvation import Rung
from services.sampler.selection.posterior import PassRates
from services.sampler.selection.strategies import STRATEGIES, Place, Rule, Selection
from services.settings import Recipe
from services.streams.state.group_state import GroupTransitions

PROMPT_FAULTS = (Cause.TOO_LONG, Cause.REFUSED)
"""Causes that every further draw of the same prompt would meet again."""


def task_of(recipe: Recipe, group: str, prompt: Prompt, stop: int | None = None) -> Task:
    """The task that asks for a training group; with `stop`, for its first samples only."""
    rollout = recipe.rollout
    sampling = Sampling(temperature=rollout.temperature, top_p=rollout.top_p, max_new_tokens=rollout.max_new_tokens)
    return Task(group=group, prompt=prompt, samples=recipe.algorithm.group_size, sampling=sampling, stop=stop)


class Dispatcher:
    """Draws prompts for the training lane; `state` is where it stands, stored with every task it sends."""

    def __init__(
        self,
        context: Context,
        transitions: GroupTransitions,
        ledger: Ledger,
        prompts: tuple[Prompt, ...],
        state: SamplerState,
    ) -> None:
        self._context = context
        self._recipe = context.record.recipe
        self._transitions = transitions
        self._ledger = ledger
        self._rule = self._recipe.algorithm.dynamic_sampling
        chosen = self._rule.selection
        self.rates = PassRates(chosen.half_life)
        self._selection = Selection(
            prompts, self._recipe.seed, self.rates, Rule(self._recipe.algorithm.group_size, chosen.exploration),
            Place(state.cursor, state.scan, state.draws),
        )  # fmt: skip
        self._next_group = state.next_group
        self._waves = state.generation_batches
        self._in_hand: Prompt | None = None
        self._count_dropped()

    @property
    def state(self) -> SamplerState:
        """Enough for a successor to go on; which prompts were dropped, it reads from the dead letters."""
        place = self._selection.place
        return SamplerState(
            cursor=place.cursor, scan=place.scan, draws=place.draws, next_group=self._next_group,
            generation_batches=self._waves,
        )  # fmt: skip

    async def dispatch(self, steps_left: int, survival: float, version: int, rung: Rung) -> None:
        """Send as many groups as are wanted now, at policy `version` and on this rung of the starvation ladder.

        Raises PromptsExhaustedError when every prompt was dropped, RedisFullError when Redis takes no more.
        """
        limits = self._recipe.limits
        bounds = Bounds(
            limits.groups_per_step, limits.max_staleness, steps_left, limits.max_inflight_groups,
            limits.groups_per_step * self._rule.generation_batch_factor, widened=rung >= Rung.WIDEN,
        )  # fmt: skip
        count = REFILLS[self._rule.refill](self._ledger.flow(survival), bounds)
        if count and self._rule.refill == "generation_batches":
            if self.exhausted:
                return
            self._waves += 1
        under_way = self._ledger.prompts_under_way
        strategy = "boundary" if rung >= Rung.BOUNDARY else self._rule.selection.strategy
        for _ in range(count):
            # What a full Redis refused is sent before anything else is drawn.
            self._in_hand = self._in_hand or self._draw(strategy, version, under_way)
            under_way.add(self._in_hand.id)
            await self._send(self._in_hand)
            self._in_hand = None

    @property
    def exhausted(self) -> bool:
        """Whether as many generation batches as the recipe allows did not fill one batch."""
        return 0 < self._rule.max_generation_batches <= self._waves

    def _draw(self, strategy: str, version: int, under_way: set[str]) -> Prompt:
        try:
            return self._selection.next(strategy, version, under_way)
        except PromptsExhaustedError as error:
            limit = self._recipe.max_prompt_tokens
            raise PromptsExhaustedError(f"{error} (data.max_prompt_tokens, in force: {limit})") from None

    async def _send(self, prompt: Prompt) -> None:
        chosen = self._rule.selection
        stop = chosen.screen_samples if STRATEGIES[chosen.strategy].screens else None
        task = task_of(self._recipe, f"g{self._next_group:08d}", prompt, stop)
        after = self.state.model_copy(update={"next_group": self._next_group + 1})
        await self._transitions.dispatch(Lane.TRAIN, task, after)
        self._next_group += 1
        self._ledger.dispatched(task)

    def drop(self, letter: DeadLetter) -> bool:
        """Never draw a letter's prompt again if the prompt itself is at fault; whether that is news."""
        if letter.cause not in PROMPT_FAULTS or letter.stream != self._context.keys.lane(Lane.TRAIN).tasks:
            return False
        news = self._selection.drop(letter.prompt or "", letter.cause.value)
        self._count_dropped()
        return news

    def begin_batch(self) -> None:
        """A batch went out, or a paused run goes on: generation batches are counted anew."""
        self._waves = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Prompts dropped in the whole run, by cause; and the generation batches drawn for the batch at hand."""
        dropped = self._selection.walk.dropped
        counts = {f"prompts_{cause.value.replace('-', '_')}": float(dropped[cause.value]) for cause in PROMPT_FAULTS}
        if self._rule.refill == "generation_batches":
            counts["generation_batches"] = float(self._waves)
        return counts

    def _count_dropped(self) -> None:
        dropped = self._selection.walk.dropped
        for cause in PROMPT_FAULTS:
            DROPPED_PROMPTS.labels(self._context.keys.run, cause.value).set(dropped[cause.value])
