-- Make an announced version current without a rollout step: the run's first, or one that a resumed run begins with.
-- keys: epoch, policy   args: epoch, version, step, digest of the weights
local refused = fenced(keys[1], args[1])
if refused then return refused end
if tonumber(redis.call('HGET', keys[2], 'version') or '-1') > tonumber(args[2]) then return 0 end
redis.call('HSET', keys[2], 'version', args[2], 'step', args[3], 'weights', args[4])
return 1
