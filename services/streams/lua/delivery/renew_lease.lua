-- Renew a lease, if the caller still owns it: a late renewal must not take the lease from a new owner.
local stream_key = unpack(keys)
local consumer_group, consumer, entry = unpack(args)

local owned = redis.pcall('XPENDING', stream_key, consumer_group, entry, entry, 1)
-- The error means that there is no such consumer group: a rewind deleted the run's streams.
if owned.err or #owned == 0 or owned[1][2] ~= consumer then return 0 end
redis.call('XCLAIM', stream_key, consumer_group, consumer, 0, entry, 'JUSTID')
return 1
