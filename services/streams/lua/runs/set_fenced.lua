-- Set a value as the owner of a role, also when memory is short.
local epoch_key, value_key = unpack(keys)
local fence, value = unpack(args)

redis.call('SET', value_key, value)
return 1
