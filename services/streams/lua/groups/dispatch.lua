-- Publish one task and count its group. A group is dispatched once, whoever repeats the call.
-- keys: epoch, tasks, group, counters, pending, sampler-state   args: epoch, group id, task, samples, sampler state
local refused = fenced(keys[1], args[1])
if refused then return refused end
if redis.call('EXISTS', keys[3]) == 1 then return 0 end
redis.call('HSET', keys[3], 'state', 'pending', 'task', args[3], 'samples', args[4])
redis.call('SADD', keys[5], args[2])
redis.call('HINCRBY', keys[4], 'dispatched', 1)
publish(keys[2], args[3])
if args[5] ~= '' then redis.call('SET', keys[6], args[5]) end
return 1
