-- Release a pending or kept group, or a pending one whose hash Redis lost. One that was released or batched is left.
local epoch_key, group_key, counters_key, pending_key, released_key, payload_keys = unpack(keys)
local fence, group, release = unpack(args)

local state = redis.call('HGET', group_key, 'state')
local lost = not state and redis.call('SISMEMBER', pending_key, group) == 1
if state ~= 'pending' and state ~= 'kept' and not lost then return 0 end
redis.call('HSET', group_key, 'state', release)
redis.call('SREM', pending_key, group)
redis.call('HINCRBY', counters_key, release, 1)
retire_group(released_key, group_key, payload_keys)
return 1
