-- Publish one task and count its group. A repeated call changes nothing.
local epoch_key, tasks_key, group_key, counters_key, pending_key, sampler_state_key = unpack(keys)
local epoch, group, task, samples, sampler_state = unpack(args)

local refused = fenced(epoch_key, epoch)
if refused then return refused end
if redis.call('EXISTS', group_key) == 1 then return 0 end
redis.call('HSET', group_key, 'state', 'pending', 'task', task, 'samples', samples, 'entry', publish(tasks_key, task))
redis.call('SADD', pending_key, group)
redis.call('HINCRBY', counters_key, 'dispatched', 1)
if sampler_state ~= '' then redis.call('SET', sampler_state_key, sampler_state) end
return 1
