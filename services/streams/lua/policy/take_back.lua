-- Take back the batch of a rollout step that is gone from the log, and those behind it: their groups are kept again.
-- keys: epoch, policy, batches, queue, events, then the groups of these batches
-- args: epoch, step, the lost entry, the event that tells of it, number of events kept
local refused = fenced(keys[1], args[1])
if refused then return refused end
if tonumber(redis.call('HGET', keys[2], 'step') or '-1') >= tonumber(args[2]) then return 0 end
if #redis.call('XRANGE', keys[3], args[3], args[3]) > 0 then return 0 end
for i = 6, #keys do
  local found = redis.call('HMGET', keys[i], 'state', 'step', 'batch')
  if found[1] == 'batched' and tonumber(found[2]) >= tonumber(args[2]) then
    redis.call('XDEL', keys[3], found[3])
    redis.call('HSET', keys[i], 'state', 'kept')
    redis.call('HDEL', keys[i], 'step', 'batch')
  end
end
redis.call('HSET', keys[4], 'step', tonumber(args[2]) - 1, 'last', '0')
write(keys[5], args[4], args[5])
return 1
