-- Start to rewind a run: its streams restart, so that messages in flight have no effect, and batches that were not
-- trained leave. A rewind that was interrupted is started again. Replies 0 if `resumption` was rewound to its end.
local epoch_key, policy_key, queue_key, tasks_key, samples_key, verdicts_key, batches_key, dead_key = unpack(keys)
local fence, resumption = unpack(args)

if redis.call('HGET', policy_key, 'resumption') == resumption then return 0 end
redis.call('UNLINK', tasks_key, samples_key, verdicts_key, batches_key)
-- The next sampler does not act on letters up to the newest one: their groups are drawn again.
local letters = redis.call('XREVRANGE', dead_key, '+', '-', 'COUNT', 1)
redis.call('HSET', queue_key, 'step', redis.call('HGET', policy_key, 'step') or '0', 'last', '0', 'letters',
  letters[1] and letters[1][1] or '0-0')
redis.call('HSET', policy_key, 'rewinding', '1')
return 1
