-- Publish a batch once: its groups must all be kept, and none may be in another batch.
-- KEYS: epoch, batches, sampler-state, then the groups   ARGV: epoch, batch, sampler state
if tonumber(redis.call('GET', KEYS[1]) or '0') > tonumber(ARGV[1]) then
  return redis.error_reply('FENCED a newer owner holds ' .. KEYS[1])
end
for i = 4, #KEYS do
  if redis.call('HGET', KEYS[i], 'state') ~= 'kept' then return 0 end
end
for i = 4, #KEYS do redis.call('HSET', KEYS[i], 'state', 'batched') end
redis.call('XADD', KEYS[2], '*', 'm', ARGV[2])
redis.call('SET', KEYS[3], ARGV[3])
return 1
