-- Publish one task and count its group. A group is dispatched once, whoever repeats the call.
-- KEYS: epoch, tasks, group, counters, pending, sampler-state   ARGV: epoch, group id, task, sampler state
if tonumber(redis.call('GET', KEYS[1]) or '0') > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED a newer owner holds ' .. KEYS[1])
end
if redis.call('EXISTS', KEYS[3]) == 1 then return 0 end
redis.call('HSET', KEYS[3], 'state', 'pending', 'task', ARGV[3])
redis.call('SADD', KEYS[5], ARGV[2])
redis.call('HINCRBY', KEYS[4], 'dispatched', 1)
redis.call('XADD', KEYS[2], '*', 'm', ARGV[3])
if ARGV[4] ~= '' then redis.call('SET', KEYS[6], ARGV[4]) end
return 1
