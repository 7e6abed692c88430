-- Delete an entry from a stream that has no consumer group, and add its dead letter, once.
local stream_key, dead_key = unpack(keys)
local entry, letter = unpack(args)

if redis.call('XDEL', stream_key, entry) == 0 then return 0 end
add_letter(dead_key, letter)
return 1
