-- Raise a role's epoch, also when memory is short: a new owner must be able to drain what a dead one left.
local epoch_key = unpack(keys)

return redis.call('INCR', epoch_key)
