-- Take a lock that its owner holds for `lifetime_ms` at most. A repeated call of the owner succeeds again.
local lock_key = unpack(keys)
local owner, lifetime_ms = unpack(args)

local found = redis.call('GET', lock_key)
if found and found ~= owner then return 0 end
redis.call('SET', lock_key, owner, 'PX', lifetime_ms)
return 1
