-- Renew a lease, only if the caller still owns it: a late renewal steals nothing back.
-- keys: stream   args: consumer group, consumer, entry id
local owned = redis.pcall('XPENDING', keys[1], args[1], args[3], args[3], 1)
-- No such consumer group: the run was taken back to an older step, and its streams began anew.
if owned.err or #owned == 0 or owned[1][2] ~= args[2] then return 0 end
redis.call('XCLAIM', keys[1], args[1], args[2], 0, args[3], 'JUSTID')
return 1
