-- Create a consumer group at the start of a stream, unless it exists; also when memory is short.
local stream_key = unpack(keys)
local consumer_group = unpack(args)

local created = redis.pcall('XGROUP', 'CREATE', stream_key, consumer_group, '0', 'MKSTREAM')
if not created.err then return 1 end
if created.err:find('BUSYGROUP', 1, true) then return 0 end
return created
