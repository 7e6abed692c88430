-- Draw the group of a dead letter again, once, under a new name. The dead group stays dead: messages in flight for it
-- must not meet new samples, and a group whose hash is gone may have been trained long ago.
-- At most `most_pending` redriven groups may be pending. With `names_kept` names or more in the hash `redriven`, the
-- names that no dead letter can refer to any more are deleted.
local redriven_key, group_key, new_group_key, tasks_key, counters_key, pending_key, dead_key = unpack(keys)
local group, new_group, new_task, samples, most_pending, names_kept = unpack(args)

if redis.call('HEXISTS', redriven_key, group) == 1 or redis.call('EXISTS', new_group_key) == 1 then return 0 end
local state = redis.call('HGET', group_key, 'state')
if state and state ~= 'dead' then return -1 end
local function milliseconds(entries)
  return entries[1] and tonumber(entries[1][1]:match('^%d+')) or 0
end
local oldest = milliseconds(redis.call('XRANGE', dead_key, '-', '+', 'COUNT', 1))
local known, waiting, old = redis.call('HGETALL', redriven_key), 0, {}
for at = 1, #known, 2 do
  -- The value is the new name, and the time of the newest letter when it was given. Once all letters are younger than
  -- that, none of them can refer to the group.
  local name, newest = known[at + 1]:match('^(%S+) (%d+)$')
  if redis.call('SISMEMBER', pending_key, name or known[at + 1]) == 1 then
    waiting = waiting + 1
  elseif newest and tonumber(newest) < oldest then
    old[#old + 1] = known[at]
  end
end
if waiting >= tonumber(most_pending) then return -2 end
if #known / 2 >= tonumber(names_kept) then
  for _, name in ipairs(old) do redis.call('HDEL', redriven_key, name) end
end
local now = milliseconds(redis.call('XREVRANGE', dead_key, '+', '-', 'COUNT', 1))
redis.call('HSET', redriven_key, group, new_group .. ' ' .. string.format('%.0f', now))
redis.call('HSET', new_group_key, 'state', 'pending', 'task', new_task, 'samples', samples)
redis.call('SADD', pending_key, new_group)
redis.call('HINCRBY', counters_key, 'dispatched', 1)
publish(tasks_key, new_task)
return 1
