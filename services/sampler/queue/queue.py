"""Owns the dynamic-sampling queue of the training lane: dispatch, verdicts in, groups kept or released, batches out.

Must not hold a rule of its own: what is kept, drawn, stale or starving is decided in credit, selection, pacing and
starvation.
"""

from __future__ import annotations

import logging

from services.contracts import (
    Cause,
    CommittedPolicy,
    Lane,
    Release,
    SamplerSnapshot,
    SamplerState,
    Task,
    Verdict,
    VerdictResult,
)
from services.metrics import MESSAGES
from services.process import Context
from services.sampler.advantage.filtering import KEPT, decide
from services.sampler.backpressure import SurvivalEstimate, staleness
from services.sampler.data import Splits
from services.sampler.evaluation.schedule import Timetable
from services.sampler.groups import Group, Ledger, recall, recover
from services.sampler.orphans import Orphans
from services.sampler.queue.batching import Window, make_batch
from services.sampler.queue.dispatch import PROMPT_FAULTS, Dispatcher
from services.sampler.queue.maintenance import Housekeeping
from services.sampler.queue.reconcile import Search
from services.sampler.queue.starvation import Ladder, Rung, Starvation
from services.sampler.selection.screening import COMPLETE, screen
from services.streams.connection.functions import RedisFullError
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.keys import EVALUATION_GROUP, order_of
from services.streams.state.group_counts import group_counts, response_tokens
from services.streams.state.group_state import MORE, GroupTransitions, RefusedMessageError
from services.streams.state.policy_history import read_policy
from services.streams.state.runs import is_paused

log = logging.getLogger(__name__)

VERDICTS, LEARNER, KEPT_GROUPS = "verdicts", "learner", "kept-groups"
"""The queue's waits."""
UNBOUNDED = Ladder(None, None, None, None)


class SamplingQueue:
    """The training lane: dispatch with refill until the run's steps are done."""

    def __init__(
        self, context: Context, transitions: GroupTransitions, splits: Splits, ledger: Ledger, state: SamplerState,
        housekeeping: Housekeeping,
    ) -> None:  # fmt: skip
        self._context = context
        self._recipe = context.record.recipe
        self._transitions = transitions
        self._ledger = ledger
        self._dispatcher = Dispatcher(context, transitions, ledger, splits.train, state)
        self._next_step = 1
        self._last_step = self._recipe.limits.rollout_steps
        self._survival = SurvivalEstimate()
        self._window = Window(self._recipe)
        limits = self._recipe.limits
        self._sampling = self._recipe.algorithm.dynamic_sampling
        # Generation batches have a limit of their own.
        waves = self._sampling.refill == "generation_batches"
        ladder = UNBOUNDED if waves else Ladder(**self._sampling.starvation.model_dump())
        self._starvation = Starvation(ladder, limits.groups_per_step)
        self._housekeeping = housekeeping
        self._orphans = Orphans(context, Lane.TRAIN)
        self._strays = Search(context.redis, context.keys)
        self._dead_after = "0-0"
        self._rewound_at = (0, 0)
        self._awaited: dict[str, str] = {}
        self._verdicts = Consumer(
            context.redis, context.keys, context.keys.lane(Lane.TRAIN).verdicts, "sampler",
            context.heartbeat.info.id, Verdict, limits.lease_s, limits.max_deliveries,
        )  # fmt: skip

    @classmethod
    async def open(
        cls, context: Context, transitions: GroupTransitions, splits: Splits, housekeeping: Housekeeping
    ) -> SamplingQueue:  # fmt: skip
        """Go on where an earlier sampler of this run stopped, or begin."""
        redis, keys = context.redis, context.keys
        ledger = await recover(redis, keys, Lane.TRAIN)
        stored = await redis.get(keys.sampler_state)
        state = SamplerState.model_validate_json(stored) if stored else SamplerState(cursor=0, next_group=0)
        queue = cls(context, transitions, splits, ledger, state, housekeeping)
        posteriors = await redis.hgetall(keys.posteriors)
        queue._dispatcher.rates.load({prompt.decode(): entry.decode() for prompt, entry in posteriors.items()})
        await queue._find_place()
        await queue._verdicts.open()
        return queue

    async def _find_place(self) -> None:
        """Where an earlier sampler stood: its step, its rung, the letters that it has dealt with."""
        redis, keys = self._context.redis, self._context.keys
        out = {name.decode(): value.decode() for name, value in (await redis.hgetall(keys.queue)).items()}
        self._next_step = int(out.get("step", 0)) + 1
        if out.get("last") == "1":
            self._last_step = int(out["step"])
        self._rewound_at = order_of(out.get("letters", "0-0"))
        judged = int(await redis.hget(keys.lane(Lane.TRAIN).counters, "judged") or 0)
        self._starvation.judged = judged - int(out.get("judged", 0))
        # Whoever was there before has told of the rung; of a pause it cannot have, for it would count from there.
        self._starvation.update(len(self._ledger.kept), "")
        if self._starvation.rung is Rung.PAUSE:
            self._starvation.rung = Rung.NORMAL
        self._housekeeping.report_rung(self._starvation.rung)
        if self._dispatcher.exhausted and not self._ledger.generating and not await redis.exists(keys.starved):
            self._dispatcher.begin_batch()  # somebody took the starved run on

    @property
    def last_step(self) -> int:
        """The run's last rollout step; a spent budget brings it forward."""
        return self._last_step

    async def run(self, timetable: Timetable) -> None:
        """Sample until the last step is trained, beside the evaluations; raises what one of them raises."""
        try:
            while not self._context.stopping.is_set():
                policy = await read_policy(self._context.redis, self._context.keys) or CommittedPolicy(
                    version=0, step=0
                )
                if policy.step >= self._last_step:
                    return
                paused = await self._paused()
                if not paused:
                    await timetable.tick(policy.step)
                await self._turn(policy, paused)
        finally:
            for name in self._awaited:
                self._context.waits.done(name)

    async def _turn(self, policy: CommittedPolicy, paused: bool) -> None:
        self._ledger.trained(policy.step)
        await self._publish_batches(policy)
        await self._bury_dead()
        if not paused:
            await self._dispatch(policy)
        for delivery in await self._verdicts.read(256, 0.25):
            await self._take_in(delivery)
        await self._release_orphans()
        await self._take_in_strays(policy.step)
        self._note_waits()

    async def _take_in_strays(self, trained: int) -> None:
        """Look after groups that were redriven, and keep the groups of a batch again that is gone from Redis."""
        strays = await self._strays.look(self._ledger, trained)
        self._ledger.generating |= strays.groups
        lost = strays.lost
        if lost is None or not await self._transitions.reclaim_batch(lost.step, lost.entry, lost.groups):
            return
        kept = {one: await recall(self._context.redis, self._context.keys, one, KEPT) for one in lost.groups}
        self._ledger.taken_back(lost.step, {name: group for name, group in kept.items() if group})
        self._next_step, self._last_step = lost.step, self._recipe.limits.rollout_steps

    async def _release_orphans(self) -> None:
        """End groups of which no stream holds anything any more, so that nothing will ever be heard of them."""
        for name in await self._orphans.among(self._ledger.generating):
            await self._context.event_log.write("group-orphaned", f"{name}: its messages are gone from all streams")
            await self._release(name, Release.DEAD)
            del self._ledger.generating[name]

    async def _paused(self) -> bool:
        """Whether nothing may be dispatched now: somebody paused the run, or it starves."""
        if await is_paused(self._context.redis, self._context.keys):
            self._starvation.rung = Rung.PAUSE
            return True
        if self._starvation.rung is Rung.PAUSE:
            self._begin_batch()
            self._starvation.rung = Rung.NORMAL
            self._housekeeping.report_rung(Rung.NORMAL)
        return False

    async def _dispatch(self, policy: CommittedPolicy) -> None:
        await self._climb()
        if self._starvation.rung is Rung.PAUSE or await self._housekeeping.short_of_memory():
            return
        try:
            await self._dispatcher.dispatch(
                self._last_step - policy.step, self._survival.value, policy.version, self._starvation.rung
            )
        except RedisFullError as error:
            self._housekeeping.refused(str(error))

    async def _climb(self) -> None:
        """Take the rung of the starvation ladder that fits, and tell of it; on the last one the run pauses."""
        if len(self._ledger.kept) >= self._recipe.limits.groups_per_step:
            self._starvation.begin()
        if self._dispatcher.exhausted and not self._ledger.generating:
            change = self._starvation.force(len(self._ledger.kept), self._window.histogram)
        else:
            change = self._starvation.update(len(self._ledger.kept), self._window.histogram)
        if change is None:
            return
        if change.rung is Rung.PAUSE:
            await self._transitions.mark_starved(change.text)
        await self._context.event_log.write(change.kind, change.text)
        self._housekeeping.report_rung(change.rung)

    async def _take_in(self, delivery: Delivery[Verdict]) -> None:
        self._context.waits.done(VERDICTS)
        verdict = delivery.message
        group = self._ledger.generating.get(verdict.group) or await self._recalled(verdict.group)
        decision, rest, posterior = "", None, ("", "")
        if group is not None and verdict.index < group.task.samples:
            group.verdicts.setdefault(verdict.index, verdict)
            decision, rest = self._decide(group)
            posterior = self._learnt(group, decision)
        try:
            await self._transitions.record_verdict(
                Lane.TRAIN, delivery.lease, verdict, decision, self._recipe.algorithm.group_size, rest=rest,
                posterior=posterior,
            )  # fmt: skip
        except RefusedMessageError as error:
            await self._verdicts.dead_letter(delivery, str(error), Cause.INVALID)
            MESSAGES.labels(self._context.keys.run, "train-verdicts", VerdictResult.REFUSED).inc()
            return
        MESSAGES.labels(self._context.keys.run, "train-verdicts", VerdictResult.RECORDED).inc()
        if group is not None and decision:
            self._note_decision(verdict.group, group, decision, rest)

    def _decide(self, group: Group) -> tuple[str, Task | None]:
        """How a group goes on, '' while verdicts are missing; and the task for the rest of it, if that is wanted."""
        if not group.judged:
            return "", None
        min_known = self._sampling.min_known or group.task.samples
        if group.task.stop is None:
            return decide(group.outcomes, min_known, self._sampling.enabled), None
        screened = screen(group.outcomes, group.task.samples, min_known)
        if screened == COMPLETE:
            return MORE, group.task.model_copy(update={"stop": None})
        return screened, None

    def _learnt(self, group: Group, decision: str) -> tuple[str, str]:
        """What a decided group says of its prompt's pass rate, as it is stored."""
        if decision in ("", MORE):
            return "", ""
        known = [outcome for outcome in group.outcomes if outcome != "unknown"]
        if not known:
            return "", ""
        prompt = group.task.prompt.id
        self._dispatcher.rates.observe(
            prompt, sum(outcome == "correct" for outcome in known), len(known), group.oldest_version
        )
        return prompt, self._dispatcher.rates.entry(prompt)

    def _note_decision(self, name: str, group: Group, decision: str, rest: Task | None) -> None:
        if rest is not None:
            group.task = rest
            return
        self._window.judged(group, decision)
        self._survival.observe(decision == KEPT)
        self._starvation.group_judged()
        if decision == KEPT:
            self._ledger.keep(name)
        else:
            del self._ledger.generating[name]

    async def _recalled(self, name: str) -> Group | None:
        """A dead group that was delivered again is taken up as soon as something is heard of it."""
        known = name in self._ledger.kept or name.startswith(EVALUATION_GROUP)
        group = None if known else await recall(self._context.redis, self._context.keys, name)
        if group is not None:
            self._ledger.generating[name] = group
        return group

    async def _bury_dead(self) -> None:
        """A task or sample that was given up ends its group, and its prompt where that is at fault: the run goes on.

        Letters are read from the first one, so that a new sampler knows the dropped prompts before it draws any.
        """
        for entry, letter in await self._context.event_log.dead_letters(self._dead_after):
            self._dead_after = entry
            news = self._dispatcher.drop(letter)
            # What was given up before the run was taken back has been asked for again since.
            if letter.cause is Cause.INVALID or order_of(entry) <= self._rewound_at or not letter.group:
                continue
            if letter.group not in self._ledger.generating and await self._recalled(letter.group) is None:
                continue
            if news:
                await self._context.event_log.write(
                    f"prompt-{letter.cause.value}", f"never drawn again: {letter.reason}"
                )
            elif letter.cause not in PROMPT_FAULTS:
                await self._context.event_log.write("group-dead", f"{letter.group}: {letter.reason}")
            await self._release(letter.group, Release.DEAD)
            del self._ledger.generating[letter.group]

    async def _publish_batches(self, policy: CommittedPolicy) -> None:
        """Publish every batch whose policy may consume it now without exceeding the staleness bound."""
        limits = self._recipe.limits
        while self._next_step <= self._last_step:
            ahead = self._next_step - 1 - policy.step
            if ahead > limits.max_staleness:
                return
            consuming = policy.version + ahead
            await self._drop_stale(consuming)
            names = self._ledger.next_batch(self._sampling.consumption, limits.groups_per_step)
            partial = self._starvation.rung is Rung.PARTIAL and len(names) > 0
            if len(names) < limits.groups_per_step and not partial:
                return
            await self._publish_batch(consuming, names)

    async def _publish_batch(self, consuming: int, names: list[str]) -> None:
        groups = {name: self._ledger.kept[name] for name in names}
        metrics = self._window.metrics() | self._dispatcher.metrics
        metrics["groups_missing"] = float(self._recipe.limits.groups_per_step - len(names))
        self._begin_batch()
        tokens = await response_tokens(self._context.redis, self._context.keys)
        budget = self._recipe.limits.response_tokens
        if budget is not None and tokens >= budget:
            self._last_step = self._next_step
        batch = make_batch(
            self._recipe, self._next_step, consuming, groups, self._dispatcher.state, metrics,
            last=self._next_step == self._last_step, snapshot=self._context.keys.snapshot(self._next_step),
        )  # fmt: skip
        snapshot = SamplerSnapshot(
            step=batch.step, state=batch.sampler_state, posteriors=self._dispatcher.rates.dump(),
            queue=tuple(name for name in self._ledger.open_groups if name not in groups),
            counts=await group_counts(self._context.redis, self._context.keys), response_tokens=tokens,
        )  # fmt: skip
        if not await self._transitions.publish_batch(batch, snapshot):
            raise RuntimeError(f"batch {self._next_step} holds a group that is no longer kept")
        self._ledger.batch_out(self._next_step, names)
        self._window = Window(self._recipe)
        self._next_step += 1

    def _begin_batch(self) -> None:
        self._dispatcher.begin_batch()
        self._starvation.begin()

    async def _drop_stale(self, consuming: int) -> None:
        for name, group in list(self._ledger.kept.items()):
            if staleness(consuming, group.oldest_version) > self._recipe.limits.max_staleness:
                await self._release(name, Release.STALE)
                del self._ledger.kept[name]

    async def _release(self, name: str, release: Release) -> None:
        self._window.released(release)
        await self._transitions.release(Lane.TRAIN, name, release, self._recipe.algorithm.group_size)

    def _note_waits(self) -> None:
        """Say what the queue waits for: verdicts, the learner, kept groups."""
        generating, out = self._ledger.generating, self._ledger.batched
        lacking = self._recipe.limits.groups_per_step - len(self._ledger.kept)
        oldest, step = min(generating, default=""), min(out, default=0)
        lacks = generating and lacking > 0 and not out
        awaited: dict[str, tuple[str, str]] = {
            VERDICTS: (oldest, f"{len(generating)} groups, the oldest {oldest}"),
            LEARNER: (str(step or ""), f"the learner to train rollout step {step}"),
            KEPT_GROUPS: (
                str(self._next_step) if lacks else "", f"{lacking} more kept groups for rollout step {self._next_step}"
            ),
        }  # fmt: skip
        for name, (what, text) in awaited.items():
            if what != self._awaited.get(name):
                # The step or group that was waited for has come: this is another wait.
                self._context.waits.done(name)
                self._awaited[name] = what
            if what:
                self._context.waits.pending(name, text, self._recipe.limits.stall_timeout_s)
