-- Remove a batch that will not be trained from the log. With a dead letter it is rejected; without one ('') the sampler
-- finds it missing and reclaims its groups.
local epoch_key, batches_key, dead_key = unpack(keys)
local fence, entry, letter = unpack(args)

local refused = fenced(epoch_key, fence)
if refused then return refused end
if redis.call('XDEL', batches_key, entry) == 0 then return 0 end
if letter ~= '' then add_letter(dead_key, letter) end
return 1
