-- What several functions need. Every function gets `keys` and `args`; all keys of a call share the run's hash tag.

-- Bounds of what is kept; footprint.py reckons with them.
local RELEASED_KEPT = 512  -- tombstones of released groups, so that late results still meet them
local DEAD_KEPT = 1024  -- dead letters

local function fenced(key, epoch)
  local held = tonumber(redis.call('GET', key) or '0')
  if held > tonumber(epoch) then
    return redis.error_reply('FENCED a newer owner holds ' .. key)
  end
  -- A server that came back without its last writes: the epoch is the owner's all the same.
  if held < tonumber(epoch) then redis.call('SET', key, epoch) end
end

local function publish(stream, body)
  return redis.call('XADD', stream, '*', 'm', body)
end

local function lay_down(dead, letter)
  publish(dead, letter)
  redis.call('XTRIM', dead, 'MAXLEN', DEAD_KEPT)
end

-- A line for a stream that nobody acks, of which the last `longest` are kept (0: all). The reply to a first call may
-- have been lost: what stands among the newest lines is not written again.
local function write(stream, body, longest)
  for _, entry in ipairs(redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 16)) do
    if entry[2][2] == body then return end
  end
  publish(stream, body)
  if longest ~= '0' then redis.call('XTRIM', stream, 'MAXLEN', '~', longest) end
end

-- UNKNOWN: this run never dispatched the group, or it was released long ago. OUTSIDE: the group has no such sample.
local FRESH, LATE, UNKNOWN, OUTSIDE = 1, 0, -1, -2

local function place(group, index)
  local found = redis.call('HMGET', group, 'state', 'samples')
  if not found[1] then return UNKNOWN end
  if tonumber(index) >= tonumber(found[2]) then return OUTSIDE end
  return FRESH, found[1]
end

-- A released group's payloads go at once; its hash stays until RELEASED_KEPT others were released after it.
local function bury(released, group, payloads)
  if #payloads > 0 then redis.call('UNLINK', unpack(payloads)) end
  redis.call('LREM', released, 0, group)
  redis.call('RPUSH', released, group)
  while redis.call('LLEN', released) > RELEASED_KEPT do
    redis.call('UNLINK', redis.call('LPOP', released))
  end
end

-- Whether an entry is still under lease, whoever's: neither acked nor given up, and of the stream as it is now. A rewind
-- begins the streams anew, and what is done under a lease of the abandoned history must not count.
local function leased(stream, consumer_group, entry)
  local found = redis.pcall('XPENDING', stream, consumer_group, entry, entry, 1)
  return not found.err and #found > 0
end

local function from(list, first)
  local rest = {}
  for i = first, #list do rest[#rest + 1] = list[i] end
  return rest
end
