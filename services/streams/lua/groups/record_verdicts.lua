-- Record verdicts in their group and ack them; if the last of them decides, also change the group's state. Without
-- verdicts, a decision is on a group whose verdicts are all recorded. Replies with one effect per verdict.
-- `decision`: '' (none yet), more, kept, evaluated, or a release. `rest_task`: the task for the group's other samples,
-- '' unless the decision is `more`. `posterior`: '' for none. `result`: what stays of an evaluated group, else ''.
local epoch_key, group_key, verdicts_key, counters_key, pending_key, unarchived_key, tasks_key, posteriors_key,
  in_flight_key, partials_key = unpack(keys)
local fence, consumer_group, group, decision, rest_task, prompt, posterior, result, verdict_entry_list, index_list,
  verdict_list, token_count_list = unpack(args)

local effects, state = find_samples(group_key, index_list)
local known = state == 'pending' and samples_with(group_key, 'verdict:', index_list) or {}
local acked, recorded, response_tokens = {}, {}, 0
for at, index in ipairs(index_list) do
  if effects[at] == FRESH then
    acked[#acked + 1] = verdict_entry_list[at]
    if state == 'pending' and not known[index] then
      known[index] = true
      recorded[#recorded + 1] = 'verdict:' .. index
      recorded[#recorded + 1] = verdict_list[at]
      response_tokens = response_tokens + tonumber(token_count_list[at])
    else
      effects[at] = LATE
    end
  end
end
set_fields(group_key, recorded)
if #acked > 0 then redis.call('XACK', verdicts_key, consumer_group, unpack(acked)) end
if response_tokens > 0 then redis.call('HINCRBY', counters_key, 'response_tokens', response_tokens) end
if decision == '' or state ~= 'pending' or effects[#effects] == OUTSIDE then return effects end
if #effects > 0 then effects[#effects] = FRESH end
if posterior ~= '' then redis.call('HSET', posteriors_key, prompt, posterior) end
if decision == 'more' then
  if redis.call('HSETNX', group_key, 'extended', '1') == 1 then
    redis.call('HSET', group_key, 'task', rest_task, 'entry', publish(tasks_key, rest_task))
  end
  return effects
end
redis.call('HSET', group_key, 'state', decision)
-- A late call for an earlier task may have published the last sample, and left the pieces of the later one.
redis.call('UNLINK', partials_key)
redis.call('HINCRBY', counters_key, 'judged', 1)
if decision == 'kept' then
  redis.call('HSET', group_key, 'kept_order', redis.call('HINCRBY', counters_key, 'kept_order', 1))
  return effects
end
redis.call('SREM', pending_key, group)
redis.call('HINCRBY', counters_key, decision, 1)
move_tokens(counters_key, in_flight_key, group, decision)
if result ~= '' then redis.call('HSET', group_key, 'result', result) end
retire_group(unarchived_key, group_key)
return effects
