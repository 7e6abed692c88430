-- Ask anew for the group of a dead letter, once, and under a name of its own. The dead group stays dead: what is still
-- on its way for it must not meet new samples, and one whose hash is gone may have been trained long ago.
-- keys: redriven, group, new group, tasks, counters, pending, dead
-- args: group id, new group id, task of the new group, samples, most redriven groups that may be pending, entries of
--       `redriven` from which on those are forgotten that no letter can ask for any more
if redis.call('HEXISTS', keys[1], args[1]) == 1 or redis.call('EXISTS', keys[3]) == 1 then return 0 end
local state = redis.call('HGET', keys[2], 'state')
if state and state ~= 'dead' then return -1 end
local function milliseconds(entries)
  return entries[1] and tonumber(entries[1][1]:match('^%d+')) or 0
end
local oldest = milliseconds(redis.call('XRANGE', keys[7], '-', '+', 'COUNT', 1))
local known, waiting, old = redis.call('HGETALL', keys[1]), 0, {}
for i = 1, #known, 2 do
  -- The new name, and when the newest letter was laid down by then: once all that are left are younger, none of that
  -- time can ask for the group again.
  local name, newest = known[i + 1]:match('^(%S+) (%d+)$')
  if redis.call('SISMEMBER', keys[6], name or known[i + 1]) == 1 then
    waiting = waiting + 1
  elseif newest and tonumber(newest) < oldest then
    old[#old + 1] = known[i]
  end
end
if waiting >= tonumber(args[5]) then return -2 end
if #known / 2 >= tonumber(args[6]) then
  for _, group in ipairs(old) do redis.call('HDEL', keys[1], group) end
end
local now = milliseconds(redis.call('XREVRANGE', keys[7], '+', '-', 'COUNT', 1))
redis.call('HSET', keys[1], args[1], args[2] .. ' ' .. string.format('%.0f', now))
redis.call('HSET', keys[3], 'state', 'pending', 'task', args[3], 'samples', args[4])
redis.call('SADD', keys[6], args[2])
redis.call('HINCRBY', keys[5], 'dispatched', 1)
publish(keys[4], args[3])
return 1
