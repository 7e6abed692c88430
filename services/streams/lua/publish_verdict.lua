-- Announce a verdict and ack the sample it judges. The first verdict per (group, sample) wins.
-- KEYS: group, verdicts, samples   ARGV: consumer group, entry id, sample index, message
local fresh = 0
if redis.call('EXISTS', KEYS[1]) == 1 then
  fresh = redis.call('HSETNX', KEYS[1], 'judged:' .. ARGV[3], '1')
  if fresh == 1 then redis.call('XADD', KEYS[2], '*', 'm', ARGV[4]) end
end
redis.call('XACK', KEYS[3], ARGV[1], ARGV[2])
return fresh
