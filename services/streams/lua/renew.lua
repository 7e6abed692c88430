-- Renew a lease, only if the caller still owns it: a late renewal steals nothing back.
-- KEYS: stream   ARGV: consumer group, consumer, entry id
local owned = redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], ARGV[3], 1)
if #owned == 0 or owned[1][2] ~= ARGV[2] then return 0 end
redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[3], 'JUSTID')
return 1
