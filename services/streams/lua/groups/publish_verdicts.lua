-- Announce verdicts on a group's samples, in this order, and ack the samples. The first verdict per (group, sample) wins.
-- A sample that no consumer holds is not judged: it was acked, or belongs to an abandoned history. Replies with one
-- effect per verdict.
local group_key, verdicts_key, samples_key = unpack(keys)
local consumer_group, sample_entry_list, index_list, verdict_list = unpack(args)

local effects = find_samples(group_key, index_list)
for at, index in ipairs(index_list) do
  if effects[at] == FRESH then
    if redis.call('XACK', samples_key, consumer_group, sample_entry_list[at]) == 0
      or redis.call('HEXISTS', group_key, 'judged:' .. index) == 1 then
      effects[at] = LATE
    else
      redis.call('HSET', group_key, 'judged:' .. index, publish(verdicts_key, verdict_list[at]))
    end
  end
end
return effects
