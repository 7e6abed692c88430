-- Store a sample's payload and announce the sample; ack the task with the last sample that it asks for. The first
-- result of an index wins. `payload_field_list`: the payload as field, value, field, value, ...
local group_key, payload_key, samples_key, tasks_key = unpack(keys)
local consumer_group, task_entry, wanted, index, sample, payload_field_list = unpack(args)

local found, state = find_sample(group_key, index)
if found < 0 then return found end
local fresh = LATE
if state == 'pending' and redis.call('EXISTS', payload_key) == 0
  and is_leased(tasks_key, consumer_group, task_entry) then
  redis.call('HSET', payload_key, unpack(payload_field_list))
  redis.call('HSET', group_key, 'sample:' .. index, publish(samples_key, sample))
  redis.call('HINCRBY', group_key, 'published', 1)
  fresh = FRESH
end
local published = tonumber(redis.call('HGET', group_key, 'published') or '0')
if state ~= 'pending' or published >= tonumber(wanted) then
  redis.call('XACK', tasks_key, consumer_group, task_entry)
end
return fresh
