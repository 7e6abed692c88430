-- Move a message to the dead-letter stream, once, and ack it.
local stream_key, dead_key = unpack(keys)
local consumer_group, entry, letter = unpack(args)

if redis.call('XACK', stream_key, consumer_group, entry) == 0 then return 0 end
add_letter(dead_key, letter)
return 1
