-- Release a lock, unless it is no longer the owner's.
local lock_key = unpack(keys)
local owner = unpack(args)

if redis.call('GET', lock_key) ~= owner then return 0 end
return redis.call('DEL', lock_key)
