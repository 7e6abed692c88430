-- Publish tasks and count their groups, all or none. A repeated call changes nothing. A reopened group, which a rewind
-- or a withdrawal left pending without a task, gets its task. The lists have one element per group.
local epoch_key, tasks_key, counters_key, pending_key, sampler_state_key, group_keys = unpack(keys)
local fence, sampler_state, group_list, task_list, samples_list = unpack(args)

local fresh = 0
for at, group_key in ipairs(group_keys) do
  local state = redis.call('HGET', group_key, 'state')
  if not state or state == 'reopened' then
    local entry = publish(tasks_key, task_list[at])
    redis.call('HSET', group_key, 'state', 'pending', 'task', task_list[at], 'samples', samples_list[at], 'entry', entry)
    redis.call('HDEL', group_key, 'prompt')
    if not state then
      redis.call('SADD', pending_key, group_list[at])
      redis.call('HINCRBY', counters_key, 'dispatched', 1)
    end
    fresh = fresh + 1
  end
end
if fresh > 0 and sampler_state ~= '' then redis.call('SET', sampler_state_key, sampler_state) end
return fresh
