-- Keep a verdict in its group and ack it; with the group's last verdict, also say how the group goes on.
-- KEYS: epoch, group, verdicts, counters, pending, then the group's payloads
-- ARGV: epoch, consumer group, entry id, sample index, verdict, group id, decision ('' | kept | a release), ttl s of the
--       group, ttl s of its payloads, response tokens of the sample
if tonumber(redis.call('GET', KEYS[1]) or '0') > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED a newer owner holds ' .. KEYS[1])
end
redis.call('XACK', KEYS[3], ARGV[2], ARGV[3])
if redis.call('HGET', KEYS[2], 'state') ~= 'pending' then return 0 end
if redis.call('HSETNX', KEYS[2], 'verdict:' .. ARGV[4], ARGV[5]) == 1 then
  redis.call('HINCRBY', KEYS[4], 'response_tokens', ARGV[10])
end
if ARGV[7] == '' then return 1 end
redis.call('HSET', KEYS[2], 'state', ARGV[7])
if ARGV[7] ~= 'kept' then
  redis.call('SREM', KEYS[5], ARGV[6])
  redis.call('HINCRBY', KEYS[4], ARGV[7], 1)
  redis.call('EXPIRE', KEYS[2], ARGV[8])
  for i = 6, #KEYS do redis.call('EXPIRE', KEYS[i], ARGV[9]) end
end
return 1
