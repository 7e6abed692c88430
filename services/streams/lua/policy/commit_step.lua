-- Record a rollout step: its groups are trained and its policy version is current. Replies -1 and changes nothing if
-- the sampler reclaimed the batch meanwhile: every group must still be in the batch of `batch_entry`; and -2 if Redis
-- lost the commit of the step before, which a failover may do.
-- `step_tokens_key`: the tokens of each step, for a rewind. `weights`: the digest of the weights; the lists have one
-- element per group, `optimizer_step_list` '' for one that no optimizer step trained.
local epoch_key, policy_key, steps_key, counters_key, pending_key, in_flight_key, step_tokens_key, group_keys =
  unpack(keys)
local fence, version, step, weights, record, batch_entry, group_list, staleness_list, optimizer_step_list = unpack(args)

local committed = tonumber(redis.call('HGET', policy_key, 'step') or step - 1)
if committed >= tonumber(step) then return 0 end
if committed < step - 1 then return -2 end
for _, group_key in ipairs(group_keys) do
  local found = redis.call('HMGET', group_key, 'state', 'step', 'batch')
  if found[1] ~= 'batched' or found[2] ~= step or (found[3] and found[3] ~= batch_entry) then return -1 end
end
local tokens = 0
for at, group_key in ipairs(group_keys) do
  redis.call('HSET', group_key, 'state', 'trained', 'step', step, 'version', version, 'staleness',
    staleness_list[at], 'optimizer_step', optimizer_step_list[at])
  redis.call('SREM', pending_key, group_list[at])
  redis.call('HINCRBY', counters_key, 'trained', 1)
  tokens = tokens + move_tokens(counters_key, in_flight_key, group_list[at], 'trained')
end
redis.call('HSET', step_tokens_key, step, tokens)
remember_version(policy_key, version, step, weights)
redis.call('HSET', policy_key, 'version', version, 'step', step, 'weights', weights)
publish(steps_key, record)
return 1
