-- The version under which the weights of a step are to be published: the one that they have, else a new one.
-- `weights`: the digest of the weights.
local epoch_key, policy_key = unpack(keys)
local fence, step, weights = unpack(args)

local refused = fenced(epoch_key, fence)
if refused then return refused end
local current, current_step, current_weights, announced, announced_step, announced_weights = unpack(
  redis.call('HMGET', policy_key, 'version', 'step', 'weights', 'announced', 'announced_step', 'announced_weights'))
if current_step == step and current_weights == weights then return tonumber(current) end
if announced_step == step and announced_weights == weights then return tonumber(announced) end
local version = tonumber(announced or '-1') + 1
redis.call('HSET', policy_key, 'announced', version, 'announced_step', step, 'announced_weights', weights)
return version
