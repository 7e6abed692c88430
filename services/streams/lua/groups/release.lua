-- Release a pending or kept group, or a pending one whose hash Redis lost. One that was released or batched is left.
-- `samples`: how many the group may have, for one without a hash. `reason`: for the archive.
local epoch_key, group_key, counters_key, pending_key, unarchived_key, in_flight_key, partials_key = unpack(keys)
local fence, group, release, samples, reason = unpack(args)

local state = redis.call('HGET', group_key, 'state')
local lost = not state and redis.call('SISMEMBER', pending_key, group) == 1
if state ~= 'pending' and state ~= 'kept' and not lost then return 0 end
redis.call('HSET', group_key, 'state', release, 'reason', reason)
if lost and samples ~= '0' then redis.call('HSET', group_key, 'samples', samples) end
redis.call('UNLINK', partials_key)
redis.call('SREM', pending_key, group)
redis.call('HINCRBY', counters_key, release, 1)
move_tokens(counters_key, in_flight_key, group, release)
retire_group(unarchived_key, group_key)
return 1
