-- Announce verdicts on a group's samples, in this order, and ack the samples. The first verdict per (group, sample) wins.
-- A sample that no consumer holds is not judged: it was acked, or belongs to an abandoned history. Replies with one
-- effect per verdict.
local group_key, verdicts_key, samples_key = unpack(keys)
local consumer_group, sample_entry_list, index_list, verdict_list = unpack(args)

local effects = find_samples(group_key, index_list)
local judged, published = samples_with(group_key, 'judged:', index_list), {}
for at, index in ipairs(index_list) do
  if effects[at] == FRESH then
    if redis.call('XACK', samples_key, consumer_group, sample_entry_list[at]) == 0 or judged[index] then
      effects[at] = LATE
    else
      judged[index] = true
      published[#published + 1] = 'judged:' .. index
      published[#published + 1] = publish(verdicts_key, verdict_list[at])
    end
  end
end
set_fields(group_key, published)
return effects
