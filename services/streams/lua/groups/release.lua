-- Release a group that is pending or kept; a group that was released or batched stays as it is.
-- keys: epoch, group, counters, pending, released, then the group's payloads   args: epoch, group id, release
local refused = fenced(keys[1], args[1])
if refused then return refused end
local state = redis.call('HGET', keys[2], 'state')
if state ~= 'pending' and state ~= 'kept' then return 0 end
redis.call('HSET', keys[2], 'state', args[3])
redis.call('SREM', keys[4], args[2])
redis.call('HINCRBY', keys[3], args[3], 1)
bury(keys[5], keys[2], from(keys, 6))
return 1
