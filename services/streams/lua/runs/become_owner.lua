-- Make `owner` the owner of a role and reply with its epoch, above the previous owner's and above `above`; a repeated
-- call changes nothing. Also when memory is short: a new owner must be able to drain what a dead one left.
local epoch_key = unpack(keys)
local owner, above = unpack(args)

local epoch, current = parse_fence(redis.call('GET', epoch_key) or '0')
if current == owner then return epoch end
epoch = math.max(epoch, tonumber(above)) + 1
redis.call('SET', epoch_key, string.format('%.0f %s', epoch, owner))
return epoch
