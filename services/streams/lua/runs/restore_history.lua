-- Give a run that Redis has lost its history again, unless it has one: the committed policy, the counters, the sampler's
-- state, and the steps that have a checkpoint. 1 if it has this history now; 0: it has another one; -1: no such run.
-- `policy_list`, `counter_list`: field, value, field, value, ... `sampler_state`: '' for none.
local record_key, policy_key, counters_key, sampler_state_key, checkpoints_key = unpack(keys)
local sampler_state, checkpoints, policy_list, counter_list = unpack(args)

if redis.call('EXISTS', record_key) == 0 then return -1 end
if redis.call('EXISTS', policy_key) == 1 then
  return redis.call('HGET', policy_key, policy_list[1]) == policy_list[2] and 1 or 0
end
redis.call('HSET', policy_key, unpack(policy_list))
if #counter_list > 0 then redis.call('HSET', counters_key, unpack(counter_list)) end
if sampler_state ~= '' then redis.call('SET', sampler_state_key, sampler_state) end
redis.call('SET', checkpoints_key, checkpoints)
return 1
