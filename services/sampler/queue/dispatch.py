"""Owns dispatch: it sends the next prompts as tasks, continuously or in generation batches, and drops faulty prompts.

Must not judge groups. `backpressure` decides how many tasks are sent, `selection` which prompts.
"""

from __future__ import annotations

from services.contracts import Cause, DeadLetter, Lane, Prompt, SamplerState, Sampling, Task
from services.metrics import DROPPED_PROMPTS
from services.process import Context
from services.sampler.backpressure import REFILLS, SlotLimits
from services.sampler.data import PromptsExhaustedError
from services.sampler.groups import GroupTable
from services.sampler.queue.starvation import Level
from services.sampler.selection.posterior import PassRates
from services.sampler.selection.strategies import STRATEGIES, Place, Rule, Selection
from services.settings import Recipe
from services.streams.state.group_state import GroupTransitions

PROMPT_FAULTS = (Cause.TOO_LONG, Cause.REFUSED)
"""Causes that are faults of the prompt: every further draw would fail in the same way."""


def task_of(recipe: Recipe, group: str, prompt: Prompt, stop: int | None = None) -> Task:
    """The task for a training group; with `stop`, only for its first `stop` samples."""
    rollout = recipe.rollout
    sampling = Sampling(temperature=rollout.temperature, top_p=rollout.top_p, max_new_tokens=rollout.max_new_tokens)
    return Task(group=group, prompt=prompt, samples=recipe.algorithm.group_size, sampling=sampling, stop=stop)


class Dispatcher:
    """Draws prompts for the training lane and sends their tasks. Its `state` is stored with every task."""

    def __init__(
        self,
        context: Context,
        transitions: GroupTransitions,
        table: GroupTable,
        prompts: tuple[Prompt, ...],
        state: SamplerState,
    ) -> None:
        self._context = context
        self._recipe = context.record.recipe
        self._transitions = transitions
        self._table = table
        self._rule = self._recipe.algorithm.dynamic_sampling
        chosen = self._rule.selection
        self.rates = PassRates(chosen.half_life)
        rule = Rule(self._recipe.algorithm.group_size, chosen.exploration)
        place = Place(state.cursor, state.scan, state.draws)
        self._selection = Selection(prompts, self._recipe.seed, self.rates, rule, place)
        self._next_group = state.next_group
        self._generation_batches = state.generation_batches
        self._unsent: Prompt | None = None
        self._count_dropped()

    @property
    def state(self) -> SamplerState:
        """The state from which a successor continues. It reads the dropped prompts from the dead letters."""
        place = self._selection.place
        return SamplerState(
            cursor=place.cursor,
            scan=place.scan,
            draws=place.draws,
            next_group=self._next_group,
            generation_batches=self._generation_batches,
        )

    async def dispatch(self, steps_left: int, survival: float, version: int, level: Level) -> None:
        """Dispatch as many groups as the free slots need, at policy `version` and this starvation level.

        `survival`: the estimated share of judged groups that are kept. Raises PromptsExhaustedError when every prompt
        was dropped, RedisFullError when Redis rejects the write for lack of memory.
        """
        limits = self._recipe.limits
        slot_limits = SlotLimits(
            groups_per_step=limits.groups_per_step,
            max_staleness=limits.max_staleness,
            steps_left=steps_left,
            max_inflight=limits.max_inflight_groups,
            generation_batch=limits.groups_per_step * self._rule.generation_batch_factor,
            widened=level >= Level.WIDEN,
        )
        count = REFILLS[self._rule.refill](self._table.flow(survival), slot_limits)
        if count and self._rule.refill == "generation_batches":
            if self.exhausted:
                return
            self._generation_batches += 1
        in_flight = self._table.prompts_in_flight
        strategy = "boundary" if level >= Level.BOUNDARY else self._rule.selection.strategy
        for _ in range(count):
            # A prompt whose task a full Redis rejected is sent before another one is drawn.
            self._unsent = self._unsent or self._draw(strategy, version, in_flight)
            in_flight.add(self._unsent.id)
            await self._send(self._unsent)
            self._unsent = None

    @property
    def exhausted(self) -> bool:
        """Whether all generation batches that the recipe allows for one batch were dispatched."""
        return 0 < self._rule.max_generation_batches <= self._generation_batches

    def _draw(self, strategy: str, version: int, in_flight: set[str]) -> Prompt:
        try:
            return self._selection.next(strategy, version, in_flight)
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
        self._table.dispatched(task)

    def drop(self, letter: DeadLetter) -> bool:
        """Drop the prompt of a dead letter if the prompt is at fault. True if it was not dropped before."""
        if letter.cause not in PROMPT_FAULTS or letter.stream != self._context.keys.lane(Lane.TRAIN).tasks:
            return False
        dropped = self._selection.drop(letter.prompt or "", letter.cause.value)
        self._count_dropped()
        return dropped

    def begin_batch(self) -> None:
        """Count generation batches from 0 again, because a batch was published or a paused run was resumed."""
        self._generation_batches = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Prompts dropped in the whole run, by cause; and the generation batches dispatched for the next batch."""
        dropped = self._selection.walk.dropped
        counts = {f"prompts_{cause.value.replace('-', '_')}": float(dropped[cause.value]) for cause in PROMPT_FAULTS}
        if self._rule.refill == "generation_batches":
            counts["generation_batches"] = float(self._generation_batches)
        return counts

    def _count_dropped(self) -> None:
        dropped = self._selection.walk.dropped
        for cause in PROMPT_FAULTS:
            DROPPED_PROMPTS.labels(self._context.keys.run, cause.value).set(dropped[cause.value])
