"""Owns the faults that the queue's test must notice: what one of the Redis functions would say wrongly.

Must not be used outside tests.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.services.streams.queue_model import TOMBSTONES


class Fault(NamedTuple):
    """`old`, which function `name` (or `shared`) says `count` times, reads `new`."""

    name: str
    old: str
    new: str
    count: int = 1


FAULTS = {
    "a second sample overwrites the first": Fault("publish_sample", "redis.call('EXISTS', keys[2]) == 0", "true"),
    "a sample of an abandoned history counts": Fault("publish_sample", " and leased(keys[4], args[1], args[2])", ""),
    "a sample of an ended group is stored": Fault("publish_sample", "if state == 'pending' and", "if"),
    "a task is acked with its first sample": Fault("publish_sample", "published >= tonumber(args[3])", "true"),
    "a task is never acked": Fault("publish_sample", "redis.call('XACK', keys[4], args[1], args[2])", ""),
    "a task of an ended group is not acked": Fault(
        "publish_sample", "if state ~= 'pending' or published", "if published"
    ),
    "a sample is stored but not announced": Fault("publish_sample", "publish(keys[3], args[5])", ""),
    "a second verdict is announced": Fault("publish_verdict", "if fresh == 1 then", "if true then"),
    "a verdict of an abandoned history counts": Fault(
        "publish_verdict", "if not leased(keys[3], args[1], args[2]) then return LATE end", ""
    ),
    "a sample is judged but not acked": Fault("publish_verdict", "redis.call('XACK', keys[3], args[1], args[2])", ""),
    "a sample is acked but not judged": Fault(
        "publish_verdict", "if fresh == 1 then publish(keys[2], args[4]) end", ""
    ),
    "a duplicated verdict counts its tokens again": Fault("record_verdict", "if fresh == 1 then", "if true then"),
    "a recorded verdict is not acked": Fault("record_verdict", "redis.call('XACK', keys[3], args[2], args[3])", ""),
    "a verdict is acked and then refused": Fault(
        "record_verdict", "local fresh = redis", "if args[7] == 'kept' then return LATE end local fresh = redis"
    ),
    "a verdict decides a group that has ended": Fault(
        "record_verdict", "if state ~= 'pending' then return LATE end", "if not state then return LATE end"
    ),
    "a screened group is not asked for the rest": Fault("record_verdict", "publish(keys[7], args[9])", ""),
    "a kept group leaves the pending ones": Fault(
        "record_verdict",
        "if decision == 'kept' then",
        "redis.call('SREM', keys[5], args[6]) if decision == 'kept' then",
    ),
    "a filtered group keeps its payloads": Fault(
        "record_verdict", "bury(keys[6], keys[2], payloads)", "bury(keys[6], keys[2], {})"
    ),
    "a batched group is released": Fault(
        "release", "if state ~= 'pending' and state ~= 'kept' then", "if not state then"
    ),
    "a release is not counted": Fault("release", "redis.call('HINCRBY', keys[3], args[3], 1)", ""),
    "a late renewal steals the lease": Fault("renew", "#owned == 0 or owned[1][2] ~= args[2]", "#owned == 0"),
    "a renewal counts as a delivery": Fault("renew", ", 'JUSTID'", ""),
    "a message is given up twice": Fault("give_up", "== 0 then return 0", "== 9 then return 0"),
    "a message is given up without a letter": Fault("give_up", "lay_down(keys[2], args[3])", ""),
    "a group is dispatched twice": Fault("dispatch", "if redis.call('EXISTS', keys[3]) == 1 then return 0 end", ""),
    "a batch takes groups that are not kept": Fault(
        "publish_batch", "~= 'kept' then return 0", "== 'dead' then return 0"
    ),
    "a batch leaves its groups kept": Fault("publish_batch", "'state', 'batched', ", ""),
    "a step is committed twice": Fault(
        "commit_step", ">= tonumber(args[3]) then return 0", "> tonumber(args[3]) then return 0"
    ),
    "a trained group stays pending": Fault("commit_step", "redis.call('SREM', keys[5], id)", ""),
    "a version is announced twice": Fault("announce", "tonumber(p[4] or '-1') + 1", "tonumber(p[1] or '-1') + 1"),
    "a batch is covered twice": Fault("cover", "== 0 then return 0", "== 9 then return 0"),
    "a covered batch keeps its payloads": Fault(
        "cover", "for at = first, first + payloads - 1 do redis.call('UNLINK', keys[at]) end", ""
    ),
    "trimming goes past a lease": Fault("trim", "if pending[1] > 0 then first = pending[2] end", ""),
    "trimming drops what is under lease behind the oldest lease": Fault("trim", " and not leased[entry[1]]", ""),
    "trimming drops the newest behind a lease": Fault(
        "trim", "'(' .. at, '(' .. last, 'COUNT'", "'(' .. at, '+', 'COUNT'"
    ),
    "trimming drops what was not delivered": Fault(
        "trim", "local first = facts['last-delivered-id']", "local first = '9999999999999-0'"
    ),
    "a letter is redriven twice": Fault(
        "redrive",
        "if redis.call('HEXISTS', keys[1], args[1]) == 1 or redis.call('EXISTS', keys[3]) == 1 then return 0 end",
        "",
    ),
    "a live group is redriven": Fault("redrive", "if state and state ~= 'dead' then return -1 end", ""),
    "a rewind leaves what was generated": Fault("rewind", "redis.call('UNLINK', args[5] .. id .. ':' .. index)", ""),
    "a rewind leaves what was judged": Fault("rewind", "redis.call('DEL', group)", ""),
    "a rewind leaves the tombstones": Fault("rewind", "redis.call('LREM', keys[12], 0, group)", ""),
    "a rewind leaves what is on its way": Fault(
        "rewind", "redis.call('DEL', keys[5], keys[6], keys[7], keys[8])", "redis.call('DEL', keys[5], keys[8])"
    ),
    "a rewind counts groups as trained": Fault("rewind", "if trained == '1' then", "if trained == '2' then"),
    "a rewind does not ask again": Fault("rewind", "  publish(keys[5], task)\n", ""),
    "a rewind leaves batches that nobody covers": Fault(
        "rewind", "for i = 14, #keys do redis.call('UNLINK', keys[i]) end", ""
    ),
    "a former owner writes": Fault("shared", "> tonumber(epoch) then", "< 0 then"),
    "tombstones are kept for ever": Fault("shared", f"RELEASED_KEPT = {TOMBSTONES}", "RELEASED_KEPT = 999"),
}
