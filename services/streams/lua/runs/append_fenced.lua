-- Append a message as the owner of a role. `kept`: length of the stream (0: unbounded).
local epoch_key, stream_key = unpack(keys)
local fence, message, kept = unpack(args)

append_once(stream_key, message, kept)
return 1
