-- Announce a verdict and ack the sample that it judges. The first verdict per (group, sample) wins.
local group_key, verdicts_key, samples_key = unpack(keys)
local consumer_group, sample_entry, index, verdict = unpack(args)

local found = find_sample(group_key, index)
if found < 0 then return found end
if not is_leased(samples_key, consumer_group, sample_entry) then return LATE end
local fresh = redis.call('HSETNX', group_key, 'judged:' .. index, '1')
if fresh == 1 then publish(verdicts_key, verdict) end
redis.call('XACK', samples_key, consumer_group, sample_entry)
return fresh
