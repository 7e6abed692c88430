"""Owns a held-out evaluation on the run's own fleet: tasks out on the evaluation lane, one record back.

Must not influence training groups.
"""

from __future__ import annotations

import asyncio
import math
from statistics import fmean, stdev

from services.contracts import EvaluationRecord, Lane, Outcome, Prompt, Release, Sampling, Task, Verdict
from services.sampler.progress import Progress
from services.settings import Recipe
from services.shell import Context
from services.streams.effects import Effects
from services.streams.leases import Consumer

EVALUATED = "evaluated"


def summarise(name: str, prompts: int, samples: int, verdicts: list[Verdict]) -> EvaluationRecord:
    """avg@k: mean over prompts of the mean over their `samples` answers; the standard error is over prompts."""
    by_group: dict[str, list[bool]] = {}
    for verdict in verdicts:
        if verdict.outcome is not Outcome.UNKNOWN:
            by_group.setdefault(verdict.group, []).append(verdict.outcome is Outcome.CORRECT)
    scores = [fmean(correct) for correct in by_group.values()]
    return EvaluationRecord(
        name=name,
        version=min((verdict.facts.oldest_version for verdict in verdicts), default=0),
        prompts=prompts,
        samples_per_prompt=samples,
        accuracy=fmean(scores) if scores else 0.0,
        standard_error=stdev(scores) / math.sqrt(len(scores)) if len(scores) > 1 else 0.0,
        unknown=sum(verdict.outcome is Outcome.UNKNOWN for verdict in verdicts),
    )


class Evaluator:
    """Runs evaluations one at a time."""

    def __init__(self, context: Context, effects: Effects, prompts: tuple[Prompt, ...], progress: Progress) -> None:
        self._progress = progress
        self._dead_after = "0-0"
        self._context = context
        self._effects = effects
        self._prompts = prompts
        recipe = context.record.recipe
        self._consumer = Consumer(
            context.redis, context.keys, context.keys.lane(Lane.EVALUATION).verdicts, "sampler",
            context.presence.info.id, Verdict, recipe.limits.lease_s, recipe.limits.max_deliveries,
        )  # fmt: skip

    async def run(self, name: str) -> EvaluationRecord | None:
        """Evaluate and write the record; None when stopped. Repeating a name resumes it."""
        done = {record.name: record for record in await self._context.journal.evaluations()}
        if name in done:
            return done[name]
        recipe = self._context.record.recipe
        await self._consumer.open()
        tasks = [self._task(recipe, name, number, prompt) for number, prompt in enumerate(self._prompts)]
        for task in tasks:
            await self._effects.dispatch(Lane.EVALUATION, task, None)
        verdicts = await self._collect({task.group for task in tasks}, recipe)
        if verdicts is None:
            return None
        record = summarise(name, len(tasks), recipe.evaluation.samples, verdicts)
        await self._context.journal.evaluation(record)
        return record

    def _task(self, recipe: Recipe, name: str, number: int, prompt: Prompt) -> Task:
        settings = recipe.evaluation
        sampling = Sampling(
            temperature=settings.temperature, top_p=settings.top_p, max_new_tokens=recipe.rollout.max_new_tokens
        )
        return Task(group=f"e-{name}-{number:06d}", prompt=prompt, samples=settings.samples, sampling=sampling)

    async def _collect(self, groups: set[str], recipe: Recipe) -> list[Verdict] | None:
        found: dict[tuple[str, int], Verdict] = await self._recorded(groups)
        total = len(groups) * recipe.evaluation.samples
        while len(found) < total:
            if self._context.stopping.is_set():
                return None
            for group in await self._given_up(groups):
                total -= recipe.evaluation.samples
                found = {place: verdict for place, verdict in found.items() if place[0] != group}
            self._progress.kept()  # an evaluation keeps no group
            await self._progress.check(f"{total - len(found)} of {total} evaluation verdicts")
            for delivery in await self._consumer.read(64, 0.5):
                self._progress.heard()
                verdict = delivery.message
                found[(verdict.group, verdict.index)] = verdict
                counted = sum(group == verdict.group for group, _ in found)
                decision = EVALUATED if counted == recipe.evaluation.samples else ""
                await self._effects.record_verdict(
                    Lane.EVALUATION, delivery.lease, verdict, decision, recipe.evaluation.samples
                )
        return list(found.values())

    async def _given_up(self, groups: set[str]) -> list[str]:
        """Release groups that were given up since the last call, and name them: they are left out of the mean."""
        given_up = []
        for entry, letter in await self._context.journal.dead_letters(self._dead_after):
            self._dead_after = entry
            if letter.group in groups:
                samples = self._context.record.recipe.evaluation.samples
                if await self._effects.release(Lane.EVALUATION, letter.group, Release.DEAD, samples):
                    given_up.append(letter.group)
                await self._context.journal.event("group-dead", f"{letter.group}: {letter.reason}")
        return given_up

    async def _recorded(self, groups: set[str]) -> dict[tuple[str, int], Verdict]:
        redis, keys = self._context.redis, self._context.keys
        hashes = await asyncio.gather(*(redis.hgetall(keys.group(group)) for group in sorted(groups)))
        verdicts = [
            Verdict.model_validate_json(value)
            for fields in hashes
            for key, value in fields.items()
            if key.startswith(b"verdict:")
        ]
        return {(verdict.group, verdict.index): verdict for verdict in verdicts}
