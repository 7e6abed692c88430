"""Owns dispatch: it sends the next prompts as tasks, continuously or in generation batches, and drops faulty prompts.

Must not judge groups. `backpressure` decides how many tasks are sent, `selection` which prompts.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import islice

from services.contracts import DROP_CAUSES, Lane, Prompt, SamplerState, Sampling, Task
from services.metrics import DROPPED_PROMPTS
from services.process.hosting import Context
from services.sampler.advantage.filtering import FILTERS
from services.sampler.backpressure import REFILLS, SlotLimits
from services.sampler.data import DataError, PromptsExhaustedError
from services.sampler.groups import Group, GroupTable
from services.sampler.queue.starvation import Level
from services.sampler.selection.posterior import PassRates
from services.sampler.selection.strategies import STRATEGIES, Place, Rule, Selection
from services.settings import Recipe
from services.streams.state.group_state import TASKS_AT_ONCE, GroupTransitions


def task_of(recipe: Recipe, group: str, prompt: Prompt, stop: int | None = None) -> Task:
    """The task for a training group; with `stop`, only for its first `stop` samples."""
    rollout = recipe.rollout
    sampling = Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
    )
    return Task(group=group, prompt=prompt, samples=recipe.algorithm.group_size, sampling=sampling, stop=stop)


class _Either:
    """What is in any of the parts, which are not copied."""

    def __init__(self, *parts: Container[str]) -> None:
        self._parts = parts

    def __contains__(self, key: object) -> bool:
        return any(key in part for part in self._parts)


class Dispatcher:
    """Draws prompts for the training lane and sends their tasks. Its `state` is stored with every task.

    Reopened groups are sent first, into the same slots.
    """

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
        self._undispatched = 0  # groups of the current generation batch
        self._prompts = {prompt.id: prompt for prompt in prompts}
        self._place = place
        # Drawn, but not sent because Redis was full: with the place in the walks after each.
        self._unsent: list[tuple[Prompt, Place]] = []
        self._count_dropped()

    @property
    def state(self) -> SamplerState:
        """The state from which a successor continues, together with the dropped prompts."""
        return self._state(self._next_group, self._place, self._generation_batches)

    @staticmethod
    def _state(next_group: int, place: Place, generation_batches: int) -> SamplerState:
        return SamplerState(
            cursor=place.cursor,
            scan=place.scan,
            draws=place.draws,
            next_group=next_group,
            generation_batches=generation_batches,
        )

    async def dispatch(
        self, steps_left: int, survival: float, step: int, level: Level, room: int | None = None
    ) -> None:
        """Dispatch as many groups as the free slots need, for the policy of rollout step `step`.

        `survival`: the estimated share of judged groups that are kept. `level`: that of starvation. `room`: the most
        groups, for lack of memory. Raises PromptsExhaustedError when every prompt was dropped, RedisFullError when
        Redis rejects the write for lack of memory.
        """
        limits = self._context.record.recipe.limits  # as edited last
        slot_limits = SlotLimits(
            groups_per_step=limits.groups_per_step,
            max_staleness=limits.max_staleness,
            steps_left=steps_left,
            max_inflight=limits.max_inflight_groups,
            generation_batch=limits.groups_per_step * self._rule.generation_batch_factor,
            widened=level >= Level.WIDEN,
            undispatched=self._undispatched,
        )
        count = REFILLS[self._rule.refill](self._table.flow(survival), slot_limits)
        if count and self._rule.refill == "generation_batches":
            if self.exhausted:
                return
            self._undispatched = self._undispatched or count
        count = count if room is None else min(count, room)
        if not count:
            return
        prefers = level >= Level.BOUNDARY and FILTERS[self._recipe.algorithm.filter].follows_pass_rate
        strategy = "boundary" if prefers else self._rule.selection.strategy
        drawn: set[str] = set()
        in_flight = _Either(self._table.prompts_in_flight, drawn)
        while count > 0:
            chunk = min(count, TASKS_AT_ONCE)
            reopened = list(islice(self._table.reopened.items(), chunk))
            while len(reopened) + len(self._unsent) < chunk:
                drawn.add(self._draw(strategy, step, in_flight))
            await self._send(reopened, self._unsent[: chunk - len(reopened)])
            count -= chunk

    @property
    def exhausted(self) -> bool:
        """Whether all generation batches that the recipe allows for one batch were dispatched, the last one whole."""
        return 0 < self._rule.max_generation_batches <= self._generation_batches

    def _draw(self, strategy: str, step: int, in_flight: Container[str]) -> str:
        """Draw the next prompt, and return its id."""
        try:
            prompt = self._selection.next(strategy, step, in_flight)
        except PromptsExhaustedError as error:
            limit = self._recipe.max_prompt_tokens
            raise PromptsExhaustedError(f"{error} (data.max_prompt_tokens, in force: {limit})") from None
        self._unsent.append((prompt, self._selection.place))
        return prompt.id

    async def _send(self, reopened: list[tuple[str, str]], drawn: list[tuple[Prompt, Place]]) -> None:
        """Dispatch reopened groups again, and groups of prompts that were drawn; all of them or none."""
        chosen = self._rule.selection
        stop = chosen.screen_samples if STRATEGIES[chosen.strategy].screens else None
        prompts = [(name, self._prompts[prompt]) for name, prompt in reopened]
        prompts += [(f"g{self._next_group + number:08d}", prompt) for number, (prompt, _) in enumerate(drawn)]
        tasks = [task_of(self._recipe, name, prompt, stop) for name, prompt in prompts]
        next_group, place = self._next_group + len(drawn), drawn[-1][1] if drawn else self._place
        # A generation batch counts once it is dispatched whole: a lack of memory must not exhaust their number.
        batches = self._generation_batches + (self._undispatched == len(tasks))
        await self._transitions.dispatch(Lane.TRAIN, tasks, self._state(next_group, place, batches))
        self._next_group, self._place, self._generation_batches = next_group, place, batches
        self._undispatched = max(0, self._undispatched - len(tasks))
        del self._unsent[: len(drawn)]
        for task in tasks:
            self._table.add(task.group, Group(task))

    def check_reopened(self) -> None:
        """Raise DataError if a reopened group's prompt is not among the training prompts."""
        for group, prompt in self._table.reopened.items():
            if prompt not in self._prompts:
                raise DataError(
                    f"prompt {prompt!r} of group {group} is no longer among the training prompts; restore the data "
                    "that the run was started with"
                )

    def drop(self, causes: Mapping[str, str]) -> None:
        """Never draw these prompts again: the cause of each, by prompt id."""
        for prompt, cause in causes.items():
            self._selection.drop(prompt, cause)
        self._count_dropped()

    def begin_batch(self) -> None:
        """Count generation batches from 0 again, because a batch was published or a paused run was resumed."""
        self._generation_batches = self._undispatched = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Prompts dropped in the whole run, by cause; and the generation batches dispatched for the next batch."""
        dropped = self._selection.walk.dropped
        counts = {f"prompts_{cause.replace('-', '_')}": float(dropped[cause]) for cause in DROP_CAUSES}
        if self._rule.refill == "generation_batches":
            counts["generation_batches"] = float(self._generation_batches)
        return counts

    def _count_dropped(self) -> None:
        dropped = self._selection.walk.dropped
        for cause in DROP_CAUSES:
            DROPPED_PROMPTS.labels(self._context.keys.run, cause).set(dropped[cause])
