-- Note a change that is about to be made. A repeated call has the same effect.
local pending_key = unpack(keys)
local request, entry = unpack(args)

redis.call('HSET', pending_key, request, entry)
return 1
