-- Set a value as the owner of a role, also when memory is short.
-- keys: epoch, value   args: epoch, value
local refused = fenced(keys[1], args[1])
if refused then return refused end
redis.call('SET', keys[2], args[2])
return 1
