"""Owns the verifier's loop: samples in, verdicts out.

Must not judge; the sandbox does.

Reads samples of both lanes; writes verdicts. When it dies, its unacked samples are redelivered to another replica.
Drain order: stop reading, finish the judgements in flight, stop the judging processes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

from services.cancellation import cancellation_requested
from services.contracts import Cause, Lane, Outcome, Sample, SampleResult, SandboxFault, Verdict
from services.metrics import DAMAGED_PAYLOADS, FAULTS, MESSAGES, VERDICT_SECONDS
from services.process import Context
from services.streams.delivery.consumer import Consumer, Delivery
from services.streams.delivery.leases import LeaseLostError
from services.streams.delivery.payloads import fetch_texts
from services.streams.state.group_state import GroupTransitions, RejectedMessageError
from verifier.sandbox.pool import Finding, Sandbox
from verifier.sandbox.prctl import deny_inspection

log = logging.getLogger(__name__)

ATTEMPTS = 2  # an unknown outcome is judged once more before it is published
PROCESSES = 1
READ_COUNT = 64
JUDGED_TOGETHER = 8  # texts per judgement job: a text that takes long delays the verdicts of those before it
REASON_CHARACTERS = 300
FATAL = (SandboxFault.TIMEOUT, SandboxFault.DIED)  # faults that end a judging process


class VerifierService:
    """One replica of a run's verifier fleet."""

    name = "verifier"

    async def run(self, context: Context) -> None:
        """Judge until stopped."""
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
                        found = judgements.create_task(self._first_findings(part, texts))
                        for delivery in part:
                            damage = damaged.get(delivery.message.facts.payload)
                            judgements.create_task(self._judge(delivery, found, damage))

    async def _first_findings(
        self, deliveries: Sequence[Delivery[Sample]], texts: Mapping[str, str]
    ) -> dict[str, tuple[str, Finding]]:
        """The text and the finding of a first attempt to judge it, by payload; without those that are damaged."""
        samples = [delivery.message for delivery in deliveries if delivery.message.facts.payload in texts]
        chosen = [(sample.verifier, texts[sample.facts.payload], sample.reference) for sample in samples]
        findings = await self._sandbox.judge_all(chosen)
        return {
            sample.facts.payload: (text, finding)
            for sample, (_, text, _), finding in zip(samples, chosen, findings, strict=True)
        }

    async def _judge(
        self, delivery: Delivery[Sample], found: asyncio.Task[dict[str, tuple[str, Finding]]], damage: str | None
    ) -> None:
        try:
            async with self._consumer.renewing(delivery.lease):
                await self._publish_verdict(delivery, found, damage)
        except LeaseLostError as error:
            log.warning("a judgement was stopped: %s", error)
            MESSAGES.labels(self._context.keys.run, f"{self._lane.value}-samples", SampleResult.LEASE_LOST).inc()

    async def _publish_verdict(
        self, delivery: Delivery[Sample], found: asyncio.Task[dict[str, tuple[str, Finding]]], damage: str | None
    ) -> None:
        sample, started = delivery.message, time.monotonic()
        if damage is not None:
            DAMAGED_PAYLOADS.labels(self._context.keys.run, VerifierService.name).inc()
            finding = Finding(Outcome.UNKNOWN, 0.0, damage)
        else:
            text, first_finding = (await asyncio.shield(found))[sample.facts.payload]
            finding = await self._settled(sample, text, first_finding)
        verdict = Verdict(
            group=sample.group,
            index=sample.index,
            outcome=finding.outcome,
            score=finding.score,
            reason=finding.reason[:REASON_CHARACTERS],
            answer=finding.answer,
            facts=sample.facts,
        )
        try:
            first = await self._transitions.publish_verdict(self._lane, delivery.lease, verdict)
            result = SampleResult.PUBLISHED if first else SampleResult.DUPLICATE
        except RejectedMessageError as error:
            await self._consumer.dead_letter(delivery, str(error), Cause.INVALID)
            result = SampleResult.REFUSED
        VERDICT_SECONDS.labels(self._context.keys.run, finding.outcome.value).observe(time.monotonic() - started)
        MESSAGES.labels(self._context.keys.run, f"{self._lane.value}-samples", result).inc()

    async def _settled(self, sample: Sample, text: str, finding: Finding) -> Finding:
        """A text's first finding, or that of another attempt if it is unknown."""
        for attempt in range(ATTEMPTS):
            if attempt:
                fresh = finding.fault in FATAL  # the fault may have been that of a text judged before
                finding = await self._sandbox.judge(sample.verifier, text, sample.reference, fresh=fresh)
            if finding.fault:
                FAULTS.labels(self._context.keys.run, finding.fault).inc()
            if finding.outcome is not Outcome.UNKNOWN:
                break
        return finding
