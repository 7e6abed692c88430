-- Move a message to the dead-letter stream, once, and ack it.
-- keys: stream, dead   args: consumer group, entry id, letter
if redis.call('XACK', keys[1], args[1], args[2]) == 0 then return 0 end
lay_down(keys[2], args[3])
return 1
