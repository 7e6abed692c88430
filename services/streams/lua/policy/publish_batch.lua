-- Publish the batch of a rollout step once: its groups must all be kept, and none may be in another batch.
-- keys: epoch, batches, sampler-state, snapshot, queue, counters, then the groups
-- args: epoch, step, batch, sampler state, snapshot, whether it is the run's last ('1' | '0')
local refused = fenced(keys[1], args[1])
if refused then return refused end
-- The reply to a first call may have been lost: to repeat it is no fault.
if redis.call('HGET', keys[5], 'step') == args[2] then return 1 end
for i = 7, #keys do
  if redis.call('HGET', keys[i], 'state') ~= 'kept' then return 0 end
end
local entry = publish(keys[2], args[3])
-- The entry's id makes this the only batch that may train them: anybody who reaches Redis can write another.
for i = 7, #keys do redis.call('HSET', keys[i], 'state', 'batched', 'step', args[2], 'batch', entry) end
redis.call('SET', keys[3], args[4])
redis.call('SET', keys[4], args[5])
redis.call('HSET', keys[5], 'step', args[2], 'last', args[6],
  'judged', redis.call('HGET', keys[6], 'judged') or '0')
return 1
