"""Owns the verifier's loop: samples in, verdicts out.

Must not judge; verifier.judging does.

Reads samples of both lanes; writes verdicts. When it dies, its unacked samples are redelivered to another replica.
Drain order: stop reading, finish the judgements in flight, stop the judging processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple

from services.contracts import Lane, Prompt, Sample, SampleResult, Task, Verdict
from services.metrics import DAMAGED_PAYLOADS, FAULTS, MESSAGES, VERDICT_SECONDS
from services.process.hosting import Context, collect_garbage_rarely
from services.settings.rewards.kinds import JudgeReward
from services.settings.rewards.reward import Reward
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.delivery.leases import Lease
from services.streams.delivery.payloads import fetch_texts
from services.streams.state.group_state import Effect, GroupTransitions, dead_letter_rejected, read_fields
from services.streams.state.rewards.judge_budget import SharedBudget
from services.streams.state.rewards.reward_files import read_reward_files
from services.streams.state.rewards.unknown import JudgedResponse, UnknownVerdicts
from services.waits import cancellation_requested
from verifier.judging import RewardJudges, reward_of, sees_prompt
from verifier.outside import outside_judges
from verifier.preloading import preloaded
from verifier.processes.prctl import deny_inspection
from verifier.sandbox.finding import Finding, damaged_payload
from verifier.sandbox.pool import Sandbox, default_processes
from verifier.verifiers.base import Candidate

log = logging.getLogger(__name__)

READ_COUNT = 64
IN_FLIGHT = 512
"""The most texts of a lane that this replica judges or holds: those that take long must not stop the reading."""
BETWEEN_EVALUATIONS_S = 7 * 24 * 3600.0
"""Training may go on for so long between two evaluations; a longer wait for their samples is reported as stalled."""
REASON_CHARACTERS = 300


class _Judged(NamedTuple):
    """A sample, what was found, and its response; "" if that could not be read."""

    delivery: Delivery[Sample]
    finding: Finding
    text: str


class VerifierService:
    """One replica of a run's verifier fleet."""

    name = "verifier"

    async def run(self, context: Context) -> None:
        """Judge until stopped."""
        collect_garbage_rarely()
        recipe = context.record.recipe
        settings, startup_s = recipe.verifier, recipe.limits.startup_timeout_s
        files = await read_reward_files(context.redis, context.record)
        processes = settings.processes or default_processes()
        rewards = await preloaded(context)
        with Sandbox(processes, settings.timeout_s, rewards, files=files, start_s=startup_s) as sandbox:
            with context.waits.on("sandbox", "the verifiers to load and be confined", startup_s):
                gaps = await sandbox.start()
            for gap in gaps:
                log.warning("judged texts are not fully confined: %s", gap)
                await context.event_log.write("unconfined", gap)
            if gaps:  # without Landlock a judged text could read this process's memory in /proc
                deny_inspection()
            outside = outside_judges(
                recipe.rewards,
                files,
                timeout_s=settings.timeout_s,
                at_once=processes,
                budget_of=lambda reward: _budget(context, reward),
            )
            async with outside as table, aclosing(RewardJudges(sandbox, table)) as judges:
                judges.prepare(recipe.rewards)
                await context.heartbeat.update(state="ready")
                async with asyncio.TaskGroup() as lanes:
                    for lane in Lane:
                        lanes.create_task(_LaneJudge(context, lane, judges).run())


def _budget(context: Context, reward: Reward) -> SharedBudget | None:
    options = reward.options
    if not isinstance(options, JudgeReward):
        return None
    limits = options.max_requests, options.max_tokens
    return SharedBudget(context.redis, context.keys, context.heartbeat.info.id, reward.text, *limits)


class _LaneJudge:
    def __init__(self, context: Context, lane: Lane, judges: RewardJudges) -> None:
        self._context = context
        self._lane = lane
        self._judges = judges
        self._unknown = UnknownVerdicts(context.redis, context.keys)
        self._in_flight = 0
        self._settled = asyncio.Event()
        self._transitions = GroupTransitions(context.redis, context.keys, VerifierService.name)
        limits = context.record.recipe.limits
        self._consumer = Consumer(
            context.redis,
            context.keys,
            context.keys.lane(lane).samples,
            VerifierService.name,
            context.heartbeat.info.id,
            Sample,
            limits.lease_s,
            limits.max_deliveries,
        )

    async def run(self) -> None:
        await self._consumer.open()
        training = self._lane is Lane.TRAIN
        patience = self._context.record.recipe.limits.stall_timeout_s if training else BETWEEN_EVALUATIONS_S
        waits, idle = self._context.waits, f"{self._lane.value}-samples"
        async with asyncio.TaskGroup() as judging:
            while not self._context.stopping.is_set() and not cancellation_requested():
                if (room := IN_FLIGHT - self._in_flight) <= 0:
                    await self._until_settled()
                    continue
                waits.pending(idle, f"samples of lane {self._lane.value}", patience, idle=True)
                deliveries = await self._consumer.read(min(READ_COUNT, room), 0.5)
                if not deliveries:
                    continue
                waits.done(idle)
                self._hold(len(deliveries))
                judging.create_task(self._judge(deliveries))

    async def _until_settled(self) -> None:
        """Wait until a text has its verdict, at most half a second, so that a stop is noticed."""
        self._settled.clear()
        try:
            async with asyncio.timeout(0.5):
                await self._settled.wait()
        except TimeoutError:
            return  # the loop looks again

    def _hold(self, texts: int) -> None:
        """Count texts in flight, less those that have their verdict. The wait lasts since the last of these."""
        self._in_flight += texts
        name = f"{self._lane.value}-judgements"
        if texts < 0:
            self._settled.set()
            self._context.waits.done(name)
        if self._in_flight:
            patience = self._context.record.recipe.limits.stall_timeout_s
            self._context.waits.pending(name, "a verdict on any of the texts in flight", patience)

    async def _judge(self, deliveries: Sequence[Delivery[Sample]]) -> None:
        """Publish a verdict on each sample whose lease is not lost."""
        left, started = len(deliveries), time.monotonic()
        try:
            with self._consumer.watching([delivery.lease for delivery in deliveries]) as lost:
                async with aclosing(self._findings(deliveries)) as judging:
                    async for judged in judging:
                        await self._publish(judged, lost, started)
                        self._hold(-len(judged))
                        left -= len(judged)
        finally:
            self._hold(-left)

    async def _findings(self, deliveries: Sequence[Delivery[Sample]]) -> AsyncGenerator[list[_Judged], None]:
        """The findings on samples as they come: first of those that no verifier can judge."""
        keys = [delivery.message.facts.payload for delivery in deliveries]
        texts, damaged = await fetch_texts(self._context.redis, keys)
        settled: list[_Judged] = []
        judged: list[tuple[Delivery[Sample], Reward]] = []
        for delivery in deliveries:
            reward = reward_of(delivery.message.verifier)
            if (damage := damaged.get(delivery.message.facts.payload)) is not None:
                DAMAGED_PAYLOADS.labels(self._context.keys.run, VerifierService.name).inc()
                settled.append(_Judged(delivery, damaged_payload(damage), ""))
            elif isinstance(reward, Finding):
                settled.append(_Judged(delivery, reward, texts[delivery.message.facts.payload]))
            else:
                judged.append((delivery, reward))
        if settled:
            yield settled
        prompts = await self._prompts(
            [each.message.group for each, reward in judged if sees_prompt(reward) or each.message.reference_in_task]
        )
        candidates = [(reward, _candidate(delivery.message, texts, prompts)) for delivery, reward in judged]
        async with aclosing(self._judges.judge_all(candidates, lane=self._lane)) as judging:
            async for findings in judging:
                yield [_Judged(judged[place][0], finding, candidates[place][1].text) for place, finding in findings]

    async def _prompts(self, groups: Sequence[str]) -> dict[str, Prompt]:
        """The prompts of groups. One whose group has ended meanwhile is absent: its verdict comes too late anyway."""
        names = list(dict.fromkeys(groups))
        found = await read_fields(self._context.redis, self._context.keys, names, ("task",))
        tasks = {name: task for name, [task] in zip(names, found, strict=True) if task}
        return {name: Task.model_validate_json(task).prompt for name, task in tasks.items()}

    async def _publish(self, judged: Sequence[_Judged], lost: Collection[Lease], started: float) -> None:
        """Publish verdicts, group by group; dead-letter samples that are not of this run. `started`: monotonic."""
        groups: dict[str, list[_Judged]] = {}
        for each in judged:
            if each.finding.fault:
                FAULTS.labels(self._context.keys.run, each.finding.fault).inc()
            if each.delivery.lease in lost:
                log.warning("a judgement was dropped: the lease of %s was lost", each.delivery.lease.entry)
                self._count(SampleResult.LEASE_LOST, 1)
            else:
                groups.setdefault(each.delivery.message.group, []).append(each)
        await asyncio.gather(*(self._publish_group(group, started) for group in groups.values()))

    async def _publish_group(self, judged: Sequence[_Judged], started: float) -> None:
        verdicts = [_verdict(each.delivery.message, each.finding) for each in judged]
        effects = await self._transitions.publish_verdicts(
            self._lane, [(each.delivery.lease, verdict) for each, verdict in zip(judged, verdicts, strict=True)]
        )
        refused = await dead_letter_rejected(self._consumer, [each.delivery for each in judged], effects)
        duplicates = effects.count(Effect.LATE)
        self._count(SampleResult.REFUSED, refused)
        self._count(SampleResult.DUPLICATE, duplicates)
        self._count(SampleResult.PUBLISHED, len(judged) - duplicates - refused)
        seconds = time.monotonic() - started
        for each in judged:
            VERDICT_SECONDS.labels(self._context.keys.run, each.finding.outcome.value).observe(seconds)
        responses = zip(verdicts, (each.text for each in judged), strict=True)
        await self._unknown.note(self._lane, [JudgedResponse(*each) for each in responses])

    def _count(self, result: SampleResult, number: int) -> None:
        MESSAGES.labels(self._context.keys.run, f"{self._lane.value}-samples", result).inc(number)


def _candidate(sample: Sample, texts: Mapping[str, str], prompts: Mapping[str, Prompt]) -> Candidate:
    prompt, text = prompts.get(sample.group), texts[sample.facts.payload]
    if prompt is None:
        return Candidate(text, sample.reference)
    reference = prompt.reference if sample.reference_in_task else sample.reference
    return Candidate(text, reference, prompt.messages, prompt.metadata)


def _verdict(sample: Sample, finding: Finding) -> Verdict:
    return Verdict(
        group=sample.group,
        index=sample.index,
        outcome=finding.outcome,
        score=finding.score,
        reason=finding.reason[:REASON_CHARACTERS],
        answer=finding.answer,
        rewards=finding.rewards,
        facts=sample.facts,
    )
