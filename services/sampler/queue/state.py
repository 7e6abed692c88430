"""Owns the state that the parts of the sampling queue share: its groups, its next and last rollout step, starvation.

Must not decide anything about a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.contracts import CommittedPolicy, Lane, Prompt, Release, SamplerState
from services.process.hosting import Context
from services.sampler.advantage.filtering import FILTERS
from services.sampler.backpressure import SurvivalEstimate
from services.sampler.groups import GroupTable, recover
from services.sampler.queue.batching import Window
from services.sampler.queue.dispatch import Dispatcher
from services.sampler.queue.starvation import Level, Starvation
from services.sampler.queue.unknowns import UnjudgedPrompts, UnknownShare
from services.settings import Recipe, StarvationSettings
from services.streams.state.group_state import GroupTransitions
from services.streams.state.policy_history import read_policy

NO_ESCALATION = StarvationSettings(widen_after=None, boundary_after=None, partial_after=None, pause_after=None)


def starvation_of(recipe: Recipe) -> Starvation:
    """The initial starvation state. Generation batches have max_generation_batches in place of the levels."""
    sampling = recipe.algorithm.dynamic_sampling
    escalation = NO_ESCALATION if sampling.refill == "generation_batches" else sampling.starvation
    if not FILTERS[recipe.algorithm.filter].follows_pass_rate:
        escalation = escalation.model_copy(update={"boundary_after": None})
    return Starvation(escalation, recipe.limits.groups_per_step)


@dataclass
class QueueState:
    """The state of one queue. `verdicts`: how many this sampler has recorded.

    `last_step`: the run's last rollout step; a spent token budget lowers it. `letters_after`: the last dead letter
    before the run's last rewind. `newest_version`: the newest policy version of a verdict that this sampler has read.
    """

    context: Context
    transitions: GroupTransitions
    table: GroupTable
    dispatcher: Dispatcher
    starvation: Starvation
    window: Window
    unknown_share: UnknownShare
    last_step: int
    next_step: int = 1
    letters_after: str = "0-0"
    verdicts: int = 0
    newest_version: int = -1
    survival: SurvivalEstimate = field(default_factory=SurvivalEstimate)
    unjudged: UnjudgedPrompts = field(default_factory=UnjudgedPrompts)

    @classmethod
    async def load(cls, context: Context, transitions: GroupTransitions, prompts: tuple[Prompt, ...]) -> QueueState:
        """The state that an earlier sampler of this run left in Redis, or that of a new run."""
        redis, keys, recipe = context.redis, context.keys, context.record.recipe
        table = await recover(redis, keys, Lane.TRAIN)
        stored = await redis.get(keys.sampler_state)
        sampler_state = SamplerState.model_validate_json(stored) if stored else SamplerState(cursor=0, next_group=0)
        dispatcher = Dispatcher(context, transitions, table, prompts, sampler_state)
        dispatcher.check_reopened()
        dropped = await redis.hgetall(keys.dropped)
        dispatcher.drop({prompt.decode(): cause.decode() for prompt, cause in dropped.items()})
        posteriors = await redis.hgetall(keys.posteriors)
        policy = await read_policy(redis, keys) or CommittedPolicy(version=0, step=0)
        rates = {prompt.decode(): entry.decode() for prompt, entry in posteriors.items()}
        dispatcher.rates.load(rates, policy.step_of(policy.announced))
        state = cls(
            context,
            transitions,
            table,
            dispatcher,
            starvation_of(recipe),
            Window(recipe),
            UnknownShare.of(recipe),
            last_step=recipe.limits.rollout_steps,
        )
        await state._load_progress()
        return state

    async def _load_progress(self) -> None:
        """Load the published step, the starvation level and the last rewind of an earlier sampler."""
        redis, keys = self.context.redis, self.context.keys
        stored = {name.decode(): value.decode() for name, value in (await redis.hgetall(keys.queue)).items()}
        self.next_step = int(stored.get("step", 0)) + 1
        if stored.get("last") == "1":
            self.last_step = int(stored["step"])
        self.letters_after = stored.get("letters", "0-0")
        judged = int(await redis.hget(keys.lane(Lane.TRAIN).counters, "judged") or 0)
        self.starvation.judged = judged - int(stored.get("judged", 0))
        # The previous sampler reported this level, unless it is PAUSE: a reported pause restarts the count.
        self.starvation.update(len(self.table.kept), "")
        if self.starvation.level is Level.PAUSE:
            self.starvation.level = Level.NORMAL
        if self.dispatcher.exhausted and not self.table.generating and not await redis.exists(keys.starved):
            self.dispatcher.begin_batch()  # the starved run was resumed

    @property
    def recipe(self) -> Recipe:
        """The run's recipe."""
        return self.context.record.recipe

    def begin_batch(self) -> None:
        """Restart the counts of the next batch, because a batch was published or a paused run was resumed."""
        self.dispatcher.begin_batch()
        self.starvation.begin()

    def resume(self) -> None:
        """Start again after a pause: what was counted before it neither pauses the run again nor drops a prompt."""
        self.begin_batch()
        self.unknown_share.clear()
        self.unjudged.clear()

    async def release(self, name: str, release: Release, reason: str) -> None:
        """End a group without training it, for a reason."""
        self.window.released(release)
        await self.transitions.release(Lane.TRAIN, name, release, self.recipe.algorithm.group_size, reason)
        self.table.remove(name)
