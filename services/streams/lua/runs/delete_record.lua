-- Delete the record of a run that is being deleted, and its place in the indices: the last step of its deletion.
local record_key, runs_key, active_key = unpack(keys)
local run, closing = unpack(args)

local state, found = unpack(redis.call('HMGET', record_key, 'state', 'closing'))
if state and found ~= closing then return 0 end
redis.call('UNLINK', record_key)
redis.call('ZREM', runs_key, run)
redis.call('SREM', active_key, run)
return 1
