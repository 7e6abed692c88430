"""Owns a held-out evaluation on the run's own fleet: tasks out on the evaluation lane, one record a set back.

Must not influence training groups, nor decide when to evaluate; the timetable does.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean

from services.contracts import (
    Cause,
    EvaluationRecord,
    Lane,
    Outcome,
    PassAt,
    Prompt,
    Release,
    Sampling,
    Task,
    Verdict,
    VerdictResult,
)
from services.metrics import EVALUATION_PROMPTS, EVALUATION_SCORE, MESSAGES
from services.process import Context
from services.sampler.data import load_set, load_splits
from services.sampler.evaluation.scores import Response, Score, average, majority, over_questions, passes, sizes
from services.sampler.groups import Group
from services.sampler.orphans import Orphans
from services.settings import HELD_OUT, Recipe
from services.streams.connection.functions import RedisFullError
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.keys import EVALUATION_GROUP
from services.streams.state.group_state import EVALUATED, GroupTransitions, RefusedMessageError
from services.streams.state.heartbeat import live_processes
from services.streams.state.runs import is_paused

SHARE_BESIDE_TRAINING = 0.5
"""Of the fleet's sequence slots, how many an evaluation may take while training goes on: replicas serve it first."""
HASHES_AT_ONCE = 100
WAIT = "evaluation"
CORRECTNESS = {Outcome.CORRECT: True, Outcome.WRONG: False, Outcome.UNKNOWN: None}


@dataclass(frozen=True)
class HeldOut:
    """A set of questions that are never trained on, each answered `samples` times."""

    name: str
    prompts: tuple[Prompt, ...]
    samples: int


def held_out_sets(
    recipe: Recipe, own: tuple[Prompt, ...], others: Mapping[str, tuple[Prompt, ...]]
) -> tuple[HeldOut, ...]:
    """The sets of `recipe.evaluated_sets`: `own` is the run's held-out split, `others` are evaluation.sets by name."""
    settings = recipe.evaluation
    samples = {one.name: one.samples or settings.samples for one in settings.sets}
    prompts = {HELD_OUT: own, **others}
    return tuple(
        HeldOut(name, prompts[name], samples.get(name, settings.samples)) for name in recipe.evaluated_sets
    )  # fmt: skip


def load_held_out(recipe: Recipe) -> tuple[HeldOut, ...]:
    """The sets of a run that only evaluates; training prompts are read only where the held-out split needs them.

    Raises DataError. Blocks for as long as the files take to read.
    """
    own = load_splits(recipe.data).held_out if recipe.data.held_out else ()
    return held_out_sets(recipe, own, {one.name: load_set(one, one.prompts) for one in recipe.evaluation.sets})


def sampling_of(recipe: Recipe) -> Sampling:
    """How evaluations draw; training has settings of its own."""
    settings = recipe.evaluation
    return Sampling(temperature=settings.temperature, top_p=settings.top_p, max_new_tokens=recipe.evaluation_new_tokens)


def summarise(
    name: str, held_out: HeldOut, sampling: Sampling, groups: list[Group], dropped: int
) -> EvaluationRecord:  # fmt: skip
    """The record of one evaluation of one set: `groups` are its judged prompts, `dropped` got no answer.

    Means and standard errors are over prompts, each by its known verdicts; see services.sampler.evaluation.scores.
    """
    questions = [[Response(CORRECTNESS[one.outcome], one.answer) for one in group.in_order] for group in groups]
    accuracy = over_questions([average(one) for one in questions]) or Score(0.0, 0.0)
    votes = over_questions([majority(one) for one in questions])
    facts = [verdict.facts for group in groups for verdict in group.in_order]
    pass_at = {k: over_questions([passes(one, k) for one in questions]) for k in sizes(held_out.samples)}
    return EvaluationRecord(
        name=name,
        set=held_out.name,
        version=min((one.oldest_version for one in facts), default=0),
        newest_version=max((one.newest_version for one in facts), default=None),
        prompts=len(groups),
        samples_per_prompt=held_out.samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        accuracy=accuracy.value,
        standard_error=accuracy.standard_error,
        pass_at=tuple(PassAt(k=k, value=s.value, standard_error=s.standard_error) for k, s in pass_at.items() if s),
        majority=votes.value if votes else None,
        majority_standard_error=votes.standard_error if votes else None,
        response_length=fmean(one.response_tokens for one in facts) if facts else None,
        truncated_share=fmean(one.truncated for one in facts) if facts else None,
        unknown=sum(response.correct is None for one in questions for response in one),
        dropped=dropped,
        at=time.time(),
    )


@dataclass
class Round:
    """One evaluation of one set: its prompts that wait, are under way, are judged; and how many got no answer."""

    waiting: deque[Task] = field(default_factory=deque)
    open: dict[str, Group] = field(default_factory=dict)
    judged: list[Group] = field(default_factory=list)
    dropped: int = 0

    @property
    def done(self) -> bool:
        """Whether nothing is left to come."""
        return not self.waiting and not self.open

    def take_up(self, task: Task, fields: Mapping[bytes, bytes]) -> None:
        """Place a task by its group's hash as Redis has it; an empty one was never dispatched."""
        group = Group(task)
        for key, value in fields.items():
            if key.startswith(b"verdict:"):
                verdict = Verdict.model_validate_json(value)
                group.verdicts[verdict.index] = verdict
        state = fields.get(b"state", b"").decode()
        if not state:
            self.waiting.append(task)
        elif state == Release.DEAD:
            self.dropped += 1
        elif state == EVALUATED:
            self.judged.append(group)
        else:
            self.open[task.group] = group


class Evaluator:
    """Runs evaluations, one at a time: the caller's duty."""

    def __init__(self, context: Context, transitions: GroupTransitions, sets: tuple[HeldOut, ...]) -> None:
        self._context = context
        self._transitions = transitions
        self._sets = sets
        self._orphans = Orphans(context, Lane.EVALUATION)
        self._dead_after = "0-0"
        recipe = self._recipe = context.record.recipe
        self._consumer = Consumer(
            context.redis, context.keys, context.keys.lane(Lane.EVALUATION).verdicts, "sampler",
            context.heartbeat.info.id, Verdict, recipe.limits.lease_s, recipe.limits.max_deliveries,
        )  # fmt: skip

    async def run(self, name: str, *, beside_training: bool = False) -> bool:
        """Evaluate every set and write its record; False when stopped. Repeating a name resumes it.

        `beside_training` leaves the greater part of the fleet's sequence slots to training.
        """
        await self._consumer.open()
        event_log = self._context.event_log
        recorded = {(record.set, record.name) for record in await event_log.evaluations()}
        for one in self._sets:
            if (one.name, name) in recorded:
                continue
            await event_log.write("evaluating", f"{name}: {one.name}, {len(one.prompts)} prompts x {one.samples}")
            finished = await self._carry_out(name, one, beside_training)
            if finished is None:
                return False
            record = summarise(name, one, sampling_of(self._recipe), finished.judged, finished.dropped)
            await self._publish(record)
            await self._transitions.delete_evaluated([self._group(name, one, n) for n in range(len(one.prompts))])
        return True

    async def _publish(self, record: EvaluationRecord) -> None:
        await self._context.event_log.evaluation(record, "sampler", self._transitions.epoch)
        for result, prompts in (("answered", record.prompts), ("dropped", record.dropped)):
            EVALUATION_PROMPTS.labels(self._context.keys.run, record.set, result).set(prompts)
        if record.majority is None:
            text = f"{record.name}: {record.set}: no verdict is known, so no score is"
            await self._context.event_log.write("evaluation-unknown", text)
            return
        scores = {"avg": record.accuracy, "pass": record.pass_at[-1].value, "majority": record.majority}
        for score, value in scores.items():
            EVALUATION_SCORE.labels(self._context.keys.run, record.set, score).set(value)

    async def _carry_out(self, name: str, one: HeldOut, beside_training: bool) -> Round | None:
        """All of a set's prompts answered and judged, or dropped; None when stopped."""
        waits, patience = self._context.waits, self._recipe.limits.stall_timeout_s
        under_way = await self._recovered(name, one)
        try:
            while not under_way.done:
                if self._context.stopping.is_set():
                    return None
                held = await is_paused(self._context.redis, self._context.keys)
                left = len(under_way.waiting) + len(under_way.open)
                text = f"{left} of {len(one.prompts)} prompts of evaluation {name!r} of {one.name!r}"
                if held and not under_way.open:
                    waits.done(WAIT)
                else:
                    waits.pending(WAIT, text, patience)
                if not held:
                    await self._dispatch(under_way, await self._room(one) if beside_training else len(one.prompts))
                for delivery in await self._consumer.read(64, 0.5):
                    waits.done(WAIT)
                    await self._take_in(under_way, delivery)
                await self._drop_given_up(under_way)
                for orphan in await self._orphans.among(under_way.open):
                    await self._drop(under_way, orphan, "what was on its way is gone from all streams")
        finally:
            waits.done(WAIT)
        return under_way

    async def _recovered(self, name: str, one: HeldOut) -> Round:
        """The round as an earlier sampler left it in Redis; all waiting when there was none."""
        sampling, keys = sampling_of(self._recipe), self._context.keys
        tasks = [
            Task(group=self._group(name, one, number), prompt=prompt, samples=one.samples, sampling=sampling)
            for number, prompt in enumerate(one.prompts)
        ]
        found = Round()
        for start in range(0, len(tasks), HASHES_AT_ONCE):
            some = tasks[start : start + HASHES_AT_ONCE]
            async with self._context.redis.pipeline(transaction=False) as pipe:
                for task in some:
                    pipe.hgetall(keys.group(task.group))
                for task, fields in zip(some, await pipe.execute(), strict=True):
                    found.take_up(task, fields)
        return found

    @staticmethod
    def _group(name: str, one: HeldOut, number: int) -> str:
        # Neither names of sets nor of evaluations hold a full stop.
        return f"{EVALUATION_GROUP}{one.name}.{name}.{number:06d}"

    async def _room(self, one: HeldOut) -> int:
        """How many groups may be under way beside training."""
        processes = await live_processes(self._context.redis, self._context.keys.run)
        replicas = sum(process.service == "rollout" and process.state == "ready" for process in processes)
        sequences = replicas * self._recipe.rollout.max_sequences * SHARE_BESIDE_TRAINING
        return max(1, int(sequences / one.samples))

    async def _dispatch(self, under_way: Round, room: int) -> None:
        while under_way.waiting and len(under_way.open) < room:
            task = under_way.waiting[0]
            try:
                await self._transitions.dispatch(Lane.EVALUATION, task, None)
            except RedisFullError as error:
                self._context.waits.pending(WAIT, f"room in Redis: {error}", self._recipe.limits.stall_timeout_s)
                return
            under_way.open[task.group] = Group(under_way.waiting.popleft())

    async def _take_in(self, under_way: Round, delivery: Delivery[Verdict]) -> None:
        verdict = delivery.message
        group = under_way.open.get(verdict.group)
        decision, samples = "", 0
        if group is not None and verdict.index < group.task.samples:
            group.verdicts.setdefault(verdict.index, verdict)
            decision, samples = EVALUATED if group.judged else "", group.task.samples
        try:
            await self._transitions.record_verdict(Lane.EVALUATION, delivery.lease, verdict, decision, samples)
        except RefusedMessageError as error:
            await self._consumer.dead_letter(delivery, str(error), Cause.INVALID)
            MESSAGES.labels(self._context.keys.run, "evaluation-verdicts", VerdictResult.REFUSED).inc()
            return
        MESSAGES.labels(self._context.keys.run, "evaluation-verdicts", VerdictResult.RECORDED).inc()
        if group is not None and decision:
            under_way.judged.append(under_way.open.pop(verdict.group))

    async def _drop_given_up(self, under_way: Round) -> None:
        """Release groups that were given up since the last call: they are left out of the means."""
        for entry, letter in await self._context.event_log.dead_letters(self._dead_after):
            self._dead_after = entry
            if letter.cause is Cause.INVALID:
                continue
            if letter.group in under_way.open:
                await self._drop(under_way, letter.group, letter.reason)

    async def _drop(self, under_way: Round, name: str, reason: str) -> None:
        task = under_way.open.pop(name).task
        await self._transitions.release(Lane.EVALUATION, name, Release.DEAD, task.samples)
        under_way.dropped += 1
        await self._context.event_log.write("group-dead", f"{name}: {reason}")
