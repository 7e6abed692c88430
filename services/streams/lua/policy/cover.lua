-- Let go of a batch whose step a checkpoint covers: the payloads, the sampler's snapshot, the batch itself.
-- keys: epoch, batches, released, snapshot, groups, their payloads   args: epoch, entry id, step, payloads of each group
local refused = fenced(keys[1], args[1])
if refused then return refused end
if redis.call('XDEL', keys[2], args[2]) == 0 then return 0 end
local first = 5 + #args - 3
for i = 5, 5 + #args - 4 do
  local payloads = tonumber(args[i - 1])
  local found = redis.call('HMGET', keys[i], 'state', 'step', 'covered')
  -- Anybody who reaches Redis can write a batch, or this one again; it must not take what it does not own.
  if found[1] == 'trained' and found[2] == args[3] and not found[3] then
    redis.call('HSET', keys[i], 'covered', '1')
    redis.call('UNLINK', keys[4])
    for at = first, first + payloads - 1 do redis.call('UNLINK', keys[at]) end
    bury(keys[3], keys[i], {})
  end
  first = first + payloads
end
return 1
