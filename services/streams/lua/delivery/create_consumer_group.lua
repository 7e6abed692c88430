-- Create a consumer group at the start of a stream, unless it exists; also when memory is short. A run without a record
-- was deleted, and its last processes must not create its streams again.
local record_key, stream_key = unpack(keys)
local consumer_group = unpack(args)

if redis.call('EXISTS', record_key) == 0 then return gone(record_key) end
local created = redis.pcall('XGROUP', 'CREATE', stream_key, consumer_group, '0', 'MKSTREAM')
if not created.err then return 1 end
if created.err:find('BUSYGROUP', 1, true) then return 0 end
return created
