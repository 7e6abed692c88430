-- The version under which the weights of a step are to be published: the one that they have, else a new one.
-- `weights`: the digest of the weights. Versions of a step before `oldest_step` are forgotten. A version that was announced
-- for a later step was not committed; it counts as one of this step, so that a newer version never has an older step.
-- `held`: the newest version that a replica holds, -1 if unknown. If it was never announced, a failover lost that, and
-- what has to be published is newer.
local epoch_key, policy_key = unpack(keys)
local fence, step, weights, oldest_step, held = unpack(args)

local current, current_step, current_weights, announced, announced_step, announced_weights = unpack(
  redis.call('HMGET', policy_key, 'version', 'step', 'weights', 'announced', 'announced_step', 'announced_weights'))
local newest = math.max(tonumber(announced or '-1'), tonumber(current or '-1'))
local version
if tonumber(held) <= newest and current_step == step and current_weights == weights then
  version = tonumber(current)
elseif tonumber(held) <= newest and announced_step == step and announced_weights == weights then
  version = tonumber(announced)
else
  version = math.max(newest, tonumber(held)) + 1
  redis.call('HSET', policy_key, 'announced', version, 'announced_step', step, 'announced_weights', weights)
end
local kept = {[tostring(version)] = tonumber(step)}
for other, of_step in pairs(cjson.decode(redis.call('HGET', policy_key, 'version_steps') or '{}')) do
  if tonumber(other) ~= version and of_step >= tonumber(oldest_step) then
    kept[other] = math.min(of_step, tonumber(step))
  end
end
redis.call('HSET', policy_key, 'version_steps', cjson.encode(kept))
return version
