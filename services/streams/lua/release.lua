-- Release a group that is pending or kept; a group that was released or batched stays as it is.
-- KEYS: epoch, group, counters, pending, then the group's payloads   ARGV: epoch, group id, release, ttl s
if tonumber(redis.call('GET', KEYS[1]) or '0') > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED a newer owner holds ' .. KEYS[1])
end
local state = redis.call('HGET', KEYS[2], 'state')
if state ~= 'pending' and state ~= 'kept' then return 0 end
redis.call('HSET', KEYS[2], 'state', ARGV[3])
redis.call('SREM', KEYS[4], ARGV[2])
redis.call('HINCRBY', KEYS[3], ARGV[3], 1)
redis.call('EXPIRE', KEYS[2], ARGV[4])
for i = 5, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[4]) end
return 1
