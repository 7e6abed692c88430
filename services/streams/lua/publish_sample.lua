-- Store a sample's payload and announce it; ack the task with the group's last sample. First result wins.
-- KEYS: group, payload, samples, tasks
-- ARGV: consumer group, entry id, samples in the group, message, then payload field/value pairs
local fresh = 0
local pending = redis.call('HGET', KEYS[1], 'state') == 'pending'
if pending and redis.call('EXISTS', KEYS[2]) == 0 then
  redis.call('HSET', KEYS[2], unpack(ARGV, 5))
  redis.call('XADD', KEYS[3], '*', 'm', ARGV[4])
  redis.call('HINCRBY', KEYS[1], 'published', 1)
  fresh = 1
end
if not pending or tonumber(redis.call('HGET', KEYS[1], 'published')) >= tonumber(ARGV[3]) then
  redis.call('XACK', KEYS[4], ARGV[1], ARGV[2])
end
return fresh
