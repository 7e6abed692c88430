-- Delete the entries that a stream's only consumer group has acked, up to its oldest unacked entry, about `most_before`
-- at once; and consumers that are gone: without a lease, and idle for `gone_after_ms`. If the stream has more than
-- `longest` entries, also delete acked entries after the oldest unacked one, at most `most_behind`: one slow message
-- must not pin all later ones. The oldest are deleted first, because readers that tail the stream may not have seen the
-- newest.
local stream_key = unpack(keys)
local consumer_group, gone_after_ms, longest, most_before, most_behind = unpack(args)

local function fields(reply)
  local found = {}
  for at = 1, #reply, 2 do found[reply[at]] = reply[at + 1] end
  return found
end

if redis.call('EXISTS', stream_key) == 0 then return 0 end
local groups = redis.call('XINFO', 'GROUPS', stream_key)
-- Another consumer group may not have read what this one has acked.
if #groups ~= 1 then return 0 end
local group = fields(groups[1])
if group['name'] ~= consumer_group then return 0 end
for _, reply in ipairs(redis.call('XINFO', 'CONSUMERS', stream_key, consumer_group)) do
  local consumer = fields(reply)
  if consumer['pending'] == 0 and consumer['idle'] > tonumber(gone_after_ms) then
    redis.call('XGROUP', 'DELCONSUMER', stream_key, consumer_group, consumer['name'])
  end
end
-- The last delivered entry stays until a later call, when another one was delivered.
local first = group['last-delivered-id']
local pending = redis.call('XPENDING', stream_key, consumer_group)
if pending[1] > 0 then first = pending[2] end
-- Redis bounds only a trim of whole nodes; of what remains when that ends early, one node is to be trimmed.
local dropped = redis.call('XTRIM', stream_key, 'MINID', '~', first, 'LIMIT', most_before)
if dropped > most_before / 2 then return dropped end
dropped = dropped + redis.call('XTRIM', stream_key, 'MINID', first)
local most = math.min(redis.call('XLEN', stream_key) - tonumber(longest), tonumber(most_behind))
local at, last = first, group['last-delivered-id']
while most > 0 and at ~= last do
  local entries = redis.call('XRANGE', stream_key, '(' .. at, '(' .. last, 'COUNT', 100)
  if #entries == 0 then break end
  at = entries[#entries][1]
  local leased = {}
  -- More than a hundred may be pending in this range: leases outlive entries that were deleted.
  for _, lease in ipairs(redis.call('XPENDING', stream_key, consumer_group, entries[1][1], at, pending[1])) do
    leased[lease[1]] = true
  end
  local done = {}
  for _, entry in ipairs(entries) do
    if #done < most and not leased[entry[1]] then done[#done + 1] = entry[1] end
  end
  if #done > 0 then redis.call('XDEL', stream_key, unpack(done)) end
  most, dropped = most - #done, dropped + #done
end
return dropped
