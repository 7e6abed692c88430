-- Create a consumer group at a stream's beginning, unless it exists; also when memory is short.
-- keys: stream   args: consumer group
local made = redis.pcall('XGROUP', 'CREATE', keys[1], args[1], '0', 'MKSTREAM')
if not made.err then return 1 end
if made.err:find('BUSYGROUP', 1, true) then return 0 end
return made
