-- Record a rollout step: its groups are trained, its policy version is current, its batch is acked.
-- KEYS: epoch, batches, steps, version, counters, pending, then a group and its payloads as ARGV[8..] tell
-- ARGV: epoch, consumer group, entry id, step record, version, ttl s, number of groups, group ids
if tonumber(redis.call('GET', KEYS[1]) or '0') > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED a newer owner holds ' .. KEYS[1])
end
if tonumber(redis.call('GET', KEYS[4]) or '-1') >= tonumber(ARGV[5]) then return 0 end
local groups = tonumber(ARGV[7])
for i = 1, groups do
  if redis.call('HGET', KEYS[6 + i], 'state') == 'batched' then
    redis.call('HSET', KEYS[6 + i], 'state', 'trained', 'step', ARGV[5])
    redis.call('SREM', KEYS[6], ARGV[7 + i])
    redis.call('HINCRBY', KEYS[5], 'trained', 1)
  end
end
for i = 7, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[6]) end
redis.call('SET', KEYS[4], ARGV[5])
redis.call('XADD', KEYS[3], '*', 'm', ARGV[4])
redis.call('XACK', KEYS[2], ARGV[2], ARGV[3])
return 1
