"""Owns a held-out evaluation on the run's own fleet: tasks on the evaluation lane, and one record per set.

Must not influence training groups, or decide when to evaluate; the schedule does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from services.contracts import (
    Cause,
    EvaluationRecord,
    Lane,
    PassAt,
    Prompt,
    PromptResult,
    Release,
    Sampling,
    Task,
    Verdict,
    VerdictResult,
)
from services.metrics import EVALUATION_PROMPTS, EVALUATION_SCORE, MESSAGES
from services.process.hosting import Context
from services.sampler.data import RowRewards, load_evaluated
from services.sampler.evaluation.dispatch import EvaluationDispatch
from services.sampler.evaluation.progress import EvaluationProgress
from services.sampler.evaluation.scores import Score, by_name, over_questions, sizes
from services.sampler.groups import GroupVerdicts, verdicts_by_group
from services.sampler.watches.audit import Audit
from services.sampler.watches.memory import RedisMemory
from services.settings import HELD_OUT, Recipe
from services.streams.delivery.consumer import Consumer
from services.streams.keys import EVALUATION_GROUP
from services.streams.memory_bound import evaluated_prompt
from services.streams.state.events import entry_order
from services.streams.state.group_state import (
    PENDING,
    GroupTransitions,
    dead_letter_rejected,
    read_fields,
    read_groups,
)
from services.streams.state.runs import is_paused

READ_COUNT = 256
WAIT = "evaluation"


@dataclass(frozen=True)
class HeldOut:
    """A set of questions that are never trained. Each is answered `samples` times."""

    name: str
    prompts: tuple[Prompt, ...]
    samples: int


def held_out_sets(
    recipe: Recipe, own: tuple[Prompt, ...], others: Mapping[str, tuple[Prompt, ...]]
) -> tuple[HeldOut, ...]:
    """The sets of `recipe.evaluated_sets`: `own` is the run's held-out split, `others` are evaluation.sets by name."""
    settings = recipe.evaluation
    samples = {entry.name: entry.samples or settings.samples for entry in settings.sets}
    prompts = {HELD_OUT: own, **others}
    return tuple(HeldOut(name, prompts[name], samples.get(name, settings.samples)) for name in recipe.evaluated_sets)


def load_held_out(recipe: Recipe, files: Mapping[str, str]) -> tuple[tuple[HeldOut, ...], str]:
    """The sets of a run that only evaluates, and what was loaded in one line. `files`: the user's, texts by name.

    Training prompts are read only if the held-out split needs them. Raises DataError, ReferenceTrialError. Blocks while
    files are read and references tried.
    """
    data = recipe.data if recipe.data.held_out else None
    loaded = load_evaluated(data, recipe.evaluation.sets, RowRewards.of(recipe, files))
    return held_out_sets(recipe, loaded.held_out, loaded.sets), loaded.text


def sampling_of(recipe: Recipe) -> Sampling:
    """The sampling settings of evaluations, which are separate from those of training."""
    settings = recipe.evaluation
    return Sampling(temperature=settings.temperature, top_p=settings.top_p, max_new_tokens=recipe.evaluation_new_tokens)


def summarise(
    name: str, held_out: HeldOut, sampling: Sampling, results: Collection[PromptResult], dropped: int
) -> EvaluationRecord:
    """The record of one evaluation of one set, from the results of its judged prompts and the number of dropped ones.

    Means and standard errors are over prompts, each by its known verdicts; see services.sampler.evaluation.scores.
    """
    accuracy = over_questions([result.average for result in results]) or Score(0.0, 0.0)
    votes = over_questions([result.majority for result in results])
    scores = over_questions([result.score for result in results])
    known = [result.passes for result in results if result.passes]
    responses, tokens = sum(result.responses for result in results), sum(result.response_tokens for result in results)
    pass_at = {k: over_questions([of_k[at] for of_k in known]) for at, k in enumerate(sizes(held_out.samples))}
    return EvaluationRecord(
        name=name,
        set=held_out.name,
        version=min((result.oldest_version for result in results), default=0),
        newest_version=max((result.newest_version for result in results), default=None),
        prompts=len(results),
        samples_per_prompt=held_out.samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        accuracy=accuracy.value,
        standard_error=accuracy.standard_error,
        pass_at=tuple(
            PassAt(k=k, value=score.value, standard_error=score.standard_error) for k, score in pass_at.items() if score
        ),
        majority=votes.value if votes else None,
        majority_standard_error=votes.standard_error if votes else None,
        score=scores.value if scores else None,
        score_standard_error=scores.standard_error if scores else None,
        rewards=by_name(result.rewards for result in results),
        response_length=tokens / responses if responses else None,
        response_tokens=tokens,
        truncated_share=sum(result.truncated for result in results) / responses if responses else None,
        unknown=sum(result.unknown for result in results),
        dropped=dropped,
        at=time.time(),
    )


class Evaluator:
    """Runs evaluations. The caller must not run two at a time."""

    def __init__(
        self,
        context: Context,
        transitions: GroupTransitions,
        sets: tuple[HeldOut, ...],
        memory: RedisMemory,
        archive: Callable[[], Awaitable[object]],
    ) -> None:
        """`archive` archives the groups that have ended, and is called before each record of an evaluation."""
        self._context = context
        self._memory = memory
        self._transitions = transitions
        self._sets = sets
        self._archive = archive
        self._audit = Audit(context, Lane.EVALUATION)
        self._dead_after = "0-0"
        recipe = self._recipe = context.record.recipe
        self._consumer = Consumer(
            context.redis,
            context.keys,
            context.keys.lane(Lane.EVALUATION).verdicts,
            "sampler",
            context.heartbeat.info.id,
            Verdict,
            recipe.limits.lease_s,
            recipe.limits.max_deliveries,
        )

    async def run(self, name: str, *, beside_training: bool = False) -> bool:
        """Evaluate every set and write its record. False if stopped; another call with the same name resumes it.

        `beside_training` leaves some of the fleet's sequence slots to training; see EvaluationDispatch.
        """
        await self._consumer.open()
        event_log = self._context.event_log
        recorded = {(record.set, record.name) for record in await event_log.evaluations()}
        for held_out in self._sets:
            if (held_out.name, name) in recorded:
                continue
            prompts = len(held_out.prompts)
            await event_log.write("evaluating", f"{name}: {held_out.name}, {prompts} prompts x {held_out.samples}")
            finished = await self._evaluate(name, held_out, beside_training)
            if finished is None:
                return False
            # A run may end with a record, and what waits for the archive would leave with it.
            await self._archive()
            results, dropped = finished.judged.values(), len(finished.dropped)
            await self._publish(summarise(name, held_out, sampling_of(self._recipe), results, dropped))
            await self._transitions.delete_evaluated(list(finished.tasks))
        return True

    async def _publish(self, record: EvaluationRecord) -> None:
        """Record the evaluation, and export its scores."""
        await self._transitions.record_evaluation(record)
        for result, prompts in (("answered", record.prompts), ("dropped", record.dropped)):
            EVALUATION_PROMPTS.labels(self._context.keys.run, record.set, result).set(prompts)
        if record.majority is None:
            text = f"{record.name}: {record.set}: no verdict is known, so there is no score"
            await self._context.event_log.write("evaluation-unknown", text)
            return
        scores = {"avg": record.accuracy, "pass": record.pass_at[-1].value, "majority": record.majority}
        scores |= {} if record.score is None else {"mean": record.score}
        for score, value in scores.items():
            EVALUATION_SCORE.labels(self._context.keys.run, record.set, score).set(value)

    async def _evaluate(self, name: str, held_out: HeldOut, beside_training: bool) -> EvaluationProgress | None:
        """Dispatch all prompts of a set, until each is judged or dropped. None if stopped."""
        waits, patience = self._context.waits, self._recipe.limits.stall_timeout_s
        progress = await self._load(name, held_out)
        dispatch = EvaluationDispatch(
            self._context, self._transitions, self._memory, progress, beside_training=beside_training
        )
        try:
            while not progress.done or await self._restore_lost(progress):
                if self._context.stopping.is_set():
                    return None
                paused = await is_paused(self._context.redis, self._context.keys)
                left, prompts = len(progress.waiting) + len(progress.dispatched), len(held_out.prompts)
                text = f"{left} of {prompts} prompts of evaluation {name!r} of {held_out.name!r}"
                if paused and not progress.dispatched:
                    waits.done(WAIT)
                else:
                    waits.pending(WAIT, text, patience)
                if not paused:
                    await dispatch.run(text)
                if deliveries := await self._consumer.read(READ_COUNT, 0.5):
                    waits.done(WAIT)
                found = verdicts_by_group(deliveries, partial(self._judge, progress)) + self._decide_again(progress)
                await asyncio.gather(*(self._record(verdicts) for verdicts in found))
                await self._drop_dead(progress)
                if self._audit.due:
                    await self._reconcile(progress)
        finally:
            waits.done(WAIT)
            dispatch.end()
        return progress

    async def _load(self, name: str, held_out: HeldOut) -> EvaluationProgress:
        """The progress that an earlier sampler left in Redis, or that of a new evaluation: every prompt waits."""
        sampling, samples = sampling_of(self._recipe), held_out.samples
        named = {self._group(name, held_out, number): prompt for number, prompt in enumerate(held_out.prompts)}
        tasks = {
            group: Task(group=group, prompt=prompt, samples=samples, sampling=sampling)
            for group, prompt in named.items()
        }
        progress = EvaluationProgress(tasks, samples, evaluated_prompt(self._recipe, samples))
        await self._read(progress, list(tasks))
        return progress

    async def _read(self, progress: EvaluationProgress, names: list[str]) -> None:
        """Set the state of these prompts to the one that Redis has."""
        redis, keys = self._context.redis, self._context.keys
        progress.remove(names)
        async for name, fields in read_groups(redis, keys, names):
            progress.add(name, fields)
        if names:  # Redis may have lost the release of a dropped prompt, but not its letter, unless a rewind came later
            self._dead_after = (await redis.hget(keys.queue, "letters") or b"0-0").decode()

    @staticmethod
    def _group(name: str, held_out: HeldOut, number: int) -> str:
        # Neither the names of sets nor those of evaluations contain a full stop.
        return f"{EVALUATION_GROUP}{held_out.name}.{name}.{number:06d}"

    @staticmethod
    def _judge(progress: EvaluationProgress, verdicts: GroupVerdicts, verdict: Verdict) -> None:
        """Add a verdict to its prompt, which ends with its last verdict."""
        group = progress.dispatched.get(verdict.group)
        if group is None or verdict.index >= group.task.samples:
            return
        progress.verdicts += 1
        group.verdicts.setdefault(verdict.index, verdict)
        progress.settle(verdicts)

    @staticmethod
    def _decide_again(progress: EvaluationProgress) -> list[GroupVerdicts]:
        """Decisions on the prompts whose verdicts Redis has, while it lost the decision on them in a failover."""
        found = [GroupVerdicts(name) for name in progress.undecided if name in progress.dispatched]
        progress.undecided.clear()
        for verdicts in found:
            progress.settle(verdicts)
        return found

    async def _record(self, verdicts: GroupVerdicts) -> None:
        """Record verdicts of one prompt; dead-letter those that are not of this run."""
        effects = await self._transitions.record_verdicts(
            Lane.EVALUATION,
            verdicts.group,
            verdicts.leased,
            verdicts.decision,
            result=verdicts.result,
        )
        if verdicts.decision and effects and effects[-1] < 0:
            raise RuntimeError(f"Redis lost prompt {verdicts.group!r}, which was being judged")
        refused = await dead_letter_rejected(self._consumer, verdicts.deliveries, effects)
        for count, result in ((len(effects) - refused, VerdictResult.RECORDED), (refused, VerdictResult.REFUSED)):
            MESSAGES.labels(self._context.keys.run, "evaluation-verdicts", result).inc(count)

    async def _reconcile(self, progress: EvaluationProgress) -> None:
        """Drop prompts whose messages are gone, and correct the progress where Redis disagrees with it."""
        found = await self._audit.look(progress.dispatched, {})
        for name in found.orphaned:
            await self._drop(progress, name, "its messages are gone from all streams")
        await self._read(progress, found.changed)

    async def _restore_lost(self, progress: EvaluationProgress) -> bool:
        """Correct the prompts that ended but are pending in Redis, which lost their end; whether there are any.

        They would stay pending for as long as the run exists.
        """
        ended = [*progress.judged, *progress.dropped]
        states = await read_fields(self._context.redis, self._context.keys, ended, ("state",))
        lost = [name for name, [state] in zip(ended, states, strict=True) if state == PENDING.encode()]
        await self._read(progress, lost)
        return bool(lost)

    async def _drop_dead(self, progress: EvaluationProgress) -> None:
        """Drop the prompts of dead letters since the last call. Dropped prompts are not part of the means."""
        for entry, letter in await self._context.event_log.dead_letters(self._dead_after):
            self._dead_after = entry
            if letter.cause is Cause.INVALID or letter.group not in progress.dispatched:
                continue
            [[task]] = await read_fields(self._context.redis, self._context.keys, [letter.group], ("entry",))
            if task is None or entry_order(entry) > entry_order(task.decode()):  # else it is of a withdrawn task
                await self._drop(progress, letter.group, letter.reason)

    async def _drop(self, progress: EvaluationProgress, name: str, reason: str) -> None:
        """Release a group as dead, and report why."""
        del progress.dispatched[name]
        progress.dropped.add(name)
        await self._transitions.release(Lane.EVALUATION, name, Release.DEAD, progress.samples, reason)
        await self._context.event_log.write("group-dead", f"{name}: {reason}")
