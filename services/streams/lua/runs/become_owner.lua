-- Make `owner` the owner of a role and reply with its epoch, one above the previous owner's; a repeated call changes
-- nothing. Also when memory is short: a new owner must be able to drain what a dead one left.
local epoch_key = unpack(keys)
local owner = unpack(args)

local epoch, current = parse_fence(redis.call('GET', epoch_key) or '0')
if current == owner then return epoch end
redis.call('SET', epoch_key, string.format('%.0f %s', epoch + 1, owner))
return epoch + 1
