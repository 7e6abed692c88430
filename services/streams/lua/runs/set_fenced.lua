-- Set a value as the owner of a role, also when memory is short.
local epoch_key, value_key = unpack(keys)
local fence, value = unpack(args)

local refused = fenced(epoch_key, fence)
if refused then return refused end
redis.call('SET', value_key, value)
return 1
