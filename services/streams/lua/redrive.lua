-- Ask anew for the group of a dead letter, once, and under a name of its own. The dead group stays dead: what is still
-- on its way for it must not meet new samples, and one whose hash is gone may have been trained long ago.
-- keys: redriven, group, new group, tasks, counters, pending
-- args: group id, new group id, task of the new group, samples
if redis.call('HEXISTS', keys[1], args[1]) == 1 or redis.call('EXISTS', keys[3]) == 1 then return 0 end
local state = redis.call('HGET', keys[2], 'state')
if state and state ~= 'dead' then return -1 end
redis.call('HSET', keys[1], args[1], args[2])
redis.call('HSET', keys[3], 'state', 'pending', 'task', args[3], 'samples', args[4])
redis.call('SADD', keys[6], args[2])
redis.call('HINCRBY', keys[5], 'dispatched', 1)
publish(keys[4], args[3])
return 1
