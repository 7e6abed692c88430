-- Store a sample's payload and announce it; ack the task with the last sample it asks for. First result wins.
-- keys: group, payload, samples, tasks
-- args: consumer group, entry id, samples the task asks for, sample index, message, then payload field/value pairs
local found, state = place(keys[1], args[4])
if found < 0 then return found end
local fresh = LATE
if state == 'pending' and redis.call('EXISTS', keys[2]) == 0 and leased(keys[4], args[1], args[2]) then
  redis.call('HSET', keys[2], unpack(args, 6))
  publish(keys[3], args[5])
  redis.call('HINCRBY', keys[1], 'published', 1)
  fresh = FRESH
end
local published = tonumber(redis.call('HGET', keys[1], 'published') or '0')
if state ~= 'pending' or published >= tonumber(args[3]) then
  redis.call('XACK', keys[4], args[1], args[2])
end
return fresh
