"""Owns the faults that the queue's test must detect: a changed text in one of the Redis functions.

Must not be used outside tests.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """The text `old` in function `name` (or `shared`), which occurs `count` times, is replaced by `new`."""

    name: str
    old: str
    new: str
    count: int = 1


FAULTS = {
    "a second sample overwrites the first": Fault(
        "publish_samples", "redis.call('EXISTS', payload_keys[at]) == 0", "true"
    ),
    "a sample of an abandoned history counts": Fault(
        "publish_samples", "pending and is_leased(tasks_key, consumer_group, task_entry)", "pending"
    ),
    "a sample of an ended group is stored": Fault("publish_samples", "local leased = pending and", "local leased ="),
    "a task is acked with its first sample": Fault("publish_samples", "published >= tonumber(wanted)", "true"),
    "a task is never acked": Fault("publish_samples", "redis.call('XACK', tasks_key, consumer_group, task_entry)", ""),
    "a task of an ended group is not acked": Fault("publish_samples", "(not pending or published", "(published"),
    "a sample is stored but not announced": Fault("publish_samples", "publish(samples_key, sample_list[at])", "'0-0'"),
    "samples published together get the first one's payload": Fault(
        "publish_samples", "size * (at - 1) + 1, size * at", "1, size"
    ),
    "samples published together get the first one's message": Fault(
        "publish_samples", "sample_list[at]", "sample_list[1]"
    ),
    "samples published together count as one": Fault("publish_samples", "#announced / 2", "1"),
    "what is kept of a sample outlives its publication": Fault(
        "publish_samples", "forget_pieces(partials_key, published_now)", ""
    ),
    "what is kept of a group outlives its release": Fault("release", "redis.call('UNLINK', partials_key)", ""),
    "a late replica keeps its pieces": Fault("keep_partials", "or lease[1][2] ~= consumer then", "then"),
    "a second verdict is announced": Fault("publish_verdicts", "or judged[index] then", "then"),
    "a verdict of an abandoned history counts": Fault(
        "publish_verdicts", "sample_entry_list[at]) == 0", "sample_entry_list[at]) == 2"
    ),
    "a sample is judged but not acked": Fault(
        "publish_verdicts",
        "redis.call('XACK', samples_key, consumer_group, sample_entry_list[at]) == 0",
        "not is_leased(samples_key, consumer_group, sample_entry_list[at])",
    ),
    "a sample is acked but not judged": Fault("publish_verdicts", "publish(verdicts_key, verdict_list[at])", "'0-0'"),
    "of verdicts published together the first one's sample is acked": Fault(
        "publish_verdicts", "sample_entry_list[at]", "sample_entry_list[1]"
    ),
    "verdicts published together are the first one": Fault("publish_verdicts", "verdict_list[at]", "verdict_list[1]"),
    "a duplicated verdict counts its tokens again": Fault("record_verdicts", "and not known[index] then", "then"),
    "a recorded verdict is not acked": Fault("record_verdicts", "if #acked > 0 then", "if #acked > 9 then"),
    "of verdicts recorded together the first is acked": Fault("record_verdicts", "unpack(acked)", "acked[1]"),
    "verdicts recorded together are the first one": Fault("record_verdicts", "verdict_list[at]", "verdict_list[1]"),
    "a verdict is acked but not recorded": Fault(
        "record_verdicts", "if state == 'pending' and not", "if decision ~= 'kept' and state == 'pending' and not"
    ),
    "a verdict decides a group that has ended": Fault("record_verdicts", "or state ~= 'pending' or", "or"),
    "a group without a decision stays undecided": Fault(
        "record_verdicts", "if decision == ''", "if #effects == 0 or decision == ''"
    ),
    "a screened group does not draw the rest": Fault("record_verdicts", "publish(tasks_key, rest_task)", "'0-0'"),
    "a kept group is no longer pending": Fault(
        "record_verdicts",
        "if decision == 'kept' then",
        "redis.call('SREM', pending_key, group) if decision == 'kept' then",
    ),
    "a filtered group is not archived": Fault("record_verdicts", "retire_group(unarchived_key, group_key)", ""),
    "a released group is not archived": Fault("release", "retire_group(unarchived_key, group_key)", ""),
    "a group waits twice for the archive": Fault("shared", "'archive', 'waits') == 0", "'archive', 'waits') > 1"),
    "an archived group keeps its payloads": Fault(
        "take_archived", "for payload = first, last_of_group do redis.call('UNLINK', payload_keys[payload]) end", ""
    ),
    "a group that does not wait is archived": Fault("take_archived", "> 0 then", ">= 0 then"),
    "an archived group leaves no tombstone": Fault("shared", "redis.call('RPUSH', released_key, group_key)", ""),
    "a stripped group keeps its payloads": Fault(
        "strip_unarchived", "for payload = first, last_of_group do redis.call('UNLINK', payload_keys[payload]) end", ""
    ),
    "a stripped group is not archived": Fault("strip_unarchived", "redis.call('RPUSH', bare_key, group_key)", ""),
    "a group that does not wait is stripped": Fault("strip_unarchived", "> 0 then", ">= 0 then"),
    "a rewind leaves groups to be archived": Fault(
        "reopen_groups", "{unarchived_key, bare_key, released_key}", "{bare_key, released_key}"
    ),
    "a rewind leaves stripped groups to be archived": Fault(
        "reopen_groups", "{unarchived_key, bare_key, released_key}", "{unarchived_key, released_key}"
    ),
    "a batched group is released": Fault(
        "release", "if state ~= 'pending' and state ~= 'kept' and not lost then", "if not state then"
    ),
    "a release is not counted": Fault("release", "redis.call('HINCRBY', counters_key, release, 1)", ""),
    "a late renewal steals the lease": Fault("renew_lease", "#owned == 0 or owned[1][2] ~= consumer", "#owned == 0"),
    "a renewal counts as a delivery": Fault("renew_lease", ", 'JUSTID'", ""),
    "a message is dead-lettered twice": Fault("discard_entry", "== 0 then return 0", "== 9 then return 0"),
    "a message is dropped without a dead letter": Fault("discard_entry", "publish(dead_key, letter)", ""),
    "a group is dispatched twice": Fault("dispatch", "if not state or state == 'reopened' then", "if true then"),
    "a batch takes groups that are not kept": Fault(
        "publish_batch", "~= 'kept' then return 0", "== 'dead' then return 0"
    ),
    "a batch leaves its groups kept": Fault("publish_batch", "'state', 'batched', ", ""),
    "a step is committed twice": Fault(
        "commit_step", ">= tonumber(step) then return 0", "> tonumber(step) then return 0"
    ),
    "a trained group stays pending": Fault("commit_step", "redis.call('SREM', pending_key, group_list[at])", ""),
    "a version is announced twice": Fault(
        "announce_version", "version = math.max(newest,", "version = math.max(tonumber(current or '-1'),"
    ),
    "versions are never forgotten": Fault("announce_version", "and of_step >= tonumber(oldest_step)", ""),
    "a rewind leaves the steps of versions": Fault("finish_rewind", "'rewinding', 'version_steps'", "'rewinding'"),
    "a batch is released twice": Fault("release_batch", "== 0 then return 0", "== 9 then return 0"),
    "a released batch is not archived": Fault(
        "release_batch", "if retire_group(unarchived_key, group_key) then", "if false then"
    ),
    "a release that is cut off is forgotten": Fault("release_batch", "if last == '0' then return 1 end", ""),
    "trimming goes past a lease": Fault("trim", "if pending[1] > 0 then first = pending[2] end", ""),
    "trimming drops entries under lease behind the oldest": Fault("trim", " and not leased[entry[1]]", ""),
    "trimming drops the newest behind a lease": Fault(
        "trim", "'(' .. at, '(' .. last, 'COUNT'", "'(' .. at, '+', 'COUNT'"
    ),
    "trimming drops undelivered entries": Fault(
        "trim", "local first = group['last-delivered-id']", "local first = '9999999999999-0'"
    ),
    "a rewind leaves generated samples": Fault("reopen_groups", "redis.call('UNLINK', made_key)", ""),
    "a rewind leaves verdicts": Fault("reopen_groups", "redis.call('DEL', group_key)", ""),
    "a rewind leaves the tombstones": Fault(
        "reopen_groups", "{unarchived_key, bare_key, released_key}", "{unarchived_key, bare_key}"
    ),
    "a rewind leaves messages in flight": Fault(
        "start_rewind", "'UNLINK', tasks_key, samples_key, verdicts_key,", "'UNLINK', tasks_key,"
    ),
    "a rewind counts groups as trained": Fault(
        "reopen_groups", "group_list[at]) == 1 then", "group_list[at]) > 1 then"
    ),
    "a reopened group gets no task": Fault("dispatch", "if not state or state == 'reopened' then", "if not state then"),
    "a reopened group is dispatched as a new one": Fault("dispatch", "    if not state then", "    if true then"),
    "a rewind leaves the steps": Fault("reopen_groups", "redis.call('XDEL', steps_key, step_entry) == 1", "false"),
    "calls sent together get the first one's keys": Fault("shared", "slice(keys, key_at,", "slice(keys, 1,"),
    "calls sent together get the first one's arguments": Fault(
        "shared", "slice(args, arg_at,", "slice(args, 2 + 3 * calls,"
    ),
    "of calls sent together only the first runs": Fault("shared", "for at = 1, calls do", "for at = 1, 1 do"),
    "a previous owner writes": Fault("shared", "if stored_epoch > epoch or", "if"),
    "equal epochs": Fault(
        "shared", "stored_epoch == epoch and stored_owner ~= '' and stored_owner ~= owner", "stored_epoch < 0"
    ),
    "tokens leave the groups in flight without a use": Fault(
        "shared", "redis.call('HINCRBY', counters_key, 'tokens_' .. use, tokens)", ""
    ),
    "a trained group's tokens stay in flight": Fault(
        "commit_step", "tokens + move_tokens(counters_key, in_flight_key, group_list[at], 'trained')", "tokens"
    ),
    "a filtered group's tokens stay in flight": Fault(
        "record_verdicts", "move_tokens(counters_key, in_flight_key, group, decision)", ""
    ),
    "a reopened group's tokens stay in flight": Fault(
        "reopen_groups", "move_tokens(counters_key, in_flight_key, group_list[at], 'discarded')", ""
    ),
    "a rewound step's tokens are discarded again and again": Fault(
        "reopen_groups", "redis.call('HDEL', step_tokens_key, step)", ""
    ),
    "a sample's tokens are counted in its group alone": Fault(
        "publish_samples", "redis.call('HINCRBY', counters_key, 'tokens_generated', tokens)", ""
    ),
    "hashes of released groups are never deleted": Fault("trim_released", "tonumber(kept)", "999"),
}
