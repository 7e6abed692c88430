-- Create a run's record as a whole. A repeated call is no error. `field_list`: field, value, field, value, ...
local record_key = unpack(keys)
local created_at, field_list = unpack(args)

local found = redis.call('HGET', record_key, 'created_at')
if found then return found == created_at and 1 or 0 end
redis.call('HSET', record_key, 'created_at', created_at, unpack(field_list))
return 1
