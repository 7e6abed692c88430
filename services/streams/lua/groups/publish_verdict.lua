-- Announce a verdict and ack the sample it judges. The first verdict per (group, sample) wins.
-- keys: group, verdicts, samples   args: consumer group, entry id, sample index, message
local found = place(keys[1], args[3])
if found < 0 then return found end
if not leased(keys[3], args[1], args[2]) then return LATE end
local fresh = redis.call('HSETNX', keys[1], 'judged:' .. args[3], '1')
if fresh == 1 then publish(keys[2], args[4]) end
redis.call('XACK', keys[3], args[1], args[2])
return fresh
