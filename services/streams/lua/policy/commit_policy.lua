-- Make an announced version current without a rollout step: the run's first, or the first of a resumed run.
-- `weights`: the digest of the weights.
local epoch_key, policy_key = unpack(keys)
local fence, version, step, weights = unpack(args)

if tonumber(redis.call('HGET', policy_key, 'version') or '-1') > tonumber(version) then return 0 end
remember_version(policy_key, version, step, weights)
redis.call('HSET', policy_key, 'version', version, 'step', step, 'weights', weights)
return 1
