-- Announce a verdict and ack the sample that it judges. The first verdict per (group, sample) wins.
local group_key, verdicts_key, samples_key = unpack(keys)
local consumer_group, sample_entry, index, verdict = unpack(args)

local found = find_sample(group_key, index)
if found < 0 then return found end
if not is_leased(samples_key, consumer_group, sample_entry) then return LATE end
local fresh = LATE
if redis.call('HEXISTS', group_key, 'judged:' .. index) == 0 then
  redis.call('HSET', group_key, 'judged:' .. index, publish(verdicts_key, verdict))
  fresh = FRESH
end
redis.call('XACK', samples_key, consumer_group, sample_entry)
return fresh
