-- Delete keys of a run whose record is closed in this way, or that has no record any more; nothing of another run that
-- has its id since then.
local record_key, doomed_keys = unpack(keys)
local closing = unpack(args)

local history, found = unpack(redis.call('HMGET', record_key, 'history', 'closing'))
if history and found ~= closing then return -1 end
return redis.call('UNLINK', unpack(doomed_keys))
