-- Let go of a batch whose step a checkpoint covers: the payloads, the sampler's snapshot, the batch itself.
-- keys: epoch, batches, released, snapshot, groups, payloads   args: epoch, entry id, number of groups
local refused = fenced(keys[1], args[1])
if refused then return refused end
if redis.call('XDEL', keys[2], args[2]) == 0 then return 0 end
redis.call('UNLINK', keys[4])
local groups = tonumber(args[3])
for i = 5, 4 + groups do bury(keys[3], keys[i], {}) end
for i = 5 + groups, #keys do redis.call('UNLINK', keys[i]) end
return 1
