-- Move a message to the dead-letter stream, once, and ack it.
-- KEYS: stream, dead   ARGV: consumer group, entry id, letter
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[2]) == 0 then return 0 end
redis.call('XADD', KEYS[2], '*', 'm', ARGV[3])
return 1
