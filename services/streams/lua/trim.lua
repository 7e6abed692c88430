-- Drop what a stream's one consumer group has acked, up to the oldest entry that it has not; and consumers long gone.
-- keys: stream   args: consumer group, milliseconds after which a consumer without leases is gone
if redis.call('EXISTS', keys[1]) == 0 then return 0 end
local groups = redis.call('XINFO', 'GROUPS', keys[1])
-- Another group may not have read what this one is done with.
if #groups ~= 1 then return 0 end
local facts = {}
for i = 1, #groups[1], 2 do facts[groups[1][i]] = groups[1][i + 1] end
if facts['name'] ~= args[1] then return 0 end
for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', keys[1], args[1])) do
  local one = {}
  for i = 1, #consumer, 2 do one[consumer[i]] = consumer[i + 1] end
  if one['pending'] == 0 and one['idle'] > tonumber(args[2]) then
    redis.call('XGROUP', 'DELCONSUMER', keys[1], args[1], one['name'])
  end
end
-- The last delivered entry goes with the next call, when another one is behind it.
local first = facts['last-delivered-id']
local pending = redis.call('XPENDING', keys[1], args[1])
if pending[1] > 0 then first = pending[2] end
return redis.call('XTRIM', keys[1], 'MINID', first)
