"""Owns the verifier's loop: samples in, verdicts out.

Must not judge; the sandbox does.

Reads samples of both lanes; writes verdicts. When it dies, its unacked samples are redelivered to another replica.
Drain order: stop reading, finish the judgements in flight, stop the judging processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from services.cancellation import cancellation_requested
from services.contracts import Lane, Outcome, Sample, SampleResult, SandboxFault, Verdict
from services.metrics import DAMAGED_PAYLOADS, FAULTS, MESSAGES, VERDICT_SECONDS
from services.process import Context, collect_garbage_rarely
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.delivery.leases import Lease
from services.streams.delivery.payloads import fetch_texts
from services.streams.state.group_state import Effect, GroupTransitions, dead_letter_rejected
from verifier.sandbox.pool import Finding, Sandbox
from verifier.sandbox.prctl import deny_inspection

log = logging.getLogger(__name__)

ATTEMPTS = 2  # an unknown outcome is judged once more before it is published
PROCESSES = 1
READ_COUNT = 64
JUDGED_TOGETHER = 16  # texts per judgement job: a text that takes long delays the others after it
REASON_CHARACTERS = 300
FATAL = (SandboxFault.TIMEOUT, SandboxFault.DIED)  # faults that end a judging process

_Judged: TypeAlias = tuple[Delivery[Sample], Finding]


class VerifierService:
    """One replica of a run's verifier fleet."""

    name = "verifier"

    async def run(self, context: Context) -> None:
        """Judge until stopped."""
        collect_garbage_rarely()
        recipe = context.record.recipe
        sources = (recipe.data, *recipe.evaluation.sets)
        verifiers = {"reasoning-gym" if source.source == "reasoning-gym" else source.verifier for source in sources}
        startup_s = recipe.limits.startup_timeout_s
        with Sandbox(PROCESSES, recipe.verifier.timeout_s, verifiers, start_s=startup_s) as sandbox:
            with context.waits.on("sandbox", "the judging process to load its libraries and be confined", startup_s):
                gaps = await sandbox.start()
            for gap in gaps:
                log.warning("judged texts are not fully confined: %s", gap)
                await context.event_log.write("unconfined", gap)
            if gaps:  # without Landlock a judged text could read this process's memory in /proc
                deny_inspection()
            await context.heartbeat.update(state="ready")
            async with asyncio.TaskGroup() as lanes:
                for lane in Lane:
                    lanes.create_task(_LaneJudge(context, lane, sandbox).run())


class _LaneJudge:
    def __init__(self, context: Context, lane: Lane, sandbox: Sandbox) -> None:
        self._context = context
        self._lane = lane
        self._sandbox = sandbox
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
        waits, patience = self._context.waits, self._context.record.recipe.limits.stall_timeout_s
        idle, judging = f"{self._lane.value}-samples", f"{self._lane.value}-judgements"
        while not self._context.stopping.is_set() and not cancellation_requested():
            waits.pending(idle, f"samples of lane {self._lane.value}", patience, idle=True)
            deliveries = await self._consumer.read(READ_COUNT, 0.5)
            if not deliveries:
                continue
            waits.done(idle)
            with waits.on(judging, f"{len(deliveries)} judgements in the sandbox", patience):
                keys = [delivery.message.facts.payload for delivery in deliveries]
                texts, damaged = await fetch_texts(self._context.redis, keys)
                async with asyncio.TaskGroup() as judgements:
                    for start in range(0, len(deliveries), JUDGED_TOGETHER):
                        part = deliveries[start : start + JUDGED_TOGETHER]
                        judgements.create_task(self._judge(part, texts, damaged))

    async def _judge(
        self, deliveries: Sequence[Delivery[Sample]], texts: Mapping[str, str], damaged: Mapping[str, str]
    ) -> None:
        """Publish a verdict on each sample whose lease is not lost. An unknown outcome is judged again, after these."""
        started = time.monotonic()
        whole = [delivery for delivery in deliveries if delivery.message.facts.payload in texts]
        samples = [delivery.message for delivery in whole]
        requests = [(sample.verifier, texts[sample.facts.payload], sample.reference) for sample in samples]
        unknown: list[_Judged] = []
        with self._consumer.watching([delivery.lease for delivery in deliveries]) as lost:
            await self._publish(self._damaged(deliveries, damaged), lost, started)
            async for findings in self._sandbox.judge_all(requests):
                settled: list[_Judged] = []
                for place, finding in findings:
                    self._count_fault(finding)
                    (unknown if finding.outcome is Outcome.UNKNOWN else settled).append((whole[place], finding))
                await self._publish(settled, lost, started)
            for delivery, finding in unknown:
                again = delivery.lease not in lost
                last = await self._judged_again(delivery.message, texts, finding) if again else finding
                await self._publish([(delivery, last)], lost, started)

    def _damaged(self, deliveries: Sequence[Delivery[Sample]], damaged: Mapping[str, str]) -> list[_Judged]:
        """The samples whose payload is damaged: no attempt may judge them."""
        found: list[_Judged] = []
        for delivery in deliveries:
            if (damage := damaged.get(delivery.message.facts.payload)) is not None:
                DAMAGED_PAYLOADS.labels(self._context.keys.run, VerifierService.name).inc()
                found.append((delivery, Finding(Outcome.UNKNOWN, 0.0, damage)))
        return found

    async def _judged_again(self, sample: Sample, texts: Mapping[str, str], finding: Finding) -> Finding:
        """The finding of the last attempt to judge a text whose outcome is unknown."""
        for _ in range(1, ATTEMPTS):
            if finding.outcome is Outcome.UNKNOWN:
                fresh = finding.fault in FATAL  # the fault may have been that of a text judged before
                text = texts[sample.facts.payload]
                finding = await self._sandbox.judge(sample.verifier, text, sample.reference, fresh=fresh)
                self._count_fault(finding)
        return finding

    def _count_fault(self, finding: Finding) -> None:
        if finding.fault:
            FAULTS.labels(self._context.keys.run, finding.fault).inc()

    async def _publish(self, judged: Sequence[_Judged], lost: Collection[Lease], started: float) -> None:
        """Publish verdicts, group by group; dead-letter samples that are not of this run. `started`: monotonic."""
        groups: dict[str, list[_Judged]] = {}
        for delivery, finding in judged:
            if delivery.lease in lost:
                log.warning("a judgement was dropped: the lease of %s was lost", delivery.lease.entry)
                self._count(SampleResult.LEASE_LOST, 1)
            else:
                groups.setdefault(delivery.message.group, []).append((delivery, finding))
        await asyncio.gather(*(self._publish_group(group, started) for group in groups.values()))

    async def _publish_group(self, judged: Sequence[_Judged], started: float) -> None:
        effects = await self._transitions.publish_verdicts(
            self._lane, [(delivery.lease, _verdict(delivery.message, finding)) for delivery, finding in judged]
        )
        refused = await dead_letter_rejected(self._consumer, [delivery for delivery, _ in judged], effects)
        duplicates = effects.count(Effect.LATE)
        self._count(SampleResult.REFUSED, refused)
        self._count(SampleResult.DUPLICATE, duplicates)
        self._count(SampleResult.PUBLISHED, len(judged) - duplicates - refused)
        seconds = time.monotonic() - started
        for _, finding in judged:
            VERDICT_SECONDS.labels(self._context.keys.run, finding.outcome.value).observe(seconds)

    def _count(self, result: SampleResult, number: int) -> None:
        MESSAGES.labels(self._context.keys.run, f"{self._lane.value}-samples", result).inc(number)


def _verdict(sample: Sample, finding: Finding) -> Verdict:
    return Verdict(
        group=sample.group,
        index=sample.index,
        outcome=finding.outcome,
        score=finding.score,
        reason=finding.reason[:REASON_CHARACTERS],
        answer=finding.answer,
        facts=sample.facts,
    )
