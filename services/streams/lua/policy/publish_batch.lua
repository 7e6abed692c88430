-- Publish the batch of a rollout step once: its groups must all be kept, and none may be in another batch.
-- `last`: '1' for the run's last batch, else '0'.
local epoch_key, batches_key, sampler_state_key, snapshot_key, queue_key, counters_key, group_keys = unpack(keys)
local fence, step, batch, sampler_state, snapshot, last = unpack(args)

-- The reply to a first call may have been lost: a repeated call is no error.
if redis.call('HGET', queue_key, 'step') == step then return 1 end
for _, group_key in ipairs(group_keys) do
  if redis.call('HGET', group_key, 'state') ~= 'kept' then return 0 end
end
local entry = publish(batches_key, batch)
-- The entry's id makes this the only batch that may train the groups: any client that reaches Redis can write another.
for _, group_key in ipairs(group_keys) do
  redis.call('HSET', group_key, 'state', 'batched', 'step', step, 'batch', entry)
end
redis.call('SET', sampler_state_key, sampler_state)
redis.call('SET', snapshot_key, snapshot)
redis.call('HSET', queue_key, 'step', step, 'last', last, 'judged', redis.call('HGET', counters_key, 'judged') or '0')
return 1
