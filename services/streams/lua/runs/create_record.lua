-- Add a run's record, whole. To repeat the call is no fault.
-- keys: record   args: time of creation, then field/value pairs
local found = redis.call('HGET', keys[1], 'created_at')
if found then return found == args[1] and 1 or 0 end
redis.call('HSET', keys[1], 'created_at', args[1], unpack(args, 2))
return 1
