-- Append a message, also when memory is short. `kept`: length of the stream (0: unbounded).
local stream_key = unpack(keys)
local message, kept = unpack(args)

append_once(stream_key, message, kept)
return 1
