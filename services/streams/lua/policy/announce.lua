-- The version under which the weights of a step are to be published: the one they have, else a new one.
-- keys: epoch, policy   args: epoch, step, digest of the weights
local refused = fenced(keys[1], args[1])
if refused then return refused end
local p = redis.call('HMGET', keys[2], 'version', 'step', 'weights', 'announced', 'announced_step', 'announced_weights')
if p[2] == args[2] and p[3] == args[3] then return tonumber(p[1]) end
if p[5] == args[2] and p[6] == args[3] then return tonumber(p[4]) end
local version = tonumber(p[4] or '-1') + 1
redis.call('HSET', keys[2], 'announced', version, 'announced_step', args[2], 'announced_weights', args[3])
return version
