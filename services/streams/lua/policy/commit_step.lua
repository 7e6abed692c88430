-- Record a rollout step: its groups are trained and its policy version is current. Nothing happens (-1) if the sampler
-- took the batch back meanwhile: every group must still be in this very one.
-- keys: epoch, policy, steps, counters, pending, then the groups
-- args: epoch, version, step, digest of the weights, step record, the batch's entry, then per group its id and its lag
local refused = fenced(keys[1], args[1])
if refused then return refused end
if tonumber(redis.call('HGET', keys[2], 'step') or '-1') >= tonumber(args[3]) then return 0 end
for i = 6, #keys do
  local found = redis.call('HMGET', keys[i], 'state', 'step', 'batch')
  if found[1] ~= 'batched' or found[2] ~= args[3] or (found[3] and found[3] ~= args[6]) then return -1 end
end
for i = 6, #keys do
  local id, staleness = args[2 * i - 5], args[2 * i - 4]
  redis.call('HSET', keys[i], 'state', 'trained', 'step', args[3], 'staleness', staleness)
  redis.call('SREM', keys[5], id)
  redis.call('HINCRBY', keys[4], 'trained', 1)
end
redis.call('HSET', keys[2], 'version', args[2], 'step', args[3], 'weights', args[4])
publish(keys[3], args[5])
return 1
