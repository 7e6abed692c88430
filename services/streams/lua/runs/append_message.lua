-- Append a message, also when memory is short; nothing of a run without a record, which was deleted. `kept`: length of
-- the stream (0: unbounded).
local record_key, stream_key = unpack(keys)
local message, kept = unpack(args)

if redis.call('EXISTS', record_key) == 0 then return 0 end
append_once(stream_key, message, kept)
return 1
