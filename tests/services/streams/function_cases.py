"""Owns one case of every Redis function: the preparation of a run, and the call, which then has an effect.

Must not be used outside tests.
"""

from __future__ import annotations

import copy
import time
from typing import Any, NamedTuple

import numpy as np

from services.contracts import Closing, Lane, ProcessInfo, Release, RunState, Sample, VersionSpan, WeightPlan
from services.settings import parse_recipe
from services.streams.connection.functions import call
from services.streams.delivery import leases
from services.streams.delivery.consumer import Consumer, trim
from services.streams.delivery.drawn import DrawnTokens
from services.streams.delivery.partials import Partial, Piece, forget_partials, keep_partials
from services.streams.delivery.payloads import fetch_texts
from services.streams.delivery.process_logs import LogLine, LogShipping
from services.streams.keys import ACTIVE_RUNS
from services.streams.runs.ledger import LedgerWriter, close_ledger
from services.streams.runs.places import AVOIDED_S, AvoidedPlace, avoid, forget_unproven
from services.streams.state.ended.cleanup import erase
from services.streams.state.ended.closing import close_run, delete_record
from services.streams.state.events import EventLog
from services.streams.state.group_counts import group_counts
from services.streams.state.group_state import trim_released
from services.streams.state.heartbeat import Heartbeat
from services.streams.state.ownership import become_owner
from services.streams.state.rewards.judge_budget import SharedBudget
from services.streams.state.rewind import ReopenedGroup, Rewind
from services.streams.state.runs import OWNER, RunRecords
from tests.harness.small_run import recipe_document
from tests.services.driven import (
    EVENT,
    STATE,
    batch_of,
    record_of,
    sample_of,
    snapshot_at,
    task_of,
    verdict_on,
)


class Case(NamedTuple):
    """A call of a function: `prepare(run)` returns it; `role` is the role that fences it."""

    prepare: Any
    role: str = ""


PLAN = WeightPlan(generation=1, version=0, host="h", port=1, world=1, members={}, timeout_s=1.0)


async def announce_version(run):
    return lambda: run.learner.announce(1, "w1", 1)


async def become_sampler(run):
    return lambda: become_owner(run.redis, run.keys, "sampler", "sampler-2")


async def change_record(run):
    records = RunRecords(run.redis)
    await records.create(run.keys.run, parse_recipe(recipe_document("/none")))
    fence = await become_owner(run.redis, run.keys, OWNER)
    return lambda: records.transition(run.keys.run, RunState.STARTING, "placing services", fence)


async def commit_policy(run):
    version = await run.learner.announce(0, "w0", 1)
    return lambda: run.learner.commit_policy(version, 0, "w0")


async def commit_step(run):
    logged = await run.batched(1, "g0", "g1")
    version = await run.learner.announce(1, "w1", 1)
    return lambda: run.learner.commit_step(record_of(logged.batch, version), logged.entry)


async def release_batch(run):
    logged = await run.trained(1, "g0")
    return lambda: run.learner.release_batch(logged)


async def create_record(run):
    recipe = parse_recipe(recipe_document("/none"))
    return lambda: RunRecords(run.redis).create(run.keys.run, recipe, {"./rewards.py": "def score(): ..."})


async def closed(run):
    """The run's record, when it is being deleted."""
    records = RunRecords(run.redis)
    await records.create(run.keys.run, parse_recipe(recipe_document("/none")))
    await records.transition(run.keys.run, RunState.FAILED, "test")
    await close_run(run.redis, run.keys.run, Closing.DELETING)


async def delete_closed_record(run):
    await closed(run)
    return lambda: delete_record(run.redis, run.keys.run, files=False)


async def unlink_closed(run):
    await run.dispatched("g0")
    await closed(run)
    return lambda: erase(run.redis, run.keys, Closing.DELETING)


async def index_run(run):
    records = RunRecords(run.redis)
    await records.create(run.keys.run, parse_recipe(recipe_document("/none")))
    await run.redis.srem(ACTIVE_RUNS, run.keys.run)
    return lambda: records.index(run.keys.run)


async def restore_history(run):
    records = RunRecords(run.redis)
    recipe = parse_recipe(recipe_document("/none"))
    await records.create_failed(run.keys.run, recipe, 1.0, "adopted", {}, "default")
    await run.redis.unlink(run.keys.policy)
    return lambda: call(
        run.redis,
        "restore_history",
        record_key=run.keys.record,
        policy_key=run.keys.policy,
        counters_key=run.keys.lane(Lane.TRAIN).counters,
        sampler_state_key=run.keys.sampler_state,
        checkpoints_key=run.keys.checkpoints,
        sampler_state="{}",
        checkpoints="[2]",
        policy_list=["step", "2", "version", "3"],
        counter_list=["trained", "8"],
    )


async def dispatch(run):
    return lambda: run.sampler.dispatch(Lane.TRAIN, [task_of("g0")], STATE)


async def create_consumer_group(run):
    stream = run.keys.lane(Lane.EVALUATION).samples
    return Consumer(run.redis, run.keys, stream, "verifier", "v0", Sample, 30.0, 2).open


async def set_fenced(run):
    return lambda: run.learner.publish_checkpoints([1, 2])


async def append_message(run):
    return lambda: EventLog(run.redis, run.keys, "test").write(EVENT.phase, EVENT.text)


async def append_log(run):
    info = ProcessInfo(id="p", service="rollout", run=run.keys.run, host="h", pid=1, metrics="h:1")
    line = LogLine(at=1.0, level="INFO", text="a line")
    return lambda: LogShipping(run.redis, run.keys, info, "")._send([line, line])


async def append_fenced(run):
    return lambda: run.learner.publish_plan(PLAN)


async def announce_process(run):
    info = ProcessInfo(id="p", service="rollout", run=run.keys.run, host="h", pid=1, metrics="h:1")
    return lambda: Heartbeat(run.redis, info).update(state="ready")


async def take_budget(run):
    budget = SharedBudget(run.redis, run.keys, "v0", "judge", max_requests=3, max_tokens=300)
    # What a process stores is its total, so a repetition of the same call stores the same.
    return lambda: SharedBudget._change(copy.copy(budget), 1, 100, budget._most)


async def publish_batch(run):
    await run.decided("g0", "kept")
    return lambda: run.sampler.publish_batch(batch_of(run.keys, 1, ["g0"]), snapshot_at(1))


async def publish_samples(run):
    delivery = await run.dispatched("g0", 1)
    return lambda: run.publish(delivery.lease, sample_of(run.keys, "g0", 0), 1)


async def kept_partials(run):
    delivery = await run.dispatched("g0", 1)
    prompt = np.array([2, 4], np.int32)
    tokens = DrawnTokens(
        np.array([5], np.int32), np.array([-0.5], np.float32), (VersionSpan(version=1, start=0, end=1),)
    )
    pieces = [Piece(0, "attempt", 0, 0, Partial(tokens, 1.0))]
    return lambda: keep_partials(run.redis, run.keys, delivery.lease, "g0", pieces, prompt, 3)


async def forgotten_partials(run):
    await (await kept_partials(run))()
    [entry] = await run.redis.xpending_range(run.streams.tasks, "rollout", "-", "+", 1)
    lease = leases.Lease(run.streams.tasks, "rollout", "r0", entry["message_id"].decode())
    return lambda: forget_partials(run.redis, run.keys, lease, "g0", [0])


async def returned_lease(run):
    delivery = await run.dispatched("g0")
    return lambda: leases.return_lease(run.redis, delivery.lease, 30.0)


async def publish_verdicts(run):
    [delivery] = await run.published("g0", 1)
    return lambda: run.transitions.publish_verdicts(Lane.TRAIN, [(delivery.lease, verdict_on(delivery.message))])


async def read_payloads(run):
    await run.published("g0")
    return lambda: fetch_texts(run.redis, [run.keys.payload("g0", 0), run.keys.payload("g0", 2)])


async def read_counts(run):
    await run.published("g0")
    return lambda: group_counts(run.redis, run.keys)


async def record_verdicts(run):
    [delivery] = await run.judged("g0", 1)
    return lambda: run.sampler.record_verdicts(
        Lane.TRAIN, "g0", [(delivery.lease, delivery.message)], "kept", posterior=("p0", "1:1:0")
    )


async def release(run):
    await run.decided("g0", "kept")
    return lambda: run.sampler.release(Lane.TRAIN, "g0", Release.STALE, 2)


async def withdraw(run):
    await run.judged("g0")
    return lambda: run.sampler.withdraw(Lane.TRAIN, "g0", 2)


async def renew_lease(run):
    delivery = await run.dispatched("g0")
    return lambda: leases.renew_lease(run.redis, delivery.lease)


def rewind_of(run):
    return Rewind(run.redis, run.keys, "sampler", run.sampler.fence, 1)


async def started_rewind(run):
    await run.trained(1, "g0")
    await run.dispatched("g2")
    return rewind_of(run).start


async def reopened_groups(run):
    await run.trained(1, "g0")
    await run.trained(2, "g1")
    [*_, (entry, _)] = await EventLog(run.redis, run.keys, "test").steps()
    return lambda: rewind_of(run).reopen([ReopenedGroup("g1", "p0", 2)], 2, entry)


async def stored_posteriors(run):
    return lambda: rewind_of(run).store_posteriors({"p0": "2:1:0"})


async def finished_rewind(run):
    await run.trained(1, "g0")
    return lambda: rewind_of(run).finish(1, 20, [1], "rewound")


async def reclaim_batch(run):
    logged = await run.batched(1, "g0")
    await run.redis.xdel(run.keys.batches, logged.entry)
    return lambda: run.sampler.reclaim_batch(1, logged.entry, {1: ["g0"]})


async def discard_entry(run):
    logged = await run.batched(1, "g0")
    return lambda: run.learner.accepts(logged, 2)


async def mark_starved(run):
    return lambda: run.sampler.mark_starved("no kept group")


async def deleted_evaluations(run):
    entry = (await run.append(run.keys.evaluations, EVENT))[0]
    return lambda: rewind_of(run).delete_evaluations([entry], 0)


async def trimmed_groups(run):
    for name in ("g0", "g1", "g2"):
        await run.decided(name, "filtered")
    await run.archived()
    return lambda: trim_released(run.redis, run.keys, Lane.TRAIN, 1)


async def taken(run):
    await run.decided("g0", "filtered")
    groups = await run.unarchived.hashes(["g0"])
    return lambda: run.unarchived.take(Lane.TRAIN, groups)


async def stripped(run):
    await run.decided("g0", "filtered")
    return lambda: run.unarchived.strip(Lane.TRAIN, 1)


async def deleted_evaluated(run):
    await run.decided("g0", "filtered")
    return lambda: run.sampler.delete_evaluated(["g0"])


async def trimmed(run):
    """Two samples are before the oldest lease and four behind it; of these only the newest may stay."""
    await run.decided("g0", "kept")
    await run.published("g1")
    await run.decided("g2", "kept")
    await run.decided("g3", "kept")
    return lambda: trim(run.redis, run.streams.samples, "verifier", 0.0, 3)


async def charged(run):
    await run.published("g0")
    writer = LedgerWriter(run.redis, run.keys, await become_owner(run.redis, run.keys, OWNER), "project")
    return lambda: writer.charge(12.5, {"rollout.busy.gpu_ms": 2000})


async def closed_ledger(run):
    await (await charged(run))()
    await closed(run)
    record = await RunRecords(run.redis).get(run.keys.run)
    return lambda: close_ledger(run.redis, record, Closing.DELETING)


async def begun_audit(run):
    pending = run.keys.key("audit-pending")
    return lambda: call(run.redis, "begin_audit", pending_key=pending, request="r", entry="{}")


async def ended_audit(run):
    await (await begun_audit(run))()
    values = {"pending_key": run.keys.key("audit-pending"), "log_key": run.keys.key("audit"), "request": "r"}
    return lambda: call(run.redis, "end_audit", **values, entry="{}", kept=1000, oldest=0)


async def taken_lock(run):
    values = {"lock_key": run.keys.key("lock"), "owner": "o", "lifetime_ms": 60_000}
    return lambda: call(run.redis, "take_lock", **values)


async def released_lock(run):
    await (await taken_lock(run))()
    return lambda: call(run.redis, "release_lock", lock_key=run.keys.key("lock"), owner="o")


async def avoided(run):
    place = AvoidedPlace(service="rollout", node="n", count=3, reason="died", until=time.time() + AVOIDED_S)
    return lambda: avoid(run.redis, run.keys, place)


async def forgotten_places(run):
    await (await avoided(run))()
    return lambda: forget_unproven(run.redis, run.keys)


CASES = {
    "announce_version": Case(announce_version, "learner"),
    "append_fenced": Case(append_fenced, "learner"),
    "append_log": Case(append_log),
    "append_message": Case(append_message),
    "begin_audit": Case(begun_audit),
    "avoid_place": Case(avoided),
    "become_owner": Case(become_sampler),
    "change_record": Case(change_record, OWNER),
    "charge_run": Case(charged, OWNER),
    "close_ledger": Case(closed_ledger),
    "commit_policy": Case(commit_policy, "learner"),
    "commit_step": Case(commit_step, "learner"),
    "create_consumer_group": Case(create_consumer_group),
    "create_record": Case(create_record),
    "delete_evaluated": Case(deleted_evaluated, "sampler"),
    "end_audit": Case(ended_audit),
    "take_lock": Case(taken_lock),
    "release_lock": Case(released_lock),
    "delete_evaluations": Case(deleted_evaluations, "sampler"),
    "discard_entry": Case(discard_entry, "learner"),
    "delete_record": Case(delete_closed_record),
    "dispatch": Case(dispatch, "sampler"),
    "forget_partials": Case(forgotten_partials),
    "forget_places": Case(forgotten_places),
    "heartbeat": Case(announce_process),
    "index_run": Case(index_run),
    "mark_starved": Case(mark_starved, "sampler"),
    "publish_batch": Case(publish_batch, "sampler"),
    "keep_partials": Case(kept_partials),
    "return_lease": Case(returned_lease),
    "publish_samples": Case(publish_samples),
    "publish_verdicts": Case(publish_verdicts),
    "read_payloads": Case(read_payloads),
    "read_together": Case(read_counts),
    "reclaim_batch": Case(reclaim_batch, "sampler"),
    "record_verdicts": Case(record_verdicts, "sampler"),
    "release": Case(release, "sampler"),
    "release_batch": Case(release_batch, "learner"),
    "renew_lease": Case(renew_lease),
    "reopen_groups": Case(reopened_groups, "sampler"),
    "start_rewind": Case(started_rewind, "sampler"),
    "store_posteriors": Case(stored_posteriors, "sampler"),
    "restore_history": Case(restore_history),
    "finish_rewind": Case(finished_rewind, "sampler"),
    "set_fenced": Case(set_fenced, "learner"),
    "strip_unarchived": Case(stripped, "sampler"),
    "take_archived": Case(taken, "sampler"),
    "take_budget": Case(take_budget),
    "trim": Case(trimmed),
    "trim_released": Case(trimmed_groups),
    "unlink_closed": Case(unlink_closed),
    "withdraw": Case(withdraw, "sampler"),
}
