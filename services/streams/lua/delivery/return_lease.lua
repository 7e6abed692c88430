-- Return a lease, if the caller still owns it: the entry can be taken at once, and this delivery is not counted.
-- `returned`: the consumer that holds returned entries, so that they are found; `idle_ms`: longer than a lease.
local stream_key = unpack(keys)
local consumer_group, consumer, entry, returned, idle_ms = unpack(args)

local owned = redis.pcall('XPENDING', stream_key, consumer_group, entry, entry, 1)
if owned.err or #owned == 0 or owned[1][2] ~= consumer then return 0 end
redis.call('XCLAIM', stream_key, consumer_group, returned, 0, entry, 'IDLE', idle_ms, 'RETRYCOUNT',
  math.max(owned[1][4] - 1, 0), 'JUSTID')
return 1
