-- Drop what a stream's one consumer group has acked, up to the oldest entry that it has not; and consumers long gone.
-- A stream that is still too long loses what is acked behind that entry too: one slow message must not hold on to all
-- that came after it. The oldest go first, for the newest may not have been seen by those who tail the stream.
-- keys: stream
-- args: consumer group, milliseconds after which a consumer without leases is gone, entries from which on a stream is
--       too long, most entries to drop behind the oldest unacked one
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
local dropped = redis.call('XTRIM', keys[1], 'MINID', first)
local most = math.min(redis.call('XLEN', keys[1]) - tonumber(args[3]), tonumber(args[4]))
local at, last = first, facts['last-delivered-id']
while most > 0 and at ~= last do
  local entries = redis.call('XRANGE', keys[1], '(' .. at, '(' .. last, 'COUNT', 100)
  if #entries == 0 then break end
  at = entries[#entries][1]
  local leased = {}
  -- All that are pending there may be more than a hundred: leases outlive entries that somebody deleted.
  for _, one in ipairs(redis.call('XPENDING', keys[1], args[1], entries[1][1], at, pending[1])) do
    leased[one[1]] = true
  end
  local done = {}
  for _, entry in ipairs(entries) do
    if #done < most and not leased[entry[1]] then done[#done + 1] = entry[1] end
  end
  if #done > 0 then redis.call('XDEL', keys[1], unpack(done)) end
  most, dropped = most - #done, dropped + #done
end
return dropped
